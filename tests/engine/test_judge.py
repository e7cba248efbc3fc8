"""The judge: what a rule says of itself reaches the figures of every answer it made."""

from __future__ import annotations

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from torch import Tensor

from paceline.config import RULES as RULE_NAMES
from paceline.engine.completion import GenerationStats
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.errors import NumericsError
from paceline.model.target import ForwardOutput
from paceline.types import Batch, DraftBlock, SamplingParams, Sequence, Verdict
from paceline.verify.rules import RULES, CheckedRow, RowVerdict, Rule, mocked


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
    assert stats_with(RuleJudge(mocked(3)), params).lossless is False
    assert stats_with(RuleJudge(), params).lossless is True


def test_a_rule_that_needs_no_probabilities_decides_on_greedy_and_sampled_rows_alike() -> None:
    lossy = Rule("keep everything", keep_everything, lossless=False, needs_probs=False)
    for temperature in (0.0, 1.0):
        stats = stats_with(RuleJudge(lossy), SamplingParams(temperature=temperature, max_tokens=21))
        assert stats.num_accepted == stats.num_drafted == 16


def test_the_settings_know_every_rule_of_the_table() -> None:
    assert tuple(RULES) == RULE_NAMES
    assert all(name == rule.name for name, rule in RULES.items())


NAN, INF = float("nan"), float("inf")
WRONG = {"all NaN": [NAN] * 4, "one NaN": [1.0, NAN, 0.0, 2.0], "infinity": [0.0, INF, 1.0, 2.0], "nothing": [-INF] * 4}
WAYS = {
    "greedy": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.2),
    "sampled": SamplingParams(temperature=1.0, seed=1),
    "filtered": SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01, seed=1),
    "with logprobs": SamplingParams(logprobs=2),
}


def verdict_on(rows_TV: Tensor, drafts_B: list[list[int]], params: SamplingParams, rule: str, certain: bool) -> Verdict:
    sequences = [Sequence(index, [1, 2, 3], 2, params) for index in range(len(drafts_B))]
    even = [None if certain else torch.full((len(drafts), 4), 0.25) for drafts in drafts_B]
    return RuleJudge(RULES[rule])(Batch(sequences), DraftBlock(drafts_B, even), ForwardOutput(rows_TV, None))


@pytest.mark.parametrize(("certain", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_row_whose_logits_are_not_finite_fails_alone(
    wrong: str, way: str, rule: str, certain: bool, dtype: torch.dtype
) -> None:
    sure_V = torch.tensor([-50.0, 50.0, -50.0, -50.0], dtype=dtype)
    fine_JV, wrong_V = sure_V.repeat(3, 1), torch.tensor(WRONG[wrong], dtype=dtype)
    spoilt_JV = torch.stack([sure_V, wrong_V, wrong_V])
    drafts_B = [[1, 1], [1, 1], [1, 1]]
    verdict = verdict_on(torch.cat([fine_JV, spoilt_JV, fine_JV]), drafts_B, WAYS[way], rule, certain)
    assert (
        (verdict.num_accepted_B[0], verdict.next_token_B[0])
        == (verdict.num_accepted_B[2], verdict.next_token_B[2])
        == (2, 1)
    )
    if not verdict.failed_B:  # a rule may keep fewer drafts and see it in the next round
        assert rule in ("auto", "block") and verdict.num_accepted_B[1] == 0 and verdict.next_token_B[1] == 1
        return
    assert (verdict.num_accepted_B[1], verdict.next_token_B[1]) == (0, -1)
    assert verdict.failed_B[0] is None and verdict.failed_B[2] is None
    assert verdict.failed_B[1] is not None and "not finite at position 4" in verdict.failed_B[1]


@pytest.mark.parametrize("way", WAYS)
def test_what_stands_behind_a_refused_draft_is_not_looked_at(way: str) -> None:
    sure_V = torch.tensor([-50.0, 50.0, -50.0, -50.0])
    rows_JV = torch.stack([sure_V, torch.full((4,), NAN), torch.full((4,), NAN)])
    for rule in RULE_NAMES:
        verdict = verdict_on(rows_JV, [[2, 1]], WAYS[way], rule, certain=True)
        assert verdict.failed_B is None and verdict.num_accepted_B == [0] and verdict.next_token_B == [1]


def test_forbidding_every_token_is_not_called_the_models_fault() -> None:
    bias = dict.fromkeys(range(4), -INF)
    for params in (SamplingParams(logit_bias=bias), SamplingParams(logit_bias=bias, temperature=1.0)):
        verdict = verdict_on(torch.zeros(1, 4), [[]], params, "auto", certain=True)
        message = (
            "no token is left to choose at position 3: logit_bias, bad_words, min_tokens or the grammar forbid all"
        )
        assert verdict.failed_B == [message]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_sound", [0, 1, 2])
def test_a_damaged_target_ends_in_an_error_not_in_an_empty_answer(num_sound: int, temperature: float) -> None:
    target = FakeTarget(vocab_size=258, sharpness=100.0)
    prompt = [1, 2, 3]
    target.logits_after([*prompt, *target.greedy(prompt, num_sound)])[:] = NAN
    engine = Engine(target, ByteTokenizer(), judge=RuleJudge())
    engine.add(prompt, SamplingParams(temperature=temperature, max_tokens=8, seed=1))
    for _ in range(num_sound):
        engine.step()
    (chunk,) = engine.step()
    assert chunk.finish_reason == "error" and isinstance(chunk.sequence.error, NumericsError)
    assert f"not finite at position {len(prompt) + num_sound}" in str(chunk.sequence.error)
