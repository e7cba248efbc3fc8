"""Attention of passes in CUDA graphs, with row lengths read on the device: a Triton kernel on CUDA, and an equivalent
PyTorch function, `twin`, for other devices.

A pass has J tokens for each of the cache rows 0..B-1. One captured pass serves every length and does work proportional
to it. The kernel splits each row's positions among programs and combines their partial results (Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.model.torch.attention import PLAIN, Scores, attend_rows
from paceline.model.torch.kernels import available
from paceline.model.torch.kernels.layer import next_power

MOST_BITS = 32
"""Maximum new tokens per row if a bit mask gives which of them each token attends to."""
PROGRAMS = 264
"""Minimum number of Triton programs per launch: two per multiprocessor of an H100."""
H100_SHARED = 227 * 1024
MOST_POSITIONS = 2048
"""Maximum positions of a row that one program reads, for any number of rows."""
CHUNK = 32
"""Number of splits (parts of a row's positions) that are combined at a time."""
_LOADED = 64 * 128
"""Elements of a block of keys, and of a block of values."""


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """The cache positions that each of J new tokens of B rows attends to: all positions before the row's start and some
    of the row's new tokens, limited by the sliding window if there is one.

    Which new tokens: with `bits_BJ`, those whose bits are set (trees); else all up to the token itself if `is_causal`,
    or all J. Padding tokens are never attended to.
    """

    starts_B: Tensor
    counts_B: Tensor
    count: int
    """J: number of new tokens per row, including padding."""
    window: int | None = None
    """Sliding window in positions, including the token's own; it also limits visible later positions. None:
    unlimited."""
    is_causal: bool = True
    depths_BJ: Tensor | None = None
    """Position of each new token, counted from its row's start (its depth in a tree). None: 0, 1, 2, ..."""
    bits_BJ: Tensor | None = None
    """Bit i is set if the token attends to new token i of its row. Used with `depths_BJ`, for up to MOST_BITS
    tokens."""

    def mask(self, length: int) -> Tensor:
        """Return which of the first `length` cache positions each token attends to: bool [B, J, length]."""
        slot_J = torch.arange(self.count, device=self.starts_B.device)
        place_BS = torch.arange(length, device=self.starts_B.device) - self.starts_B[:, None]
        at_BS = place_BS.clamp(0, self.count - 1)  # valid indices; other places are masked below
        if self.bits_BJ is not None:
            own = (self.bits_BJ[:, :, None] >> at_BS[:, None]) & 1 != 0
        else:
            own = place_BS[:, None] <= (slot_J if self.is_causal else torch.full_like(slot_J, self.count))[:, None]
        seen_BJS = (own & (place_BS < self.counts_B[:, None])[:, None]) | (place_BS < 0)[:, None]
        if self.window is not None:
            depths_BJ = slot_J.expand(len(self.starts_B), -1) if self.depths_BJ is None else self.depths_BJ
            depths_BS = torch.where(place_BS < 0, place_BS, depths_BJ.gather(1, at_BS))
            distance = depths_BJ[:, :, None] - depths_BS[:, None]
            seen_BJS = seen_BJS & (distance < self.window) & (distance > -self.window)
        return seen_BJS


def twin(query_THD: Tensor, keys: Tensor, values: Tensor, sight: Sight, scores: Scores = PLAIN) -> Tensor:
    """Compute `attend`, with the same arguments, in PyTorch operations: masked products over all cache positions."""
    seen_BJS = sight.mask(keys.shape[2])
    mask = torch.zeros(seen_BJS.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~seen_BJS, float("-inf"))
    mask_B1TS = mask.repeat(1, query_THD.shape[1] // keys.shape[1], 1)[:, None]
    # A mask does not remove NaN in unused positions, and a token without visible keys would be 0 / 0.
    dead_B1S1 = ~seen_BJS.any(1)[:, None, :, None]
    keys, values = (cache[: len(mask)].masked_fill(dead_B1S1, 0.0) for cache in (keys, values))
    out_TX = attend_rows(query_THD, keys, values, mask_B1TS, scores)
    return out_TX.masked_fill(~seen_BJS.any(2).view(-1, 1), 0.0)


def attend(query_THD: Tensor, keys: Tensor, values: Tensor, sight: Sight, scores: Scores = PLAIN) -> Tensor:
    """Compute the attention output [B * J, heads * head_dim] of queries [B * J, heads, head_dim], row after row.

    keys, values: one layer of the cache, [rows, kv_heads, positions, head_dim], with new tokens already written; rows
    0..B-1 are read. A token without visible positions yields zeros.
    """
    if not available.can_use(query_THD.device):
        return twin(query_THD, keys, values, sight, scores)
    return run_kernels(query_THD, keys, values, sight, scores)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of the Triton attention kernel: numbers of queries, keys and channels that a program reads at a time.
    `warps` and `stages` are launch options."""

    members: int
    """Number of stacked queries per program: BLOCK_M."""
    keys: int
    channels: int
    warps: int
    stages: int

    @classmethod
    def of(cls, group: int, count: int, head_dim: int, dtype: torch.dtype, shared: int = H100_SHARED) -> Tiles:
        """Choose the block sizes for a pass. group: query heads per key head; count: tokens per row; dtype: of the
        cache; shared: bytes of shared memory per program."""
        channels, stacked = max(16, next_power(head_dim)), max(16, next_power(group * count))
        if dtype.itemsize > 2:  # float32 products run without tensor cores, from registers
            return cls(min(stacked, 32), 32, channels, warps=4, stages=1)
        keys = min(64, max(32, _LOADED // channels))
        sizes = [(members, stages) for members in (128, 64, 32, 16) for stages in (3, 2)]
        # Bytes of 16-bit queries, and of `stages` blocks of keys and of values.
        fitting = [size for size in sizes if 2 * channels * (min(stacked, size[0]) + 2 * size[1] * keys) <= shared]
        most, stages = fitting[0] if fitting else (16, 1)
        members = min(stacked, most)
        return cls(members, keys, channels, warps=8 if members > 64 else 4, stages=stages)

    def splits(self, pairs: int, stacked: int, positions: int) -> int:
        """Return the number of parts (splits) into which a row's positions are divided, so that several programs share
        the work. This is the larger of two numbers, but at most one part per block of keys:
        - the number that gives about PROGRAMS programs in total, to occupy the GPU;
        - the number that gives parts of at most MOST_POSITIONS positions.

        pairs: number of (row, key head) pairs; stacked: queries per pair, which is query heads per key head times
        tokens per row; positions: maximum positions of a row.
        """
        programs = pairs * -(-stacked // self.members)
        # Rows differ in length and may be idle: a single program must not walk a long row alone.
        num_splits = max(PROGRAMS // programs, -(-positions // MOST_POSITIONS))
        return max(1, min(num_splits, -(-positions // self.keys)))


@cache
def _shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory per program; an H100's under Triton's interpreter."""
    if device.type != "cuda":
        return H100_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def run_kernels(query_THD: Tensor, keys: Tensor, values: Tensor, sight: Sight, scores: Scores) -> Tensor:
    """Compute `attend`, with the same arguments, by the Triton kernels."""
    from paceline.model.torch.kernels.triton import attend as attend_triton

    launched: Any = attend_triton
    (tokens, heads, head_dim), kv_heads, positions = query_THD.shape, *keys.shape[1:3]
    assert all(tensor.stride(-1) == 1 for tensor in (query_THD, keys, values))
    count, num_rows, group = sight.count, tokens // sight.count, heads // kv_heads
    pairs, stacked = num_rows * kv_heads, group * count
    tiles = Tiles.of(group, count, head_dim, keys.dtype, _shared_bytes(keys.device))
    splits = tiles.splits(pairs, stacked, positions)
    one = {"dtype": torch.float32, "device": query_THD.device}
    # `combine_splits` reads a query's weights and maxima of all splits at once: splits come last there.
    sums = torch.empty(pairs, splits, stacked, head_dim, **one)
    weights, maxima = (torch.empty(pairs, stacked, splits, **one) for _ in range(2))
    out_TX = torch.empty(tokens, heads * head_dim, dtype=query_THD.dtype, device=query_THD.device)
    shape = {"GROUP": group, "HEAD": head_dim, "BLOCK_D": tiles.channels, **available.overlap_options(query_THD.device)}
    with torch.cuda.device_of(query_THD):
        launched.attend_split[-(-stacked // tiles.members), splits, pairs](
            query_THD, keys, values, sight.starts_B, sight.counts_B, sight.depths_BJ, sight.bits_BJ, sums, weights,
            maxima,
            count, kv_heads, *query_THD.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            head_dim**-0.5 if scores.scale is None else scores.scale, scores.cap, sight.window or 0,
            **shape, BLOCK_M=tiles.members, BLOCK_N=tiles.keys, HAS_BITS=sight.bits_BJ is not None,
            IS_CAUSAL=sight.is_causal, HAS_WINDOW=sight.window is not None, HAS_CAP=scores.cap != 0.0,
            PRECISION="ieee", STAGES=tiles.stages, num_warps=tiles.warps,
        )  # fmt: skip
        launched.combine_splits[stacked, pairs](
            sums, weights, maxima, scores.sinks_H, out_TX, count, kv_heads, splits,
            **shape, CHUNK=CHUNK, HAS_SINKS=scores.sinks_H is not None,
            num_warps=4,
        )  # fmt: skip
    return out_TX
