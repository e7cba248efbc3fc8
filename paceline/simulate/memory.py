"""Whether weights and caches fit: bytes of the target, bytes of one sequence's cache."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.simulate.formats import num_bytes
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import Attention, ModelShape, Precisions


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes asked for and bytes there are."""

    weight_bytes: float
    cache_bytes: float
    """Of all sequences."""
    memory_bytes: float
    """Of all GPUs; 0 when not known."""

    @property
    def fits(self) -> bool:
        return not self.memory_bytes or self.weight_bytes + self.cache_bytes <= self.memory_bytes


def memory_need(shape: ModelShape, deployment: Deployment, batch: int, context: int) -> MemoryNeed:
    """Activations, the drafter and what an engine keeps free are not counted."""
    cache = batch * sum(group.layers * kept_bytes(group, deployment.precisions, context) for group in shape.attention)
    return MemoryNeed(
        weight_bytes(shape, deployment.precisions), cache, float(deployment.machine.memory_bytes * deployment.num_gpus)
    )


def weight_bytes(shape: ModelShape, precisions: Precisions) -> float:
    experts = shape.experts.resident * num_bytes(precisions.experts) if shape.experts else 0.0
    return (shape.dense + shape.embedding) * num_bytes(precisions.weights) + experts


def kept_bytes(group: Attention, precisions: Precisions, context: int) -> float:
    """What one sequence keeps in one layer: a window keeps its own length, a compressed history one entry for `ratio`."""
    if group.kind == "linear":
        return group.state_bytes
    width = group.latent + group.rope if group.kind == "mla" else 2 * group.kv_heads * group.head_dim
    seen = context if group.window is None else min(context, group.window)
    if group.ratio is None:
        return width * num_bytes(precisions.kv) * seen
    history = context / group.ratio
    index = history * group.indexer_dim * num_bytes(precisions.indexer) if group.indexer_heads else 0.0
    recent = 0.0 if group.window is None else float(seen)
    return width * num_bytes(precisions.kv) * (recent + history) + index
