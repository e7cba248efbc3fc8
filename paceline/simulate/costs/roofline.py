"""The roofline model: seconds of one target pass. Each part takes the larger of its arithmetic and its memory traffic.

Formulas: the project's performance model (docs/explanation/prediction.md), after Finn's "economics of speculative
decoding" and Modal's spec-dec roofline. Units: seconds, bytes, FLOP. B sequences, q positions of each (drafts + 1), S
tokens of context, t = B*q.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.bounds import Count, Share, check
from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs.shapes import Attention, ModelShape, Precisions, arithmetic, num_bytes

COLLECTIVE_LATENCY_S = 5e-6
MOST_GPUS = 1024
"""Largest number of GPUs among which heads are divided."""
MEASURED_LOCALITY = 0.255
"""Expert locality that predicts the measured distinct experts of 1 to 16 consecutive positions (8 of 256 each) within
2%."""


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic (FLOP) and memory traffic (bytes) of one part of a pass, such as attention."""

    part: str
    flops: float
    num_bytes: float
    number_format: str
    """Number format of the arithmetic, which determines its rate."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Machine, number formats and parallelism on which a target runs. Raises ConfigError for impossible values."""

    machine: Machine
    precisions: Precisions
    num_gpus: Count = 1
    """Number of tensor-parallel GPUs: arithmetic and bandwidth add up, each layer needs two all-reduces."""
    expert_locality: Share = 0.0
    """0: each position selects its experts independently; 1: all positions of a sequence use the same experts."""
    per_layer: bool = False
    """True: attention takes the larger of its time for arithmetic and its time for reading memory in each group of
    equal layers. False: the larger of the two sums over all layers."""

    def __post_init__(self) -> None:
        check(self)
        if self.num_gpus > 1 and not self.machine.link_bytes_per_s > 0:
            raise ConfigError(f"how fast several {self.machine.name} talk to each other is not known: use --gpus 1")

    def flops_per_s(self, number_format: str) -> float:
        rates = self.machine.flops_per_s
        return rates[arithmetic(number_format, rates)] * self.num_gpus

    @property
    def bytes_per_s(self) -> float:
        return self.machine.bytes_per_s * self.num_gpus

    def seconds(self, work: Work) -> tuple[float, float]:
        """Returns (seconds of reading, seconds of arithmetic) of this work at the machine's full rates."""
        return work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s(work.number_format)


def distinct_experts(num_routed: int, per_token: int, batch: float, positions: float, locality: float = 0.0) -> float:
    """Returns the expected number of distinct routed experts that a pass reads in a layer: E * (1 - (1 - k/E)^(B * q^(1
    - locality))), with E routed experts, k per token, B sequences and q positions of each. With `locality` 0, each
    position selects its experts independently; with 1, all positions of a sequence use the same."""
    tokens = batch * positions ** (1.0 - locality)
    return num_routed * (1.0 - (1.0 - per_token / num_routed) ** tokens)


