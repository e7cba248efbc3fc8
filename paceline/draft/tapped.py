"""Drafters that read the target's hidden states: what they observed waits by row until the row drafts.

A row that never drafts never pays for keys and values of its features. When it does, everything that waits goes in one pass;
a long wait is cut short, so that a round of others is not held up. Prefixes are taken over from other rows.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from paceline.draft.base import Drafter, Observed
from paceline.model.kv_cache import KVCache
from paceline.types import Sequence

MOST_PENDING = 512
"""Positions of a row that may wait; some megabytes of features."""
PENDING_PIECE = 32
"""Positions that go at once when there are more: the other rows' round waits for them."""
MOST_UNSORTED = 16
"""Passes whose features wait together."""


class TappedDrafter(Drafter):
    """The rows of such a drafter; `bind` of a subclass sets `_overwrites_taps` and calls `_forget_rows`."""

    network: Any
    """An nn.Module: the weights as they were read."""
    looks_ahead = 0
    """How many tokens behind a position its keys and values depend on: so many last positions of a shared prefix are computed
    again."""
    _overwrites_taps: bool

    @property
    @abstractmethod
    def _cache(self) -> KVCache:
        """What was taken in, by the target's rows."""

    @abstractmethod
    def _take_in(self, rows: list[int], starts: list[int], counts: list[int], observed: list[Observed]) -> None:
        """Append keys and values of so many positions of each row; `observed` holds them, one row after another."""

    def _forget_rows(self) -> None:
        self._pending = PendingFeatures()
        self._unsorted: list[list[Observed]] = []
        """What the latest passes verified."""
        self._fresh: set[int] = set()
        """Rows whose sequence has just started: what they hold is another's, which the new one may adopt."""

    def keep_weights(self) -> None:
        own = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.network.load_state_dict(own, assign=True)

    def start(self, seq: Sequence) -> None:
        self._sort()
        self._fresh.add(seq.row)

    def observe(self, observed: list[Observed]) -> None:
        """Keeps the features; they become keys and values when their row drafts: a row that does not pays next to nothing."""
        if self._overwrites_taps:
            observed = [replace(one, taps_TF=one.taps_NF.clone(), begin=0) for one in observed if one.taps_NF is not None]
        self._unsorted.append(observed)
        if len(self._unsorted) >= MOST_UNSORTED:
            self._sort()

    def _sort(self) -> None:
        """Give what was observed of late to its rows: of many rounds at once this takes a third of the time."""
        latest, self._unsorted = self._unsorted, []
        for one in chain.from_iterable(latest):
            assert one.taps_TF is not None, "the target was not asked for taps"
            row = one.sequence.row
            if row in self._fresh:
                self._reset(row, 0)
            assert one.start == self._num_observed(row), "positions must be observed once, in order"
            self._pending.add(one)
            if (excess := self._pending.count(row) - MOST_PENDING) > 0:
                self._inject([row], max(excess, PENDING_PIECE))

    def drop(self, seq: Sequence) -> None:
        self._sort()

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """As Drafter.adopt: keys and values are copied. A row keeps what it has until another sequence observes into it."""
        self._sort()
        self._inject([source])
        length = max(min(length - self.looks_ahead, self._cache.lengths[source]), 0)
        if source == seq.row:
            self._reset(source, length)
        else:
            self._reset(seq.row, 0)
            self._cache.adopt(source, seq.row, length)
        return length

    def _reset(self, row: int, length: int) -> None:
        self._cache.rollback([row], [length])
        self._pending.drop(row)
        self._fresh.discard(row)

    def _inject(self, rows: list[int], most: float = math.inf) -> None:
        """Make keys and values of the features that wait, of each row's oldest `most` or of all."""
        waiting = [row for row in rows if self._pending.count(row)]
        if not waiting:
            return
        taken = [self._pending.take(row, most) for row in waiting]
        starts = [self._cache.lengths[row] for row in waiting]
        counts = [sum(one.count for one in observed) for observed in taken]
        self._take_in(waiting, starts, counts, [one for observed in taken for one in observed])

    def take_in_pending(self, rows: list[int]) -> None:
        """Make keys and values of all features of these rows that wait."""
        self._sort()
        self._inject(rows)

    def advance(self, rows: list[int], lengths: list[int]) -> None:
        """A recorded round has written keys and values of these rows up to `lengths`; nothing of them waits."""
        self._cache.append(rows, [length - self._cache.lengths[row] for row, length in zip(rows, lengths, strict=True)])

    def can_draft(self, seq: Sequence) -> bool:
        """Whether every position before the anchor was observed."""
        self._sort()
        return seq.row not in self._fresh and self._num_observed(seq.row) == seq.cached_len

    def _num_observed(self, row: int) -> int:
        return self._cache.lengths[row] + self._pending.count(row)


class PendingFeatures:
    """Features of observed positions that are not keys and values yet, by row, oldest first and without gaps: a row that never
    drafts never pays for them."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[Observed]] = {}

    def count(self, row: int) -> int:
        waiting = self._rows.get(row)
        return waiting[-1].start + waiting[-1].count - waiting[0].start if waiting else 0

    def add(self, one: Observed) -> None:
        """Positions that follow those the row has."""
        self._rows.setdefault(one.sequence.row, deque()).append(one)

    def take(self, row: int, most: float = math.inf) -> list[Observed]:
        """The row's oldest `most` positions, or all: they wait no longer."""
        waiting, taken = self._rows.get(row), list[Observed]()
        while waiting and most:
            one = waiting.popleft()
            if one.count > most:
                left = int(most)
                waiting.appendleft(replace(one, start=one.start + left, count=one.count - left, begin=one.begin + left))
                one = replace(one, count=left)
            taken.append(one)
            most -= one.count
        return taken

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)


def features_of(observed: list[Observed]) -> Tensor:
    """Those of all these positions, one behind the other; of a single pass from its beginning there may be more behind."""
    if len(observed) == 1 and observed[0].begin == 0 and observed[0].taps_TF is not None:
        return observed[0].taps_TF
    return torch.cat([one.taps_NF for one in observed if one.taps_NF is not None])
