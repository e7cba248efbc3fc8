"""Who runs, and where: requests wait, get a cache row, are prefilled in chunks, decode, and leave; at any step, in any order.

Each step does at most one prefill chunk and one decode round, so a long prompt delays the others by one chunk at a time.

Prompts that begin alike share the work: keys, values and a drafter's features of a common prefix are copied between rows.
A row remembers the tokens whose keys and values it holds, also after its sequence is gone and until another takes it. A new
sequence takes over the longest prefix that any row has, from its own row without a copy. Where more of its prompt is about to
be read for another, as in a group of answers to one prompt, it waits for that: its turn to read comes after. Only for targets
that give a position the same bits in any company (`Target.is_width_invariant`): then reuse changes nothing of what is said.
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
    """First come, first served; a request is admitted when a cache row is free."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def admit(self, choose: Callable[[Sequence, list[int]], int | None] | None = None) -> Iterator[Sequence]:
        """Give free rows to waiting requests, one after another; `choose` may prefer one of the free rows."""
        while self.waiting and self._cache.num_free:
            seq = self.waiting.popleft()
            row = self._cache.allocate(choose(seq, self._cache.free_rows) if choose else None)
            assert row is not None
            seq.row = row
            seq.timings.until_s = time.perf_counter()
            seq.timings.queue_s = seq.timings.until_s - seq.timings.arrival_s
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


LEAST = 16
"""Shorter prefixes are not worth a copy: a chat template's beginning is shared by everything."""


class PrefixReuse:
    """What every row of the cache holds. `Engine` tells it of admissions and releases."""

    def __init__(self, target: Target, drafters: Pool) -> None:
        self._target, self._drafters = target, drafters
        self._left: dict[int, tuple[list[int], int]] = {}
        """Row without a sequence -> tokens it still holds, and which giving away of the row that was."""
        self._running: dict[int, Sequence] = {}
        self.deferred: set[int] = set()
        """Requests that take over a prefix only when their turn to read comes."""
        self.num_reused = 0
        """Prompt tokens that were not computed again, since the engine began."""

    def best_row(self, seq: Sequence, free: list[int]) -> int | None:
        """The free row that holds the longest prefix of the prompt, if it holds one worth keeping."""
        lengths = {row: _common(tokens, seq) for row, tokens in self._still_held().items() if row in free}
        best = max(lengths, key=lengths.__getitem__, default=None)
        return best if best is not None and lengths[best] >= LEAST else None

    def admitted(self, seq: Sequence) -> None:
        """Call when `seq.row` is allocated and the drafter has started the row: takes over the longest prefix that another
        row has read, or waits while another row is reading a longer one.

        A prompt whose tokens are scored is read whole, because a cache holds no logits.
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
        """The sequence's prompt is read from now on."""
        if seq.request_id in self.deferred:
            self.deferred.remove(seq.request_id)
            self._take_over(seq)

    def _unread(self, seq: Sequence) -> list[Sequence]:
        """Sequences before this one whose prompts are not read yet."""
        return [other for other in self._running.values() if other is not seq and other.cached_len < other.prompt_len]

    def _known(self, seq: Sequence) -> dict[int, int]:
        """Row -> how many first tokens of the prompt it holds. The sequence's own row holds what it held before."""
        held = self._still_held(seq.row)
        held |= {row: other.tokens[: other.cached_len] for row, other in self._running.items() if other is not seq}
        return {row: _common(tokens, seq) for row, tokens in held.items()}

    def _take_over(self, seq: Sequence) -> None:
        lengths = self._known(seq)
        source = max(lengths, key=lambda row: (lengths[row], row == seq.row), default=None)
        if source is not None and lengths[source] >= LEAST:
            length = self._drafters.adopt(seq, source, lengths[source])
            if length:
                self._target.cache.adopt(source, seq.row, length)
                seq.cached_len = seq.num_reused = length
                self.num_reused += length
        self._left.pop(seq.row, None)

    def released(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """The sequence is about to leave `seq.row`, whose keys and values others may use if they are sound."""
        self.deferred.discard(seq.request_id)
        if self._running.pop(seq.row, None) is not None and is_sound:
            self._left[seq.row] = seq.tokens[: seq.cached_len], self._target.cache.generations[seq.row]

    def _still_held(self, given: int | None = None) -> dict[int, list[int]]:
        """What rows without a sequence hold; others than this engine may have used them since."""
        now = self._target.cache.generations
        return {row: tokens for row, (tokens, when) in self._left.items() if when + (row == given) == now[row]}


def _common(tokens: list[int], seq: Sequence) -> int:
    """How many first tokens of the prompt `tokens` begins with; the prompt's last token is always left to compute."""
    return num_common(tokens, seq.tokens[: seq.prompt_len - 1])
