"""Features that wait: whole, in order, cut anywhere, and of one row without the others."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import torch

from paceline.draft.base import Observed
from paceline.draft.tapped import PendingFeatures


def observed(row: int, start: int, count: int, begin: int = 0) -> Observed:
    """Positions whose features are their own numbers, with strangers before and behind."""
    taps_TF = torch.arange(start - begin, start + count + 3.0)[:, None]
    return Observed(cast(Any, SimpleNamespace(row=row)), start, count, taps_TF, begin)


def positions(taken: list[Observed]) -> list[int]:
    places = [position for one in taken for position in range(one.start, one.start + one.count)]
    features = [int(value) for one in taken if one.taps_NF is not None for value in one.taps_NF[:, 0]]
    assert features == places, "every position has its own features"
    return places


def test_what_is_taken_in_pieces_is_what_was_added() -> None:
    luck, waiting = random.Random(0), PendingFeatures()
    added, taken = {0: 0, 1: 0}, {0: list[int](), 1: list[int]()}
    for _ in range(400):
        row = luck.randrange(2)
        if luck.random() < 0.6:
            count = luck.choice([1, 2, 17, 256])
            waiting.add(observed(row, added[row], count, begin=luck.choice([0, 5])))
            added[row] += count
        else:
            most = luck.choice([1, 16, 32, 300])
            expected = min(most, waiting.count(row))
            piece = positions(waiting.take(row, most))
            assert len(piece) == expected
            taken[row] += piece
        assert waiting.count(row) == added[row] - len(taken[row])
    for row in (0, 1):
        taken[row] += positions(waiting.take(row))
        assert taken[row] == list(range(added[row]))
        assert waiting.count(row) == 0 and waiting.take(row) == []


def test_a_dropped_row_has_nothing() -> None:
    waiting = PendingFeatures()
    waiting.add(observed(0, 0, 5))
    waiting.add(observed(1, 0, 7))
    waiting.drop(0)
    waiting.drop(3)
    assert (waiting.count(0), waiting.count(1)) == (0, 7)
