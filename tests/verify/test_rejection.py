"""Token-wise rejection sampling: its formulas, its edges, and the published example by enumeration."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from checked_rows import checked, judged

from paceline.model.sampling.logits import sample
from paceline.rng import Noise
from paceline.verify import rules
from paceline.verify.rules import RowVerdict, Uniforms

TARGET = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


class Fixed(Uniforms):
    """Every draw is the same number."""

    draw = 0.5

    def accept(self, slot: int) -> float:
        return self.draw

    residual = accept


class Highest(Fixed):
    draw = 1 - 2**-53


def test_ten_ninths_of_two_drafts_stand_in_the_papers_example() -> None:
    expected = 0.0
    for drafts in itertools.product(range(2), repeat=2):
        first, second = rules.accept_probs(list(drafts), DRAFT.repeat(2, 1), TARGET.repeat(3, 1))
        expected += float(DRAFT[drafts[0]] * DRAFT[drafts[1]]) * (first + first * second)
    assert expected == pytest.approx(float(Fraction(10, 9)), abs=1e-14)


def test_accepts_while_draw_times_draft_is_below_target() -> None:
    draft_KV, target_JV = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.0, 1.0]])
    assert rules.accept_probs([0, 0], draft_KV, target_JV) == pytest.approx([1.0, 0.4])
    assert judged(rules.rejection, [0, 0], draft_KV, target_JV, Fixed(0, 0)) == RowVerdict(1, 1)
    assert judged(rules.rejection, [1, 0], draft_KV, target_JV, Fixed(0, 0)) == RowVerdict(0, 0)


def test_residual_is_what_the_drafter_left_out() -> None:
    target_V = torch.tensor([0.5, 0.3, 0.2])
    for draft_probs, left in ((torch.tensor([[0.1, 0.6, 0.3]]), [0.4, 0.0, 0.0]), (None, [0.5, 0.0, 0.2])):
        row = checked([1], draft_probs, target_V.unsqueeze(0), Uniforms(0, 0))
        torch.testing.assert_close(rules.residual_after(row, 0, target_V.unsqueeze(0)), torch.tensor(left))
    torch.testing.assert_close(target_V, torch.tensor([0.5, 0.3, 0.2]))


def test_certain_drafts_stand_with_their_probability_under_the_target() -> None:
    target_JV = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    assert rules.accept_probs([0], None, target_JV) == [0.25]
    assert judged(rules.rejection, [0], None, target_JV, Fixed(0, 0)) == RowVerdict(0, 1)
    assert judged(rules.rejection, [1], None, target_JV, Fixed(0, 0)) == RowVerdict(1, 0)


def test_rounding_that_empties_the_residual_falls_back_to_the_target() -> None:
    target_JV = torch.tensor([[0.5, 0.5 - 1e-7], [1.0, 0.0]])
    draft_KV = torch.tensor(
        [[0.5, 0.5]]
    )  # never above the target: the residual is 0, yet the draft may just be rejected
    assert judged(rules.rejection, [1], draft_KV, target_JV, Highest(0, 0)) == RowVerdict(0, 1)


def test_impossible_drafts_never_stand_and_never_divide_by_zero() -> None:
    one_JV = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert rules.accept_probs([0], torch.tensor([[1.0, 0.0]]), one_JV) == [0.0]  # the target never says it
    assert rules.accept_probs([1], torch.tensor([[1.0, 0.0]]), one_JV) == [0.0]  # the drafter never drew it
    assert judged(rules.rejection, [0], torch.tensor([[1.0, 0.0]]), one_JV, Fixed(0, 0)) == RowVerdict(0, 1)


def test_no_drafts_is_plain_decoding() -> None:
    row_1V = torch.tensor([[0.2, 0.2, 0.6]])
    own = sample(row_1V[0], Noise(0, 1).uniform)
    for draft_probs in (None, torch.zeros(0, 3)):
        assert judged(rules.rejection, [], draft_probs, row_1V, Uniforms(0, 0)) == RowVerdict(0, own)
