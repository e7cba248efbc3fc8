"""Quantised weights as stored in GGUF files: rows of blocks of 32 or 256 numbers that share scales."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from paceline.model.gguf.package import gguf_package

BlockKind = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
BLOCK_KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
"""Block types that the native library multiplies without dequantising the matrix."""
BLOCK_SIZES: dict[BlockKind, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Size of one block of each type: (numbers, bytes), as in ggml."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix [rows, cols] in ggml's block format, one row after another."""

    data: Tensor
    """The blocks' bytes: uint8 [rows, bytes per row]."""
    shape: tuple[int, ...]
    kind: BlockKind

    def scales(self) -> Tensor:
        """Return the scales of all blocks as float16 [blocks, 1]; for types whose blocks also have a minimum, scales
        and minima [blocks, 2]."""
        num_bytes = BLOCK_SIZES[self.kind][1]
        first = num_bytes - 2 if self.kind == "Q6_K" else 0
        count = 2 if self.kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
        return self.data.view(-1, num_bytes)[:, first : first + 2 * count].contiguous().view(torch.float16)

    def dense(self) -> Tensor:
        """Dequantise the matrix: float32 [rows, cols]."""
        if self.kind == "Q8_0":  # the format of the shipped drafters, which must not need the gguf package
            scale, codes = self.data.view(-1, BLOCK_SIZES["Q8_0"][1]).tensor_split([2], dim=1)
            dense = codes.contiguous().view(torch.int8).float() * scale.contiguous().view(torch.float16).float()
            return dense.reshape(self.shape)
        ggml = gguf_package()
        values = ggml.dequantize(self.data.numpy(), ggml.GGMLQuantizationType[self.kind])
        return torch.from_numpy(values).reshape(self.shape)


Weight = Tensor | Blocks
AnyWeight = TypeVar("AnyWeight", Tensor, Weight)


def split_rows(weight: AnyWeight, sizes: list[int]) -> list[AnyWeight]:
    """Split a matrix into consecutive groups of rows, the i-th with sizes[i] rows, in the matrix's format."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [select_rows(weight, slice(*pair)) for pair in itertools.pairwise(ends)]


def select_rows(weight: AnyWeight, rows: Tensor | slice) -> AnyWeight:
    """Return the matrix's rows with these indices, in the same format."""
    if isinstance(weight, Tensor):
        return weight[rows]
    data = weight.data[rows]
    blocks: Any = Blocks(data, (len(data), *weight.shape[1:]), weight.kind)
    return blocks


def quantise(weight: Weight, kind: BlockKind) -> Weight:
    """Quantise a dense matrix to blocks of type `kind`.

    A weight is returned unchanged if it is already quantised, is not a matrix, or has rows that do not divide into
    blocks.
    """
    size = BLOCK_SIZES[kind][0]
    if isinstance(weight, Blocks) or weight.dim() != 2 or weight.shape[1] % size:
        return weight
    rows = weight.float().numpy()
    if kind == "Q6_K":
        data = _q6_k(rows)
    elif kind in ("Q4_K", "Q5_K"):
        data = _q4_or_q5_k(rows, bits=4 if kind == "Q4_K" else 5)
    else:
        ggml = gguf_package()
        data = ggml.quantize(rows, ggml.GGMLQuantizationType[kind])
    return Blocks(torch.from_numpy(data), tuple(weight.shape), kind)


def _q4_or_q5_k(rows: np.ndarray, bits: int) -> np.ndarray:
    """Q4_K or Q5_K: blocks of 8 x 32 numbers with a 6-bit factor and minimum each, scaled by two halves."""
    parts = rows.reshape(-1, 8, 32)
    least = np.minimum(parts.min(axis=2), 0.0)
    scale, scales = _in_steps((parts.max(axis=2) - least) / (2**bits - 1), 63)
    minimum, minima = _in_steps(-least, 63)
    shifted = parts + (minimum * minima)[..., None]
    codes = np.clip(np.rint(_over(shifted, (scale * scales)[..., None])), 0, 2**bits - 1).astype(np.uint8)
    factors = np.empty((len(parts), 12), np.uint8)
    factors[:, :4] = scales[:, :4] | scales[:, 4:] >> 4 << 6
    factors[:, 4:8] = minima[:, :4] | minima[:, 4:] >> 4 << 6
    factors[:, 8:] = scales[:, 4:] & 15 | minima[:, 4:] << 4
    low = codes & 15
    packed = [_halves(scale), _halves(minimum), factors]
    if bits == 5:
        packed.append(np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    packed.append((low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128))
    return np.concatenate(packed, axis=1).reshape(len(rows), -1)


def _q6_k(rows: np.ndarray) -> np.ndarray:
    """Q6_K: blocks of 16 x 16 numbers with an 8-bit factor each, scaled by a half-precision number."""
    parts = rows.reshape(-1, 16, 16)
    scale, factors = _in_steps(np.abs(parts).max(axis=2) / 31, 127)
    codes = np.clip(np.rint(_over(parts, (scale * factors)[..., None])), -32, 31).astype(np.int8).view(np.uint8) + 32
    quarters = codes.reshape(-1, 2, 4, 32)  # of 128 columns
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    packed = [low.reshape(-1, 128), high.reshape(-1, 64), factors, _halves(scale)]
    return np.concatenate(packed, axis=1).reshape(len(rows), -1)


def _in_steps(values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Factor values into a half-precision step [n, 1] and integer multiples [n, ...] up to `most`."""
    step = (values.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    return step, np.clip(np.rint(_over(values, step)), 0, most).astype(np.uint8)


def _over(values: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Quotient, 0 where the step is 0."""
    return np.divide(values, steps, out=np.zeros_like(values), where=steps != 0)


def _halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint8)
