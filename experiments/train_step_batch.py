"""What every side of experiments/train_step_vs_peers.py is given, and what it gives back: settings, one prepared batch, a step.

Random tokens, features, embedding and drafter weights, the same for the same settings whichever environment makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """One measurement; every field is an option of the same name."""

    dtype: str = "bfloat16"
    """bfloat16 or float32"""
    anchors: int = 128
    """per sequence"""
    block_size: int = 8
    length: int = 256
    """tokens per sequence, all of them supervised"""
    sequences: int = 1
    """per step"""
    layers: int = 3
    features: int = 3
    """tapped target layers"""
    hidden_size: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 49152
    loss: str = "decay"
    """decay: cross entropy weighted exp(-(slot - 1) / gamma); dpace: D-PACE weights, alpha 0.5"""
    gamma: float = 4.0
    repeats: int = 7
    threads: int = 2
    device: str = "cpu"
    seed: int = 0
    same_anchors: bool = False
    compile: bool = False
    way: str = ""
    """Only the ways whose name begins so; with one way only, peak_rss_mb is that way's"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the target's pass leaves for one step, on the device; B sequences of S tokens, K features, H wide, V tokens."""

    input_ids: Tensor
    """int64 [B, S]"""
    taps: Tensor
    """[B, S, K * H] in the settings' dtype: the tapped hidden states, side by side"""
    last_hidden: Tensor
    """[B, S, H]: normed and through the head, its argmax at position p is the token at p + 1; only speculators wants it"""
    embedding: Tensor
    """float32 [V, H]; also the head's weight"""
    weights: dict[str, Tensor]
    """float32, the drafter's initial weights, named as in a z-lab checkpoint"""
    anchors: Tensor | None
    """int64 [B, A] with `same_anchors`; otherwise the side draws its own"""

    @property
    def mask_token_id(self) -> int:
        return len(self.embedding) - 1


@dataclass(frozen=True, slots=True)
class Step:
    """A side, ready to train."""

    parameters: list[Tensor]
    """The trainable ones; they hold their gradients after forward_backward."""
    forward_backward: Callable[[], tuple[float, int]]
    """Clears gradients, draws anchors, forward, loss, backward: the loss as the side defines it, and the blocks trained."""
    full_step: Callable[[], tuple[float, int]]
    """The same and clipping and AdamW's step."""
    comparable: Callable[[float, int], float]
    """A loss or gradient norm, given the blocks, as if the loss were sum(weight * CE) / sum(weight) (dpace: sum / blocks)."""


def draft_weights(settings: Settings) -> dict[str, Tensor]:
    hidden, head_dim = settings.hidden_size, settings.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, settings.features * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(settings.layers):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
        shapes[f"{attention}.q_proj.weight"] = (settings.heads * head_dim, hidden)
        shapes |= {f"{attention}.{which}_proj.weight": (settings.kv_heads * head_dim, hidden) for which in "kv"}
        shapes[f"{attention}.o_proj.weight"] = (hidden, settings.heads * head_dim)
        shapes |= {f"{attention}.{which}_norm.weight": (head_dim,) for which in "qk"}
        shapes |= {f"{layer}.mlp.{which}_proj.weight": (settings.intermediate_size, hidden) for which in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, settings.intermediate_size)
        shapes |= {f"{layer}.{which}_layernorm.weight": (hidden,) for which in ("input", "post_attention")}
    normal = torch.Generator().manual_seed(settings.seed + 1)
    return {
        name: torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(0.0, 0.02, generator=normal)
        for name, shape in sorted(shapes.items())
    }


def prepare_batch(settings: Settings) -> Batch:
    generator = torch.Generator().manual_seed(settings.seed)
    size = (settings.sequences, settings.length)
    embedding = torch.empty(settings.vocab_size, settings.hidden_size).normal_(0.0, 0.02, generator=generator)
    input_ids = torch.randint(settings.vocab_size - 1, size, generator=generator)
    taps = torch.randn(*size, settings.features * settings.hidden_size, generator=generator)
    # A random row's product with itself stands far above its products with all other rows.
    last_hidden = embedding[input_ids.roll(-1, dims=1)]
    anchors = None
    if settings.same_anchors:
        last = settings.length - settings.block_size - 1
        spread = torch.linspace(1, last, min(settings.anchors, last)).long()
        anchors = spread.expand(settings.sequences, -1).to(settings.device)
    return Batch(
        input_ids.to(settings.device),
        taps.to(settings.device, settings.torch_dtype),
        last_hidden.to(settings.device, settings.torch_dtype),
        embedding.to(settings.device),
        {name: weight.to(settings.device) for name, weight in draft_weights(settings).items()},
        anchors,
    )
