"""Features of observed positions that are not keys and values yet, row by row: a row that never drafts never pays for them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from paceline.draft.base import Observed

MOST = 512
"""Positions of a row that may wait; some megabytes of features."""
PIECE = 32
"""Positions that go at once when there are more: the other rows' round waits for them."""


class PendingFeatures:
    """Observed positions by row, oldest first and without gaps."""

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
