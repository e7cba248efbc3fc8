"""Stores features in 8 bits: half the disk, memory and network traffic of bfloat16.

Each position has one scale per tapped layer. Some dimensions of a language model are a hundred times larger than the
rest, which would leave the rest one or two of the 256 levels; so every feature is first multiplied by its power of two
from `measure_scale`, and divided by it after decoding, both exactly.

    taps8 [S, F] int8, scales [S, L] float32, final [S, D] unchanged (the loss computes probabilities from it)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.features.hidden_states import Features, Form

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8(Form):
    """Storage format that encodes features (hidden states of the tapped layers) with 8 bits per value, and decodes them
    to `dtype`. Final hidden states are stored unchanged."""

    scale_F: Tensor
    """One power of two per feature, from `measure_scale`, by which features are multiplied before they are stored."""
    num_taps: int
    """Number of tapped layers: F / hidden size."""
    dtype: torch.dtype

    @property
    def mark(self) -> str:
        return f"int8 {self.scale_F.log2().int().tolist()}"

    def encode(self, features: Features) -> dict[str, Tensor]:
        taps_SLD = (features.taps_SF.cpu().float() * self.scale_F).unflatten(1, (self.num_taps, -1))
        scales_SL = taps_SLD.abs().amax(-1).clamp(min=1e-30) / LEVELS  # not 0 / 0 for a zero row
        taps8 = (taps_SLD / scales_SL[..., None]).round().to(torch.int8).flatten(1)
        tensors = {"taps8": taps8, "scales": scales_SL}
        return tensors if features.final_SD is None else tensors | {"final": features.final_SD.cpu().clone()}

    def decode(self, tensors: dict[str, Tensor]) -> Features:
        taps_SLD = tensors["taps8"].float().unflatten(1, (self.num_taps, -1)) * tensors["scales"][..., None]
        return Features((taps_SLD.flatten(1) / self.scale_F).to(self.dtype), tensors.get("final"))

    def bytes_of(self, num_bytes: int) -> int:
        taps = len(self.scale_F)
        return num_bytes - taps * self.dtype.itemsize + taps + 4 * self.num_taps
