"""Where a drafter begins: its config for a target, and its first weights.

`--init` continues a drafter. A new one has the target's own widths, heads and rope, and either random layers or copies of
layers of the target (`start="target"`), which already know how to attend. The final norm is scaled so that the first
loss is about log(vocabulary), not 30.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paceline.draft.checkpoint import DFlashConfig, check_fit, default_layer_ids, new_config, read_checkpoint
from paceline.draft.dflash import DFlashNetwork
from paceline.errors import ConfigError
from paceline.hub import resolve
from paceline.model.checkpoint import load_tensors
from paceline.model.config import DecoderConfig
from paceline.model.target import Target
from paceline.train.losses import Head

FIRST_LOGITS_DEVIATION = 1.0
"""At most: of normal logits that know nothing this alone costs half a nat."""
FIRST_LOSS_MARGIN = 0.5
"""Nats above log(vocabulary) that the first loss may be."""
MEASURED_SLOTS, BISECTIONS = 256, 10


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """What a new drafter looks like; sizes not named are the target's."""

    num_layers: int = 3
    block_size: int = 8
    num_taps: int | None = None
    """Tapped target layers; None takes as many as layers, at least 5 if the target has them."""
    tap_layers: tuple[int, ...] | None = None
    """Exactly these instead."""
    start: Literal["random", "target"] = "random"
    is_causal: bool | None = None
    """Whether slots see only the slots before them; None leaves it to the format: bidirectional."""
    sliding_window: int | None = None
    """All layers see this many positions; None sees everything."""
    mask_token_id: int | None = None
    """None takes the vocabulary's last id."""
    draft_vocab: int | None = None
    """Draft only among this many tokens, the most frequent in the answers; None drafts among all."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.block_size < 2:
            raise ConfigError("a drafter has at least 1 layer and blocks of at least 2")
        if self.start not in ("random", "target"):
            raise ConfigError(f"start must be random or target, not {self.start!r}")
        if self.draft_vocab is not None and self.draft_vocab < 2:
            raise ConfigError("the draft vocabulary must have at least 2 tokens")


def config_for(target: Target, shape: DrafterShape) -> dict[str, Any]:
    """config.json of a new drafter for this target."""
    decoder: DecoderConfig | None = getattr(target, "config", None)
    keys: dict[str, Any] = {}
    if isinstance(decoder, DecoderConfig):
        keys = {
            "num_attention_heads": decoder.num_heads,
            "num_key_value_heads": decoder.num_kv_heads,
            "intermediate_size": decoder.intermediate_size,
            "rms_norm_eps": decoder.rms_norm_eps,
            "rope_theta": decoder.rope_theta,
            "rope_scaling": decoder.rope_scaling,
            "head_dim": decoder.head_dim,
            "max_position_embeddings": decoder.max_position,
        }
    if shape.is_causal is not None:
        keys["is_causal"] = shape.is_causal
    if shape.sliding_window is not None:
        keys |= {"sliding_window": shape.sliding_window, "use_sliding_window": True}
        keys["layer_types"] = ["sliding_attention"] * shape.num_layers
        keys.setdefault("is_causal", False)
    raw = new_config(
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        **{name: value for name, value in keys.items() if value is not None},
    )
    raw["dflash_config"]["target_layer_ids"] = list(_tap_layers(target.num_layers, shape))
    return raw


def _tap_layers(num_layers: int, shape: DrafterShape) -> tuple[int, ...]:
    if shape.tap_layers is not None:
        return shape.tap_layers
    number = min(shape.num_taps or max(5, shape.num_layers), num_layers)
    ids = default_layer_ids(num_layers, number) if num_layers > 4 else range(number)
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in ids}))


def network_for(
    target: Target, target_name: str, shape: DrafterShape, init: Path | None, seed: int
) -> tuple[dict[str, Any], DFlashNetwork]:
    """config.json and float32 weights to start from. Raises DrafterMismatchError when `init` is of another target."""
    if init is not None:
        config, tensors = read_checkpoint(init)
        check_fit(config, target)
        return config.raw, DFlashNetwork.of(config, {name: tensor.float().clone() for name, tensor in tensors.items()}, init)
    raw = config_for(target, shape)
    config = DFlashConfig.from_json(raw)
    check_fit(config, target)
    network = DFlashNetwork.random(config, seed)
    if shape.start == "target":
        _copy_layers(network, target_name)
    return raw, network


@torch.no_grad()
def _copy_layers(network: DFlashNetwork, target_name: str) -> None:
    """Draft layers from target layers spread over its depth; features begin as the mean of the taps.

    Qwen3's query and key norms, which a Llama lacks, get the deviation that the copied projections give for normed inputs.
    """
    shape, num_layers = network.config.shape, network.config.num_target_layers
    if num_layers is None:
        raise ConfigError("the drafter's config does not say how many layers its target has: start from random layers")
    state, layers = network.state_dict(), cast(Any, network.layers)
    wanted: dict[int, list[int]] = {}
    for index in range(shape.num_layers):
        wanted.setdefault(round((index + 0.5) * num_layers / shape.num_layers - 0.5), []).append(index)
    for layer in layers:
        attention = layer.self_attn
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(float("nan"))
    for name, tensor in load_tensors(resolve(target_name)):
        pieces = name.split(".")
        if not name.startswith("model.layers."):
            continue
        for index in wanted.get(int(pieces[2]), ()):
            own = state.get(".".join(["layers", str(index), *pieces[3:]]))
            if own is None or own.shape != tensor.shape:
                raise ConfigError(f"the target's {name} does not fit a draft layer: start from random layers")
            own.copy_(tensor)
    for layer in layers:
        attention = layer.self_attn
        for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
            if norm.weight.isnan().all():
                scaled = projection.weight * layer.input_layernorm.weight
                norm.weight.fill_(float(scaled.square().sum(1).mean().sqrt()))
    eye = torch.eye(shape.hidden_size)
    taps = network.fc.weight.unflatten(1, (-1, shape.hidden_size))
    taps.mul_(0.1).add_(eye[:, None] / taps.shape[1])


@torch.no_grad()
def scale_first_logits(network: DFlashNetwork, hidden_TD: Tensor, head: Head, labels_T: Tensor | None = None) -> float:
    """Scale the final norm so that logits deviate by about one, or less if the first loss asks for it; returns the factor.

    hidden_TD [T, D]: final hidden states of first blocks; labels_T [T]: the tokens they should predict. All slots of a new
    drafter look alike, like the mask token, and favour its neighbours, tokens that nobody writes: logits that deviate by one
    would still cost nats. The loss is convex in the factor: a bisection finds the largest that keeps it near log(vocabulary).
    """
    hidden_TD = hidden_TD[:MEASURED_SLOTS]
    deviation = float(head.logits(hidden_TD).float().std(dim=-1).mean())
    factor = FIRST_LOGITS_DEVIATION / max(deviation, 1e-6)
    if labels_T is not None:
        factor = _largest_factor(hidden_TD, head, labels_T[:MEASURED_SLOTS], factor)
    network.norm.weight.mul_(factor)
    return factor


def _largest_factor(hidden_TD: Tensor, head: Head, labels_T: Tensor, high: float) -> float:
    most = log(len(head.weight_VD)) + FIRST_LOSS_MARGIN

    def is_near(factor: float) -> bool:
        return float(cross_entropy(head.logits(hidden_TD * factor).float(), labels_T)) <= most

    if is_near(high):
        return high
    low = 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_near(middle) else (low, middle)
    return low or high
