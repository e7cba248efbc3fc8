"""The KV cache of a target or drafter: a fixed number of rows with room for `max_len` positions each, allocated once.

A row belongs to one sequence from `allocate` to `free`. A forward pass appends; `rollback` removes rejected positions
by reducing the row's length, and later passes overwrite them.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.errors import MemoryBudgetError, reraised
from paceline.model.sharing import cache_tensor


class KVCache(ABC):
    """Base class of KV caches: allocates rows and counts the cached tokens of each. Subclasses hold keys and values."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.num_rows = num_rows
        self.max_len = max_len
        self.lengths = [0] * num_rows
        self.generations = [0] * num_rows
        """Number of allocations of each row so far. If it has changed, data remembered about the row's contents is
        invalid."""
        # Lowest last, and allocated first: a recorded pass computes all rows up to the highest one in use.
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the whole cache when all rows are full."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> list[int]:
        return list(self._free)

    def allocate(self, wanted: int | None = None) -> int | None:
        """Allocate a free row with length 0; returns its index, or None if no row is free. `wanted`: the row to
        allocate, which must be free; None: the lowest-numbered free row."""
        if not self._free:
            return None
        row = self._free[-1] if wanted is None else wanted
        self._free.remove(row)
        self.lengths[row] = 0
        self.generations[row] += 1
        return row

    def adopt(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` positions (keys and values) of row `source` to the empty row `row`, so that a common
        prefix is not recomputed. `source` may be a freed row that was not allocated again."""
        raise NotImplementedError(f"{type(self).__name__} does not copy rows")

    def free(self, row: int) -> None:
        """Release a row: its length becomes 0, and it may be allocated again."""
        assert row not in self._free, f"row {row} freed twice"
        self.lengths[row] = 0
        # The contents stay: `adopt` may still copy them, until the row is allocated again.
        self._free.append(row)
        self._free.sort(reverse=True)

    def append(self, rows: list[int], counts: list[int]) -> None:
        """Lengthen each row by its count, after a pass wrote that many new positions."""
        for row, count in zip(rows, counts, strict=True):
            assert self.lengths[row] + count <= self.max_len, f"row {row} overflows"
            self.lengths[row] += count

    def rollback(self, rows: list[int], lengths: list[int]) -> None:
        """Shorten each row to its number in `lengths`, which drops rejected positions at the end."""
        for row, length in zip(rows, lengths, strict=True):
            assert 0 <= length <= self.lengths[row], f"row {row}: rollback from {self.lengths[row]} to {length}"
            self.lengths[row] = length

    def keep(self, rows: list[int], starts: list[int], slots: list[list[int]]) -> None:
        """Keep the accepted positions of draft trees after a verification pass, and drop the rejected ones.

        Row `rows[i]` had `starts[i]` positions before the pass. `slots[i]` lists the accepted positions as ascending
        offsets from `starts[i]`: a path from the tree's root. Their keys and values are moved together, so that they
        directly follow the first `starts[i]` positions.
        """
        for row, start, own_slots in zip(rows, starts, slots, strict=True):
            assert own_slots == sorted(set(own_slots)) and all(
                0 <= slot < self.lengths[row] - start for slot in own_slots
            )
            if own_slots != list(range(len(own_slots))):
                self._move(row, start, own_slots)
        self.rollback(rows, [start + len(own_slots) for start, own_slots in zip(starts, slots, strict=True)])

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        """Copy the entries at start + slots[i] to start + i."""
        raise NotImplementedError(f"{type(self).__name__} does not move positions")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on CPU memory-mapped, so that pages are allocated as rows fill."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # one huge page spans many rows: a single token would allocate it whole
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # keeps `pages` alive


class LayeredKVCache(KVCache):
    """KV cache of a model whose layers differ in the number and size of their heads.

    `keys` and `values` have one tensor [rows, kv_heads, max_len + slack, head_dim] per layer. A layer that reads
    another layer's keys and values shares its tensors. `slack`: number of scratch positions after each row, into which
    passes of fixed shape write the keys and values of padding tokens.
    """

    def __init__(
        self,
        heads: list[tuple[int, int]],
        sources: list[int],
        num_rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        slack: int = 0,
    ) -> None:
        """`heads`: (number of key heads, head size) of each layer; `sources`: the layer whose keys it reads."""
        super().__init__(num_rows, max_len)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        failure = f"no memory for a KV cache of {num_rows} rows of {max_len} tokens"
        with reraised(MemoryBudgetError, failure, "lower max_batch or max_len", RuntimeError, MemoryError, OSError):
            for layer, (num_kv_heads, head_dim) in enumerate(heads):
                shape = (num_rows, num_kv_heads, max_len + slack, head_dim)
                for tensors in (self.keys, self.values):
                    is_own = sources[layer] == layer  # a source comes before its readers
                    tensors.append(_zeros(shape, dtype, device) if is_own else tensors[sources[layer]])
        owners = sorted(set(sources))
        self._stored = [tensors[layer] for tensors in (self.keys, self.values) for layer in owners]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._stored)

    def adopt(self, source: int, row: int, length: int) -> None:
        assert self.lengths[row] == 0 and length <= self.max_len
        if source != row:
            for tensor in self._stored:
                tensor[row, :, :length] = tensor[source, :, :length]
        self.lengths[row] = length

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        for tensor in self._stored:
            # The list makes a copy first: source and destination may overlap.
            tensor[row, :, start : start + len(slots)] = tensor[row, :, [start + slot for slot in slots]]


_TOGETHER = 16
"""Number of adjacent positions that a layout may interleave: the native library stores sixteen keys together."""


class StaticKVCache(KVCache):
    """KV cache of fixed size. `keys` and `values` are tensors [layers, rows, kv_heads, max_len + slack, head_dim].
    `slack`: number of scratch positions after each row, into which passes of fixed shape write the keys and values of
    padding tokens."""

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        slack: int = 0,
    ) -> None:
        super().__init__(num_rows, max_len)
        shape = (num_layers, num_rows, num_kv_heads, max_len + slack, head_dim)
        failure = f"no memory for a KV cache of {num_rows} rows of {max_len} tokens"
        with reraised(MemoryBudgetError, failure, "lower max_batch or max_len", RuntimeError, MemoryError, OSError):
            self.keys, self.values = (
                cache_tensor(lambda: _zeros(shape, dtype, device), shape, dtype, str(device), which) for which in "kv"
            )

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.nbytes

    def adopt(self, source: int, row: int, length: int) -> None:
        assert self.lengths[row] == 0 and length <= self.max_len
        if source != row:
            positions = self.keys.shape[3]
            whole = min(-(-length // _TOGETHER) * _TOGETHER, positions)  # some layouts interleave positions
            for tensor in (self.keys, self.values):
                flat = tensor.flatten(3)  # a view: the cache is contiguous
                size = whole * tensor.shape[4]
                flat[:, row, :, :size] = flat[:, source, :, :size]
        self.lengths[row] = length

    def _move(self, row: int, start: int, slots: list[int]) -> None:
        for tensor in (self.keys, self.values):
            # PyTorch selects `row` before the list applies; NumPy would move the list's dimension to the front.
            tensor[:, row, :, start : start + len(slots)] = tensor[:, row, :, [start + slot for slot in slots]]
