"""Variations of an EAGLE-3 drafter for `mismatch.rank`, which finds a wrong setting: each changes one setting.

Weights do not show the flags of their norms, such as `norm_before_residual`: they fit either value, and the wrong one
only makes drafts worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.draft.eagle3.checkpoint import Eagle3Checkpoint, default_taps
from paceline.model.target import Target

Change = tuple[str, str, Eagle3Checkpoint]
"""(fault that the change would fix, changed setting and its new value as text, changed drafter)."""


def changes(stored: Eagle3Checkpoint, target: Target, thetas: Sequence[float]) -> Iterator[Change]:
    """Yields copies of an EAGLE-3 drafter, each with one setting changed that may be wrong. Layers and token ids that
    cannot be right are not tried. `thetas`: values of rope_theta to try."""
    yield from _layer_ids(stored, target)
    yield from _norms(stored)
    config = stored.config
    for theta in thetas:
        if theta != config.shape.rope_theta:
            shape = replace(config.shape, rope_theta=theta)
            yield "rotary length", f"rope_theta {theta:g}", replace(stored, config=replace(config, shape=shape))
    halves = {
        name: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if _reads_both(name) else tensor
        for name, tensor in stored.tensors.items()
    }
    yield "input order", "attention reads the hidden state first, the embedding second", replace(stored, tensors=halves)
    yield from _vocabulary(stored)


def _layer_ids(stored: Eagle3Checkpoint, target: Target) -> Iterator[Change]:
    config, taps = stored.config, stored.config.tap_layers or default_taps(target.num_layers)
    others = {
        tuple(layer - 1 for layer in taps): "they were counted as hidden states, the embedding the first",
        tuple(layer + 1 for layer in taps): "one was taken off that was not there",
        default_taps(target.num_layers): "as engines choose where a config names none",
    }
    for layers, how in others.items():
        if layers != taps and len(layers) == len(taps) and min(layers) >= 0 and max(layers) < target.num_layers:
            changed = replace(stored, config=replace(config, tap_layers=layers))
            yield "layer ids off by one", f"layers {', '.join(map(str, layers))}: {how}", changed
    turned = {"fc.weight": stored.tensors["fc.weight"].unflatten(1, (len(taps), -1)).flip(1).flatten(1)}
    if config.fc_norm:
        names = [f"fc_norm.{place}.weight" for place in range(len(taps))]
        turned |= {name: stored.tensors[other] for name, other in zip(names, reversed(names), strict=True)}
    yield "layer order", "the last layer's features come first", replace(stored, tensors={**stored.tensors, **turned})


def _norms(stored: Eagle3Checkpoint) -> Iterator[Change]:
    config = stored.config
    for flag in ("norm_output", "norm_before_residual"):
        value = not getattr(config, flag)
        yield "norm flags", f"{flag} {str(value).lower()}", replace(stored, config=replace(config, **{flag: value}))
    for step, change in ((1.0, "1 is added to the norms' weights"), (-1.0, "1 is taken from the norms' weights")):
        tensors = {name: tensor + step if _is_norm(name) else tensor for name, tensor in stored.tensors.items()}
        yield "norm flags", change, replace(stored, tensors=tensors)


def _vocabulary(stored: Eagle3Checkpoint) -> Iterator[Change]:
    ids: Tensor = stored.ids - torch.arange(len(stored.ids))
    if int(ids.min()) >= 0 and len(ids.unique()) == len(ids):
        yield "head", "d2t holds token ids in place of offsets", replace(stored, ids=ids)


def _reads_both(name: str) -> bool:
    return name.startswith("layers.0.self_attn.") and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))


def _is_norm(name: str) -> bool:
    parts = name.split(".")
    return name.endswith(".weight") and any("norm" in part for part in parts[:-1])
