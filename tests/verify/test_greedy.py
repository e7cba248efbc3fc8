"""Greedy verification keeps the longest matching prefix."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.verify.greedy import verify, verify_argmax, verify_batch
from paceline.verify.rule import RowVerdict, Uniforms


def test_longest_matching_prefix_then_the_targets_token() -> None:
    assert verify_argmax([5, 6, 7], [5, 6, 7, 8]) == RowVerdict(3, 8)
    assert verify_argmax([5, 6, 7], [5, 9, 7, 8]) == RowVerdict(1, 9)  # a later match does not count
    assert verify_argmax([5, 6, 7], [4, 6, 7, 8]) == RowVerdict(0, 4)
    assert verify_argmax([], [3]) == RowVerdict(0, 3)
    assert verify_argmax([5], [5, 6, 0, 0]) == RowVerdict(1, 6)  # padding behind a short draft


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=5))))
def test_a_batch_is_its_rows(rows: list[tuple[list[int], list[int]]]) -> None:
    verdict = verify_batch([drafts for drafts, _ in rows], [argmax_J for _, argmax_J in rows])
    alone = [verify_argmax(drafts, argmax_J) for drafts, argmax_J in rows]
    assert list(zip(verdict.num_accepted_B, verdict.next_token_B, strict=True)) == alone
    assert verdict.lossless
    for (drafts, argmax_J), row in zip(rows, alone, strict=True):
        assert [*drafts[: row.num_accepted], row.next_token] == argmax_J[: row.num_accepted + 1]


def test_common_signature_takes_probabilities_or_logits() -> None:
    logits_JV = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    for rows_JV in (logits_JV, torch.softmax(logits_JV, -1)):
        assert verify([1, 0], None, rows_JV, Uniforms(0, 0)) == RowVerdict(2, 2)
        assert verify([1, 2], None, rows_JV, Uniforms(0, 0)) == RowVerdict(1, 0)
