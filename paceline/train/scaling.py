"""Features brought to one scale while a drafter learns, exactly undone in every checkpoint.

Hidden states of a language model differ by orders of magnitude: in the built-in model later layers are ten times louder than
early ones, a few dimensions a hundred times louder than the rest, and half of their energy is a mean that says nothing. An
optimiser that moves every weight by about the same step (Adam, Muon) then learns from the loud ones above all.

So each feature is multiplied by a power of two near one over its size, and the column of `fc` that reads it is trained in those
units. Powers of two are exact in every format: the drafter that is saved computes bit for bit what was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.draft.dflash import DFlashNetwork
from paceline.errors import CacheError, reraised
from paceline.runlog import whole_file
from paceline.train.dataset import Document
from paceline.train.features import Features, FeatureSource

NUM_SAMPLED = 32
"""Documents that the scale is measured on."""
LOUD = 3.0
"""Positions whose norm is this times the median are left out of the measurement: attention sinks, one in some hundred."""


class ScaledFeatures:
    """A feature source with every feature multiplied by its own power of two."""

    def __init__(self, source: FeatureSource, scale_F: Tensor) -> None:
        self._source, self._scale_F = source, scale_F

    def of(self, number: int) -> Features:
        features = self._source.of(number)
        return Features(features.taps_SF * self._scale_F.to(features.taps_SF.device, features.taps_SF.dtype), features.final_SD)


def measure_scale(source: FeatureSource, documents: list[Document]) -> tuple[Tensor, Tensor]:
    """(scale [F], powers of two; mean [F] of the scaled features), over quiet positions of evenly spread documents."""
    step = max(1, len(documents) // NUM_SAMPLED)
    taps = [source.of(number).taps_SF.float().cpu() for number in range(0, len(documents), step)][:NUM_SAMPLED]
    sample_SF = torch.cat(taps)
    norm_S = sample_SF.norm(dim=1)
    quiet_SF = sample_SF[norm_S <= LOUD * norm_S.median()]
    size_F = quiet_SF.square().mean(0).sqrt().clamp(min=1e-6)
    scale_F = torch.exp2(-size_F.log2().round())
    return scale_F, quiet_SF.mean(0) * scale_F


def stored_scale(file: Path, source: FeatureSource, documents: list[Document], is_first: bool) -> tuple[Tensor, Tensor]:
    """As `measure_scale`, measured once a run: what a resumed run read back would mean otherwise is another unit.

    Raises CacheError when the file is damaged or cannot be written (by the first process).
    """
    with reraised(CacheError, f"{file} cannot be read", "use another --out", OSError, SafetensorError, KeyError):
        if file.is_file():
            stored = load_file(file)
            return stored["scale"], stored["mean"]
        scale_F, mean_F = measure_scale(source, documents)
    if is_first:
        with whole_file(file, "use another --out") as scratch:
            save_file({"scale": scale_F, "mean": mean_F}, scratch)
    return scale_F, mean_F


@torch.no_grad()
def train_in_scaled_units(network: DFlashNetwork, scale_F: Tensor) -> None:
    """From now on `fc.weight` reads scaled features, while `state_dict` gives and `load_state_dict` takes the real one."""
    fc = network.fc
    scale_F = scale_F.to(fc.weight.device)

    def save(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * scale_F

    def load(module: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / scale_F.to(state[f"{prefix}weight"].dtype)

    fc.weight.div_(scale_F)
    fc.register_state_dict_post_hook(save)
    fc.register_load_state_dict_pre_hook(load)


@torch.no_grad()
def begin_without_mean(network: DFlashNetwork, mean_F: Tensor) -> None:
    """First weights of `fc`, in scaled units: alike for all features, and blind to their mean."""
    weight, mean_F = network.fc.weight, mean_F.to(network.fc.weight.device)
    weight.mul_(0.02 / weight.std(dim=0, keepdim=True).clamp(min=1e-12))
    weight.sub_(torch.outer(weight @ mean_F, mean_F) / mean_F.square().sum())
