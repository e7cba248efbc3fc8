"""The judge: what a rule says of itself reaches the figures of every answer it made."""

from __future__ import annotations

import pytest

from paceline.config import RULES as RULE_NAMES
from paceline.engine.engine import Engine
from paceline.engine.judge import MockedJudge, RuleJudge
from paceline.engine.llm import GenerationStats
from paceline.testing import ByteTokenizer, FakeTarget, ScriptedDrafter
from paceline.types import SamplingParams
from paceline.verify.mocked import MockedAcceptance
from paceline.verify.rule import CheckedRow, RowVerdict, Rule
from paceline.verify.table import RULES


def keep_everything(row: CheckedRow) -> RowVerdict:
    return RowVerdict(len(row.draft_tokens), row.draw(len(row.draft_tokens)))


def stats_with(judge: RuleJudge, params: SamplingParams) -> GenerationStats:
    target = FakeTarget(vocab_size=258)
    drafter = ScriptedDrafter(target, num_drafted=4, accuracy=0.5, with_probs=not params.is_greedy)
    engine = Engine(target, ByteTokenizer(), drafter, judge=judge)
    engine.add([1, 2, 3], params)
    chunks = []
    while engine.has_work:
        chunks += engine.step()
    return GenerationStats.of(chunks[-1].sequence)


@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("needs_probs", [False, True])
def test_answers_of_a_lossy_rule_are_reported_as_lossy(needs_probs: bool, temperature: float, max_tokens: int) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    lossy = Rule("keep everything", keep_everything, lossless=False, needs_probs=needs_probs)
    assert stats_with(RuleJudge(lossy), params).lossless is False
    assert stats_with(MockedJudge(MockedAcceptance(3)), params).lossless is False
    assert stats_with(RuleJudge(), params).lossless is True


def test_a_rule_that_needs_no_probabilities_decides_on_greedy_and_sampled_rows_alike() -> None:
    lossy = Rule("keep everything", keep_everything, lossless=False, needs_probs=False)
    for temperature in (0.0, 1.0):
        stats = stats_with(RuleJudge(lossy), SamplingParams(temperature=temperature, max_tokens=21))
        assert stats.num_accepted == stats.num_drafted == 16


def test_the_settings_know_every_rule_of_the_table() -> None:
    assert tuple(RULES) == RULE_NAMES
    assert all(name == rule.name for name, rule in RULES.items())
