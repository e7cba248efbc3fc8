"""Quantised weights as a GGUF file holds them: rows of blocks of 32 numbers that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import gguf
import torch
from torch import Tensor

BlockKind = Literal["Q8_0", "Q4_1"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [rows, cols] in ggml's blocks, one row after another."""

    data: Tensor
    """uint8 [rows, bytes of a row]."""
    shape: tuple[int, ...]
    kind: BlockKind

    def dense(self) -> Tensor:
        """The same numbers as float32 [rows, cols]."""
        values = gguf.dequantize(self.data.numpy(), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).reshape(self.shape)


Weight = Tensor | Blocks


def quantise(weight: Weight, kind: BlockKind) -> Weight:
    """Rounded to ggml's blocks of 32 numbers that share a scale; as it is where rows are no whole blocks, or no matrix."""
    if isinstance(weight, Blocks) or weight.dim() != 2 or weight.shape[1] % 32:
        return weight
    data = gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind])
    return Blocks(torch.from_numpy(data), tuple(weight.shape), kind)
