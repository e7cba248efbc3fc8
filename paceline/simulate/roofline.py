"""The roofline: seconds of one target pass, each part the larger of its arithmetic and its memory traffic.

Formulas: the project's performance model (docs/simulate.md), after Finn's "economics of speculative decoding" and Modal's
spec-dec roofline. Units: seconds, bytes, FLOP. B sequences, q positions of each (drafts + 1), S tokens of context, t = B*q.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.formats import arithmetic, num_bytes
from paceline.simulate.shapes import Attention, Experts, ModelShape, Precisions

COLLECTIVE_LATENCY_S = 5e-6
MEASURED_LOCALITY = 0.255
"""Fits the distinct experts measured for 1 to 16 consecutive positions (8 of 256 each) within 2%."""


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and memory traffic of a part of a pass."""

    part: str
    flops: float
    num_bytes: float
    number_format: str
    """Decides the arithmetic rate."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where and how a target runs. Raises ConfigError on impossible values."""

    machine: Machine
    precisions: Precisions
    num_gpus: int = 1
    """Tensor parallel: arithmetic and bandwidth add up, each layer pays two all-reduces."""
    expert_locality: float = 0.0
    """0: every position draws its experts anew; 1: the positions of a sequence share theirs."""
    variant: Literal["whole", "layers"] = "whole"
    """Whether attention takes the larger of arithmetic and reading over all layers at once or for each kind of layer."""
    collective_latency_s: float = COLLECTIVE_LATENCY_S

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"--gpus must be at least 1, not {self.num_gpus}")
        if not 0 <= self.expert_locality <= 1:
            raise ConfigError(f"--expert-locality must be between 0 (uniform) and 1, not {self.expert_locality:g}")
        if self.num_gpus > 1 and not self.machine.link_bytes_per_s:
            raise ConfigError(f"how fast several {self.machine.name} talk to each other is not known: use --gpus 1")

    def flops_per_s(self, number_format: str) -> float:
        rates = self.machine.flops_per_s
        return rates[arithmetic(number_format, rates)] * self.num_gpus

    @property
    def bytes_per_s(self) -> float:
        return self.machine.bytes_per_s * self.num_gpus

    def seconds(self, work: Work) -> tuple[float, float]:
        """Of reading and of arithmetic, at full rates."""
        return work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s(work.number_format)


def distinct_experts(num_routed: int, per_token: int, batch: float, positions: float, locality: float = 0.0) -> float:
    """Expected routed experts that a pass reads, of a layer: E * (1 - (1 - k/E)^(B * q^(1 - locality)))."""
    tokens = batch * positions ** (1.0 - locality)
    return num_routed * (1.0 - (1.0 - per_token / num_routed) ** tokens)


def dense_work(shape: ModelShape, precisions: Precisions, tokens: float) -> Work:
    return Work("projections", 2.0 * shape.dense * tokens, shape.dense * num_bytes(precisions.weights), precisions.weights)


def expert_work(experts: Experts, precision: str, batch: float, positions: float, locality: float) -> Work:
    read = experts.shared + distinct_experts(experts.num_routed, experts.per_token, batch, positions, locality) * experts.each
    return Work("experts", 2.0 * experts.active * batch * positions, read * num_bytes(precision), precision)


def attended(group: Attention, context: float) -> float:
    """Cache entries that one query reads in one layer."""
    if group.kind == "linear":
        return 0.0
    if group.ratio is None:
        return context if group.window is None else min(context, group.window)
    history = float(context // group.ratio)
    return min(context, group.window or 0) + (history if group.topk is None else min(history, group.topk))


def attention_flops(group: Attention, positions: float, context: float) -> float:
    """Of one sequence in one layer."""
    seen = attended(group, context)
    if group.kind == "mla":
        return 2.0 * group.heads * (2 * group.latent + group.rope) * positions * seen
    return 4.0 * group.heads * group.head_dim * positions * seen


def attention_bytes(group: Attention, bytes_each: float, context: float) -> float:
    """Of one sequence in one layer: read once, not once for each position."""
    if group.kind == "linear":
        return group.state_bytes
    width = group.latent + group.rope if group.kind == "mla" else 2 * group.kv_heads * group.head_dim
    return width * bytes_each * attended(group, context)


def attention_work(group: Attention, precisions: Precisions, batch: float, positions: float, context: float) -> Work:
    """All layers of a group, all sequences."""
    times = batch * group.layers
    flops = times * attention_flops(group, positions, context)
    return Work("attention", flops, times * attention_bytes(group, num_bytes(precisions.kv), context), precisions.attention)


def indexer_work(group: Attention, precisions: Precisions, batch: float, positions: float, context: float) -> Work:
    """The indexer's scores over the whole compressed history."""
    times, ratio = batch * group.layers, group.ratio or 1
    flops = times * 2.0 * group.indexer_heads * group.indexer_dim * (context // ratio) * positions
    return Work(
        "attention", flops, times * (context / ratio) * group.indexer_dim * num_bytes(precisions.indexer), precisions.indexer
    )


def attention_works(shape: ModelShape, deployment: Deployment, batch: float, positions: float, context: float) -> list[Work]:
    """Attention and indexer: one work each over all layers (variant "whole"), or one for each group of layers."""
    precisions = deployment.precisions
    main = [attention_work(group, precisions, batch, positions, context) for group in shape.attention]
    indexed = [group for group in shape.attention if group.indexer_heads]
    index = [indexer_work(group, precisions, batch, positions, context) for group in indexed]
    if deployment.variant == "layers":
        return main + index
    return [added(works) for works in (main, index) if works]


def added(works: Iterable[Work]) -> Work:
    """One work of several of the same part and format."""
    found = list(works)
    return Work(found[0].part, sum(work.flops for work in found), sum(work.num_bytes for work in found), found[0].number_format)


def works_of(shape: ModelShape, deployment: Deployment, batch: float, positions: float, context: float) -> list[Work]:
    """Everything a pass has to do."""
    precisions = deployment.precisions
    works = [dense_work(shape, precisions, batch * positions)]
    if shape.experts:
        works.append(expert_work(shape.experts, precisions.experts, batch, positions, deployment.expert_locality))
    return works + attention_works(shape, deployment, batch, positions, context)


def collective_seconds(shape: ModelShape, deployment: Deployment, tokens: float) -> float:
    """Two ring all-reduces of 16-bit activations a layer; 0 on one GPU."""
    num_gpus = deployment.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = 2.0 * (num_gpus - 1) / num_gpus * tokens * shape.hidden_size * 2.0
    return 2.0 * shape.num_layers * (deployment.collective_latency_s + sent / deployment.machine.link_bytes_per_s)


def pass_seconds(
    shape: ModelShape,
    deployment: Deployment,
    batch: float,
    positions: float,
    context: float,
    reading: float = 1.0,
    computing: float = 1.0,
) -> dict[str, float]:
    """Seconds of one pass by part: projections, experts, attention, collectives.

    `reading` and `computing` are factors on the seconds of reading and of arithmetic at the machine's full rates.
    """
    parts = {"projections": 0.0, "experts": 0.0, "attention": 0.0}
    for work in works_of(shape, deployment, batch, positions, context):
        read_s, compute_s = deployment.seconds(work)
        parts[work.part] += max(reading * read_s, computing * compute_s)
    return {**parts, "collectives": collective_seconds(shape, deployment, batch * positions)}
