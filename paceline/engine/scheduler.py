"""Scheduler: requests wait, get a cache row, are prefilled in chunks, decode, and leave; at any step, in any order.
Each step does at most one prefill chunk and one decode round, so a long prompt delays the others by one chunk at a
time.

Prompts with a common prefix share work: the prefix's keys, values and drafter features are copied between rows. The
tokens in a row's cache are remembered after its sequence has ended, until the row is allocated again. A new sequence
reuses the longest prefix that any row holds, without a copy if its own row holds it. If another request is still
prefilling a longer common prefix, the copy is deferred until the new sequence's own prefill starts. Prefixes are reused
only for batch-invariant targets (`Target.is_width_invariant`), where reuse does not change outputs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from paceline.draft.pool import Pool
from paceline.model.kv_cache import KVCache
from paceline.model.target import Target
from paceline.report.statistics import num_common
from paceline.types import Sequence


class Scheduler:
    """First-come first-served scheduler: a request is admitted as soon as a cache row is free."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def admit(self, choose: Callable[[Sequence, list[int]], int | None] | None = None) -> Iterator[Sequence]:
        """Give free cache rows to waiting requests, in order of arrival, and yield these requests. `choose`: function
        (request, free rows) -> row to use; without it, or if it returns None, the free row with the lowest number."""
        while self.waiting and self._cache.num_free:
            seq = self.waiting.popleft()
            row = self._cache.allocate(choose(seq, self._cache.free_rows) if choose else None)
            assert row is not None
            seq.row = row
            seq.timings.until_s = time.perf_counter()
            seq.timings.queue_s = seq.timings.until_s - seq.timings.arrival_s
            # Before it is yielded: if the caller fails, `remove` has to find it.
            self.prefilling.append(seq)
            yield seq

    def start_decoding(self, seq: Sequence) -> None:
        """Move a request whose prompt is complete from prefill to decoding. Rows stay sorted, so that adjacent rows are
        computed in one matrix product."""
        self.prefilling.remove(seq)
        self.running.append(seq)
        self.running.sort(key=lambda running: running.row)

    def remove(self, seq: Sequence) -> None:
        """Remove a request in any state and free its row."""
        for group in (self.waiting, self.prefilling, self.running):
            if seq in group:
                group.remove(seq)
        if seq.row >= 0:
            self._cache.free(seq.row)
            seq.row = -1

    def check_integrity(self) -> None:
        """Assert that rows, lengths and lists are consistent: no row leaked or shared."""
        holders = [*self.prefilling, *self.running]
        rows = [seq.row for seq in holders]
        assert len(set(rows)) == len(rows), f"a row is shared: {rows}"
        assert set(rows) <= set(range(self._cache.num_rows)), f"a row that is not there: {rows}"
        assert len(rows) + self._cache.num_free == self._cache.num_rows, "a cache row leaked"
        assert all(seq.row == -1 for seq in self.waiting)
        assert not (self.waiting and self._cache.num_free), "a request waits although a row is free"
        for seq in holders:
            assert self._cache.lengths[seq.row] == seq.cached_len, f"row {seq.row}: length differs from its sequence"
            assert seq.finish_reason is None
        for seq in self.running:
            assert seq.cached_len == len(seq.tokens) - 1
            assert 0 < seq.num_output <= seq.params.max_tokens
        for seq in self.prefilling:
            assert seq.cached_len < seq.prompt_len == len(seq.tokens)


LEAST = 16
"""Minimum length, in tokens, of a prefix that is reused: nearly all requests share the beginning of a chat template."""


