"""Block verification: the paper's example exactly, never fewer drafts than token by token, and its edges."""

from __future__ import annotations

import itertools

import pytest
import torch
from checked_rows import checked, judged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.verify import rules
from paceline.verify.rules import RowVerdict, Uniforms

TARGET = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
DRAFT = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


class Scripted(Uniforms):
    """Accept draws from a list, the rest 0.5."""

    accepts: tuple[float, ...] = ()

    def accept(self, slot: int) -> float:
        return self.accepts[slot]

    def residual(self, slot: int) -> float:
        return 0.5


def scripted(*accepts: float) -> Uniforms:
    return type("Scripted", (Scripted,), {"accepts": accepts})(0, 0)


def standing_probs(drafts: list[int], draft_KV: Tensor, target_JV: Tensor) -> list[float]:
    """P(num_accepted = n | drafts) for n = 0 .. K, from h_i as the rule defines them: the largest i whose draw is below
    h_i."""
    prefix = rules.prefix_probs(drafts, draft_KV, target_JV)
    row, h = checked(drafts, draft_KV, target_JV, Uniforms(0, 0)), [1.0]
    for i in range(1, len(drafts)):
        weights_V = rules.residual_after(row, i, target_JV, prefix[i])
        h.append(rules.stop_prob(prefix[i], float(weights_V.sum())))
    h.append(prefix[-1])
    left, probs = 1.0, []
    for chance in reversed(h[: len(drafts) + 1]):
        probs.append(left * chance)
        left *= 1 - chance
    return probs[::-1]


def expected_accepted(draft_rows: Tensor, target_rows: Tensor, num_drafted: int) -> tuple[float, float]:
    """Expected drafts standing, (token-wise, block), for distributions that do not depend on the prefix."""
    token_wise = block_wise = 0.0
    for drafts in itertools.product(range(draft_rows.shape[-1]), repeat=num_drafted):
        weight = float(draft_rows.gather(-1, torch.tensor(drafts).unsqueeze(-1)).prod())
        stands = 1.0
        for chance in rules.accept_probs(list(drafts), draft_rows, target_rows):
            stands *= chance
            token_wise += weight * stands
        block_wise += weight * sum(
            n * prob for n, prob in enumerate(standing_probs(list(drafts), draft_rows, target_rows))
        )
    return token_wise, block_wise


def test_eleven_ninths_against_ten_ninths_in_the_papers_example() -> None:
    token_wise, block_wise = expected_accepted(DRAFT.repeat(2, 1), TARGET.repeat(3, 1), 2)
    assert token_wise == pytest.approx(10 / 9, abs=1e-14)
    assert block_wise == pytest.approx(11 / 9, abs=1e-14)


@pytest.mark.slow
def test_the_real_rule_keeps_eleven_ninths() -> None:
    total, rounds = 0, 4000
    for seed in range(rounds):
        drafts = [int(Uniforms(seed, 50 + i).noise(0).uniform >= 2 / 3) for i in range(2)]
        total += judged(rules.block, drafts, DRAFT.repeat(2, 1), TARGET.repeat(3, 1), Uniforms(seed, 3)).num_accepted
    assert abs(total / rounds - 11 / 9) < 0.05  # token-wise would be 0.11 below; 3.5 standard deviations


weights = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=4, max_size=4)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weights, weights)
def test_block_never_keeps_fewer_than_token_wise(
    draft_weights: list[list[int]], target_weights: list[list[int]]
) -> None:
    draft_rows, target_rows = (torch.tensor(rows, dtype=torch.float64) for rows in (draft_weights, target_weights))
    draft_rows, target_rows = (
        draft_rows / draft_rows.sum(-1, keepdim=True),
        target_rows / target_rows.sum(-1, keepdim=True),
    )
    token_wise, block_wise = expected_accepted(draft_rows[:3], target_rows, 3)
    assert block_wise >= token_wise - 1e-12


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(weights, weights, st.lists(st.integers(0, 2), min_size=3, max_size=3), st.integers(0, 10**6))
def test_verify_picks_the_largest_standing_prefix(
    draft_weights: list[list[int]], target_weights: list[list[int]], drafts: list[int], seed: int
) -> None:
    draft_KV = torch.nn.functional.normalize(torch.tensor(draft_weights[:3], dtype=torch.float64), p=1, dim=-1)
    target_JV = torch.nn.functional.normalize(torch.tensor(target_weights, dtype=torch.float64), p=1, dim=-1)
    uniforms = Uniforms(seed, 5)
    prefix = rules.prefix_probs(drafts, draft_KV, target_JV)
    stands = 0
    for i in (1, 2, 3):  # the paper's loop, forwards
        mass = float((prefix[i] * target_JV[i] - draft_KV[i]).clamp(min=0).sum()) if i < 3 else 0.0
        chance = prefix[3] if i == 3 else rules.stop_prob(prefix[i], mass)
        if uniforms.accept(i - 1) < chance:
            stands = i
    assert judged(rules.block, drafts, draft_KV, target_JV, uniforms).num_accepted == stands


def test_a_later_draft_can_rescue_an_earlier_one() -> None:
    draft_KV, target_JV = DRAFT.repeat(2, 1), TARGET.repeat(3, 1)
    assert rules.prefix_probs([0, 1], draft_KV, target_JV) == pytest.approx([1.0, 0.5, 1.0])
    assert judged(rules.block, [0, 1], draft_KV, target_JV, scripted(0.99, 0.99)).num_accepted == 2
    assert judged(rules.rejection, [0, 1], draft_KV, target_JV, scripted(0.99, 0.99)).num_accepted == 0


def test_a_perfect_drafter_is_always_believed() -> None:
    rows_JV = torch.softmax(torch.randn(5, 6, generator=torch.Generator().manual_seed(0)), -1)
    assert all(
        judged(rules.block, [0, 5, 2, 3], rows_JV[:4], rows_JV, Uniforms(seed, 9)).num_accepted == 4
        for seed in range(50)
    )


def test_one_hot_drafts_stand_as_often_as_token_wise() -> None:
    target_JV = torch.softmax(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), -1).double()
    drafts = [1, 0, 2]
    prefix = rules.prefix_probs(drafts, None, target_JV)
    chances = torch.tensor(rules.accept_probs(drafts, None, target_JV)).cumprod(0)
    assert prefix[1:] == pytest.approx(chances.tolist())
    one_hot_KV = torch.eye(3, dtype=torch.float64)[drafts]
    for seed in range(100):
        uniforms = Uniforms(seed, 4)
        assert judged(rules.block, drafts, None, target_JV, uniforms) == judged(
            rules.block, drafts, one_hot_KV, target_JV, uniforms
        )


def test_impossible_drafts_and_empty_rounds() -> None:
    target_JV = torch.tensor([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    draft_KV = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert judged(rules.block, [0, 0], draft_KV, target_JV, scripted(0.0, 0.0)) == RowVerdict(0, 1)
    assert judged(rules.block, [], torch.zeros(0, 2), target_JV[:1], scripted()) == RowVerdict(0, 1)
    assert judged(rules.block, [], None, target_JV[:1], scripted()) == RowVerdict(0, 1)
