"""Features of observed positions that are not keys and values yet, row by row: a row that never drafts never pays for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from paceline.draft.base import Observed

MOST = 512
"""Positions of a row that may wait; some megabytes of features."""
PIECE = 32
"""Positions that go at once when there are more: the other rows' round waits for them."""


@dataclass(slots=True)
class _Row:
    observed: deque[Observed] = field(default_factory=deque)
    count: int = 0


class PendingFeatures:
    """Observed positions by row, oldest first."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def count(self, row: int) -> int:
        return self._rows[row].count if row in self._rows else 0

    def add(self, one: Observed) -> None:
        """Positions that follow those the row has."""
        row = self._rows.setdefault(one.sequence.row, _Row())
        row.observed.append(one)
        row.count += one.count

    def take(self, row: int, most: int | None = None) -> list[Observed]:
        """The row's oldest `most` positions, or all: they wait no longer."""
        waiting = self._rows.pop(row, None)
        if waiting is None:
            return []
        if most is None or most >= waiting.count:
            return list(waiting.observed)
        taken, left = [], most
        while left:
            one = waiting.observed.popleft()
            if one.count > left:
                rest = replace(one, start=one.start + left, count=one.count - left, begin=one.begin + left)
                waiting.observed.appendleft(rest)
                one = replace(one, count=left)
            taken.append(one)
            left -= one.count
        waiting.count -= most
        self._rows[row] = waiting
        return taken

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)