class PrefixReuse:
    """Prefix cache: remembers which tokens each cache row holds. If a new prompt begins with the same tokens as a row,
    their keys and values are copied to the new request's row."""

    def __init__(self, target: Target, drafters: Pool) -> None:
        self._target, self._drafters = target, drafters
        self._left: dict[int, tuple[list[int], int]] = {}
        """Row without a sequence -> (tokens in its cache, the row's allocation counter at that time)."""
        self._running: dict[int, Sequence] = {}
        self.deferred: set[int] = set()
        """Ids of requests whose common prefix another request is still prefilling."""
        self.num_reused = 0
        """Number of prompt tokens that were reused, since the engine started."""

    def best_row(self, seq: Sequence, free: list[int]) -> int | None:
        """Returns the free row whose cache holds the longest prefix of the prompt, at least LEAST (16) tokens; else
        None."""
        lengths = {row: _common(tokens, seq) for row, tokens in self._still_held().items() if row in free}
        best = max(lengths, key=lengths.__getitem__, default=None)
        return best if best is not None and lengths[best] >= LEAST else None

    def admitted(self, seq: Sequence) -> None:
        """Reuse cached keys and values for a newly admitted request, which already has a drafter (`Pool.start`): finds
        the row that holds the longest prefix of the prompt, and copies this prefix to the request's row. Nothing is
        copied now in two cases:

        - An earlier request is still in prefill, and will hold a longer prefix of this prompt. `reads` copies it later.
        - Log-probabilities of the prompt were requested. They need logits, which no cache holds.
        """
        if seq.params.prompt_logprobs is not None:
            self._running[seq.row] = seq
            self._left.pop(seq.row, None)
            return
        known = max(self._known(seq).values(), default=0)
        self._running[seq.row] = seq
        coming = max((_common(other.tokens[: other.prompt_len], seq) for other in self._unread(seq)), default=0)
        if coming > max(known, LEAST - 1):
            self.deferred.add(seq.request_id)
        else:
            self._take_over(seq)

    def reads(self, seq: Sequence) -> None:
        """Call this when the request's prefill starts. If `admitted` postponed the copy of the prompt's longest prefix,
        the prefix is copied now."""
        if seq.request_id in self.deferred:
            self.deferred.remove(seq.request_id)
            self._take_over(seq)

    def _unread(self, seq: Sequence) -> list[Sequence]:
        """Returns earlier sequences whose prompts are not in the cache yet."""
        return [other for other in self._running.values() if other is not seq and other.cached_len < other.prompt_len]

    def _known(self, seq: Sequence) -> dict[int, int]:
        """Returns row -> length of the prompt's prefix in its cache; its own row counts with its earlier content."""
        held = self._still_held(seq.row)
        held |= {row: other.tokens[: other.cached_len] for row, other in self._running.items() if other is not seq}
        return {row: _common(tokens, seq) for row, tokens in held.items()}

    def _take_over(self, seq: Sequence) -> None:
        lengths = self._known(seq)
        # Of equally long prefixes the own row's: nothing has to be copied.
        source = max(lengths, key=lambda row: (lengths[row], row == seq.row), default=None)
        if source is not None and lengths[source] >= LEAST:
            # The drafter may take over fewer positions, and must then see the target compute the others.
            length = self._drafters.adopt(seq, source, lengths[source])
            if length:
                self._target.cache.adopt(source, seq.row, length)
                seq.cached_len = seq.num_reused = length
                self.num_reused += length
        self._left.pop(seq.row, None)

    def released(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """Remember which tokens the request's row holds, so that later requests can reuse their keys and values. Call
        this before the request leaves `seq.row`. `is_sound`: False if keys and values in the row may be invalid, after
        an error; then nothing is remembered."""
        self.deferred.discard(seq.request_id)
        if self._running.pop(seq.row, None) is not None and is_sound:
            self._left[seq.row] = seq.tokens[: seq.cached_len], self._target.cache.generations[seq.row]

    def _still_held(self, given: int | None = None) -> dict[int, list[int]]:
        """Returns the tokens in rows without a sequence, unless the row was allocated since, also by another engine."""
        now = self._target.cache.generations
        # The new request's own row, `given`, was allocated once more, for this request.
        return {row: tokens for row, (tokens, when) in self._left.items() if when + (row == given) == now[row]}


def _common(tokens: list[int], seq: Sequence) -> int:
    """Length of the common prefix of `tokens` and the prompt without its last token, which is always computed."""
    return num_common(tokens, seq.tokens[: seq.prompt_len - 1])