def attended(group: Attention, context: float) -> float:
    """Returns the number of cache entries that one query reads in one layer of `group` (layers with equal attention),
    with `context` cached tokens; 0 for linear attention."""
    if group.kind == "linear":
        return 0.0
    if group.ratio is None:
        return context if group.window is None else min(context, group.window)
    history = float(context // group.ratio)
    return min(context, group.window or 0) + (history if group.topk is None else min(history, group.topk))


def attention_work(group: Attention, precisions: Precisions, batch: float, positions: float, context: float) -> Work:
    """Returns the work of attention in one pass, over all layers of `group` and all `batch` sequences. Each sequence
    has `positions` new and `context` cached tokens; its cache is read once, for all its positions."""
    times, seen = batch * group.layers, attended(group, context)
    if group.kind == "linear":
        return Work("attention", 0.0, times * group.state_bytes, precisions.attention)
    each = 2.0 * (2 * group.latent + group.rope) if group.kind == "mla" else 4.0 * group.head_dim
    flops = times * each * group.heads * positions * seen
    return Work("attention", flops, times * group.entry_values * num_bytes(precisions.kv) * seen, precisions.attention)


def indexer_work(group: Attention, precisions: Precisions, batch: float, positions: float, context: float) -> Work:
    """Returns the work of the indexer in one pass, over all layers of `group` and all `batch` sequences. The indexer of
    sparse attention scores all compressed cache entries of a sequence (one per `group.ratio` tokens) and selects those
    to read. Each sequence has `positions` new and `context` cached tokens."""
    times, ratio = batch * group.layers, group.ratio or 1
    flops = times * 2.0 * group.indexer_heads * group.indexer_dim * (context // ratio) * positions
    read = times * (context / ratio) * group.indexer_dim * num_bytes(precisions.indexer)
    return Work("attention", flops, read, precisions.indexer)


def works_of(shape: ModelShape, deployment: Deployment, batch: float, positions: float, context: float) -> list[Work]:
    """Returns the work of each part of a target pass: projections, experts, attention, and the indexer of sparse
    attention. Each of `batch` sequences has `positions` new and `context` cached tokens. Attention and the indexer have
    one entry each, or with `deployment.per_layer` one for each group of equal layers."""
    precisions, tokens = deployment.precisions, batch * positions
    works = [
        Work("projections", 2.0 * shape.dense * tokens, shape.dense * num_bytes(precisions.weights), precisions.weights)
    ]
    if experts := shape.experts:
        distinct = distinct_experts(experts.num_routed, experts.per_token, batch, positions, deployment.expert_locality)
        read = (experts.shared + distinct * experts.each) * num_bytes(precisions.experts)
        works.append(Work("experts", 2.0 * experts.active * tokens, read, precisions.experts))
    main = [attention_work(group, precisions, batch, positions, context) for group in shape.attention]
    indexed = [group for group in shape.attention if group.indexer_heads]
    index = [indexer_work(group, precisions, batch, positions, context) for group in indexed]
    if deployment.per_layer:
        return works + main + index
    for group_works in filter(None, (main, index)):
        flops, read = sum(work.flops for work in group_works), sum(work.num_bytes for work in group_works)
        works.append(Work("attention", flops, read, group_works[0].number_format))
    return works


def collective_seconds(shape: ModelShape, deployment: Deployment, tokens: float) -> float:
    """Returns the seconds of communication between GPUs in a pass over `tokens` tokens (of all sequences together): two
    ring all-reduces of 16-bit activations per layer. 0 on one GPU."""
    num_gpus = deployment.num_gpus
    if num_gpus == 1:
        return 0.0
    sent = 2.0 * (num_gpus - 1) / num_gpus * tokens * shape.hidden_size * 2.0
    return 2.0 * shape.num_layers * (COLLECTIVE_LATENCY_S + sent / deployment.machine.link_bytes_per_s)


def pass_seconds(
    shape: ModelShape,
    deployment: Deployment,
    batch: float,
    positions: float,
    context: float,
    reading: float = 1.0,
    computing: float = 1.0,
) -> dict[str, float]:
    """Returns the seconds of one target pass by part: {"projections", "experts", "attention", "collectives"}; the last
    is communication between GPUs. Each of `batch` sequences has `positions` new and `context` cached tokens. `reading`
    and `computing`: factors on the seconds of reading and of arithmetic at the machine's full rates."""
    parts = {"projections": 0.0, "experts": 0.0, "attention": 0.0}
    for work in works_of(shape, deployment, batch, positions, context):
        read_s, compute_s = deployment.seconds(work)
        parts[work.part] += max(reading * read_s, computing * compute_s)
    return {**parts, "collectives": collective_seconds(shape, deployment, batch * positions)}


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a target's weights and caches need, and bytes of memory that its GPUs have."""

    weight_bytes: float
    cache_bytes: float
    """Bytes of the caches of all sequences."""
    memory_bytes: float
    """Memory of all GPUs together in bytes; 0 if unknown."""

    @property
    def fits(self) -> bool:
        return not self.memory_bytes or self.weight_bytes + self.cache_bytes <= self.memory_bytes


def memory_need(shape: ModelShape, deployment: Deployment, batch: int, context: int) -> MemoryNeed:
    """Returns how many bytes the weights and the caches of `batch` sequences of `context` tokens need, and how much
    memory the GPUs have. Activations, the drafter and the engine's reserve are not counted."""
    precisions = deployment.precisions
    weights = (shape.dense + shape.embedding) * num_bytes(precisions.weights)
    weights += shape.experts.resident * num_bytes(precisions.experts) if shape.experts else 0.0
    cache = batch * sum(group.layers * kept_bytes(group, precisions, context) for group in shape.attention)
    return MemoryNeed(weights, cache, float(deployment.machine.memory_bytes * deployment.num_gpus))


def kept_bytes(group: Attention, precisions: Precisions, context: int) -> float:
    """Returns the cache bytes of one sequence of `context` tokens in one layer of `group` (layers with equal
    attention). A compressed history takes one entry per `group.ratio` tokens; linear attention has only its state.
    Layers that read other layers' entries store nothing."""
    if group.shared:
        return 0.0
    if group.kind == "linear":
        return group.state_bytes
    entry_bytes = group.entry_values * num_bytes(precisions.kv)
    seen = context if group.window is None else min(context, group.window)
    if group.ratio is None:
        return entry_bytes * seen
    history = context / group.ratio
    index = history * group.indexer_dim * num_bytes(precisions.indexer) if group.indexer_heads else 0.0
    return entry_bytes * (history if group.window is None else seen + history) + index


def shares_evenly(shape: ModelShape) -> list[int]:
    """Returns the numbers of GPUs, up to MOST_GPUS, on which vLLM and SGLang can run the model by tensor parallelism,
    which divides the attention heads among GPUs. Such a number divides the number of query heads. It also divides the
    number of key heads, or is a multiple of it. The list is empty if the numbers of heads are unknown."""
    most = min(max((group.heads for group in shape.attention), default=0), MOST_GPUS)
    return [number for number in range(1, most + 1) if all(_is_even(group, number) for group in shape.attention)]


def check_shares(shape: ModelShape, num_gpus: int) -> None:
    """Raises ConfigError if the model's heads cannot be divided among `num_gpus` GPUs."""
    group = next((each for each in shape.attention if not _is_even(each, num_gpus)), None)
    if group is not None:
        keys = f" over {group.kv_heads} key heads" if group.kind == "gqa" else ""
        raise ConfigError(
            f"--gpus {num_gpus}: {shape.name} has {group.heads} heads{keys}, which {num_gpus} GPUs cannot share "
            f"evenly: choose from {', '.join(map(str, shares_evenly(shape)))}"
        )


def _is_even(group: Attention, number: int) -> bool:
    keys = group.kv_heads if group.kind == "gqa" else 0
    return not group.heads or (group.heads % number == 0 and not (keys and keys % number and number % keys))
