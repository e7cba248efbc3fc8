"""Acceptance by context: rounds are counted where they began."""

from __future__ import annotations

import pytest

from paceline.bench.drafting import by_context, context_table
from paceline.types import Round


def test_rounds_count_where_they_began() -> None:
    """At 500, 504, 508 and 512, and at 1100 and 1101: a round without drafts moves the context on and counts
    nowhere."""
    short = 500, [Round(4, 3), Round(4, 3), Round(4, 3), Round(4, 1)]
    long = 1099, [Round(0, 0), Round(4, 0), Round(4, 1)]
    assert by_context([short, long]) == [
        {"from": 0, "to": 512, "rounds": 3, "tokens_per_round": 4.0},
        {"from": 512, "to": 1024, "rounds": 1, "tokens_per_round": 2.0},
        {"from": 1024, "to": 2048, "rounds": 2, "tokens_per_round": 1.5},
    ]
    assert by_context([(10, [Round(0, 0)])]) == []


@pytest.mark.parametrize("length", [0, 511, 512, 1023, 1024, 5000])
def test_bins_do_not_overlap(length: int) -> None:
    ((row),) = by_context([(length, [Round(1, 1)])])
    assert row["from"] <= length < row["to"]
    assert "acceptance length" in str([column.name for column in context_table([row]).columns])
