"""Mocked acceptance and the table of rules."""

from __future__ import annotations

import math

import pytest
import torch
from checked_rows import judged
from hypothesis import given
from hypothesis import strategies as st

from paceline import config
from paceline.errors import ConfigError
from paceline.types import SamplingParams, Sequence
from paceline.verify import lossless
from paceline.verify.mocked import MockedAcceptance
from paceline.verify.rule import Uniforms
from paceline.verify.table import RULES

ROWS_JV = torch.eye(6)


@given(st.floats(1, 8), st.integers(0, 5000))
def test_tokens_per_round_is_met_exactly_in_the_long_run(tokens_per_round: float, start: int) -> None:
    mocked, position, rounds = MockedAcceptance(tokens_per_round), start, 200
    for _ in range(rounds):
        num_accepted = mocked.num_accepted(15, Uniforms(1, position))
        assert num_accepted + 1 in (math.floor(tokens_per_round), math.ceil(tokens_per_round))
        position += num_accepted + 1
    assert abs(position - start - rounds * tokens_per_round) <= 3


def test_never_more_than_were_drafted() -> None:
    for num_drafted in range(5):
        assert MockedAcceptance(9.5).num_accepted(num_drafted, Uniforms(0, 10)) == num_drafted
        assert MockedAcceptance.from_survival([1.0] * 9).num_accepted(num_drafted, Uniforms(0, 10)) == num_drafted


def test_survival_curve_is_met() -> None:
    survival = [0.9, 0.5, 0.5, 0.1]
    mocked = MockedAcceptance.from_survival(survival)
    assert mocked.tokens_per_round == pytest.approx(3.0)
    counts = [mocked.num_accepted(7, Uniforms(seed, 3 * seed)) for seed in range(5000)]
    for i, share in enumerate(survival, start=1):
        assert abs(sum(count >= i for count in counts) / 5000 - share) < 0.025
    assert max(counts) == 4


def test_is_a_rule_and_says_it_is_lossy() -> None:
    rule = MockedAcceptance(3).rule
    verdict = judged(rule.verify, [4, 4, 4], None, ROWS_JV[:4], Uniforms(0, 0))
    assert verdict == (2, 2)  # the target's token after two drafts it never wanted
    assert not rule.lossless


@pytest.mark.parametrize("wrong", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_impossible_tokens_per_round_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        MockedAcceptance(wrong)


@pytest.mark.parametrize("wrong", [[], [0.5, 0.6], [1.1], [-0.1], [math.nan], [0.5, math.nan]])
def test_impossible_curves_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ConfigError, match="survival curve"):
        MockedAcceptance.from_survival(wrong)


def test_auto_matches_certain_drafts_and_blocks_sampled_ones() -> None:
    target_JV = torch.softmax(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), -1)
    draft_KV = target_JV[:3].roll(1, -1)
    for seed in range(30):
        uniforms = Uniforms(seed, 2)
        assert judged(lossless.auto, [1, 2, 0], None, target_JV, uniforms) == judged(
            lossless.match, [1, 2, 0], None, target_JV, uniforms
        )
        assert judged(lossless.auto, [1, 2, 0], draft_KV, target_JV, uniforms) == judged(
            lossless.block, [1, 2, 0], draft_KV, target_JV, uniforms
        )


def test_every_rule_draws_the_same_token_without_drafts() -> None:
    row_1V = torch.softmax(torch.randn(1, 5, generator=torch.Generator().manual_seed(0)), -1)
    for seed in range(20):
        assert len({judged(RULES[name].verify, [], None, row_1V, Uniforms(seed, 4)) for name in RULES}) == 1


def test_the_rules_are_those_that_can_be_asked_for() -> None:
    assert tuple(RULES) == config.RULES


def test_uniforms_of_a_sequence_start_at_its_anchor() -> None:
    seq = Sequence(request_id=0, tokens=[1, 2, 3], prompt_len=2, params=SamplingParams(seed=9))
    assert Uniforms.of(seq) == Uniforms(9, 2)
    assert Uniforms(9, 2).sample(3) == Uniforms(9, 5).sample(0)  # by absolute position
    assert Uniforms(9, 2).accept(3) != Uniforms(9, 5).accept(0)  # by round
