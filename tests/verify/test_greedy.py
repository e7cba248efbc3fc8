"""Greedy verification keeps the longest matching prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.verify.rules import RowVerdict, match_prefix


def test_longest_matching_prefix_then_the_targets_token() -> None:
    assert match_prefix([5, 6, 7], [5, 6, 7, 8].__getitem__) == RowVerdict(3, 8)
    assert match_prefix([5, 6, 7], [5, 9, 7, 8].__getitem__) == RowVerdict(1, 9)  # a later match does not count
    assert match_prefix([5, 6, 7], [4, 6, 7, 8].__getitem__) == RowVerdict(0, 4)
    assert match_prefix([], [3].__getitem__) == RowVerdict(0, 3)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_text_is_the_targets_own(drafts: list[int], argmax_J: list[int]) -> None:
    row = match_prefix(drafts, argmax_J.__getitem__)
    assert [*drafts[: row.num_accepted], row.next_token] == argmax_J[: row.num_accepted + 1]
    assert row.num_accepted == len(drafts) or drafts[row.num_accepted] != row.next_token
