"""Mocked acceptance and the table of rules."""

from __future__ import annotations

import math

import pytest
import torch
from checked_rows import judged
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import config
from paceline.errors import ConfigError
from paceline.types import SamplingParams, Sequence
from paceline.verify import rules
from paceline.verify.rules import RULES, Uniforms, mocked

ROWS_JV = torch.eye(6)


def num_accepted(tokens_per_round: float, num_drafted: int, position: int) -> int:
    uniforms = Uniforms(1, position)
    return judged(mocked(tokens_per_round).verify, [4] * num_drafted, None, ROWS_JV[[2] * (num_drafted + 1)], uniforms)[
        0
    ]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.floats(1, 8), st.integers(0, 5000))
def test_tokens_per_round_is_met_exactly_in_the_long_run(tokens_per_round: float, start: int) -> None:
    position, rounds = start, 100
    for _ in range(rounds):
        accepted = num_accepted(tokens_per_round, 15, position)
        assert accepted + 1 in (math.floor(tokens_per_round), math.ceil(tokens_per_round))
        position += accepted + 1
    assert abs(position - start - rounds * tokens_per_round) <= 3


def test_never_more_than_were_drafted() -> None:
    for num_drafted in range(5):
        assert num_accepted(9.5, num_drafted, 10) == num_drafted


def test_is_a_rule_and_says_it_is_lossy() -> None:
    rule = mocked(3)
    verdict = judged(rule.verify, [4, 4, 4], None, ROWS_JV[:4], Uniforms(0, 0))
    assert verdict == (2, 2)  # the target's token after two drafts it never wanted
    assert not rule.lossless


@pytest.mark.parametrize("wrong", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_impossible_tokens_per_round_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        mocked(wrong)


@pytest.mark.slow
def test_a_curve_is_drawn_for_each_round() -> None:
    """Shares of rounds as asked; another seed draws others, and more drafts never make fewer stand."""
    rule = mocked((0.9, 0.6, 0.25))
    drawn = {
        num_drafted: [
            judged(rule.verify, [4] * num_drafted, None, ROWS_JV[[2] * (num_drafted + 1)], Uniforms(seed, position))[0]
            for seed in (1, 2)
            for position in range(2000)
        ]
        for num_drafted in (2, 5)
    }
    shares = [sum(each > slot for each in drawn[5]) / len(drawn[5]) for slot in range(5)]
    assert shares == pytest.approx([0.9, 0.6, 0.25, 0.0, 0.0], abs=0.03) and not rule.lossless
    assert drawn[5][:2000] != drawn[5][2000:]
    assert drawn[2] == [min(each, 2) for each in drawn[5]]


@pytest.mark.parametrize("wrong", [(0.5, 0.6), (1.1,), (-0.1,), (math.nan,)])
def test_what_is_no_curve_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="a survival curve falls"):
        mocked(wrong)


def test_auto_matches_certain_drafts_and_blocks_sampled_ones() -> None:
    target_JV = torch.softmax(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), -1)
    draft_KV = target_JV[:3].roll(1, -1)
    for seed in range(30):
        uniforms = Uniforms(seed, 2)
        assert judged(rules.auto, [1, 2, 0], None, target_JV, uniforms) == judged(
            rules.match, [1, 2, 0], None, target_JV, uniforms
        )
        assert judged(rules.auto, [1, 2, 0], draft_KV, target_JV, uniforms) == judged(
            rules.block, [1, 2, 0], draft_KV, target_JV, uniforms
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
    assert Uniforms(9, 2).noise(3) == Uniforms(9, 5).noise(0)  # by absolute position
    assert Uniforms(9, 2).accept(3) != Uniforms(9, 5).accept(0)  # by round
