"""Who runs: requests wait, get a cache row, are prefilled in chunks, decode, and leave; at any step, in any order.

Each step does at most one prefill chunk and one decode round, so a long prompt delays the others by one chunk at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from paceline.model.kv_cache import KVCache
from paceline.types import Sequence


class Scheduler:
    """First come, first served; a request is admitted when a cache row is free."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def admit(self, choose: Callable[[Sequence, list[int]], int | None] | None = None) -> Iterator[Sequence]:
        """Give free rows to waiting requests, one after another; `choose` may prefer one of the free rows."""
        while self.waiting and self._cache.num_free:
            seq = self.waiting.popleft()
            row = self._cache.allocate(choose(seq, self._cache.free_rows) if choose else None)
            assert row is not None
            seq.row = row
            seq.timings.queue_s = time.perf_counter() - seq.timings.arrival_s
            self.prefilling.append(seq)
            yield seq

    def start_decoding(self, seq: Sequence) -> None:
        """The prompt is in the cache. Rows are kept in order, so that neighbours run as one product."""
        self.prefilling.remove(seq)
        self.running.append(seq)
        self.running.sort(key=lambda running: running.row)

    def remove(self, seq: Sequence) -> None:
        """Take a request out wherever it is and free its row."""
        for group in (self.waiting, self.prefilling, self.running):
            if seq in group:
                group.remove(seq)
        if seq.row >= 0:
            self._cache.free(seq.row)
            seq.row = -1

    def check_integrity(self) -> None:
        """Assert that rows, lengths and lists agree: nothing leaked, nothing shared."""
        holders = [*self.prefilling, *self.running]
        rows = [seq.row for seq in holders]
        assert len(set(rows)) == len(rows), f"a row is shared: {rows}"
        assert set(rows) <= set(range(self._cache.num_rows)), f"a row that is not there: {rows}"
        assert len(rows) + self._cache.num_free == self._cache.num_rows, "a cache row leaked"
        assert all(seq.row == -1 for seq in self.waiting)
        assert not (self.waiting and self._cache.num_free), "a request waits beside a free row"
        for seq in holders:
            assert self._cache.lengths[seq.row] == seq.cached_len, f"row {seq.row}: length differs from its sequence"
            assert seq.finish_reason is None
        for seq in self.running:
            assert seq.cached_len == len(seq.tokens) - 1
            assert 0 < seq.num_output <= seq.params.max_tokens
        for seq in self.prefilling:
            assert seq.cached_len < seq.prompt_len == len(seq.tokens)
