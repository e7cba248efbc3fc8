"""Sampled answers have the target's distribution, whatever drafts and whichever rule: by chi-square tests that see
mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import drafters, run
from sampled_answers import Answer, chi_square, enumerated
from torch import Tensor

from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.sampling.logits import penalise, sample
from paceline.types import SamplingParams
from paceline.verify import rules
from paceline.verify.rules import RULES, CheckedRow, RowVerdict, Rule, Uniforms

pytestmark = pytest.mark.slow


def chance_of(
    target: FakeTarget,
    drafter: Drafter | None,
    rule: Rule,
    shape: dict[str, float],
    num_tokens: int = 3,
    num_samples: int = 1500,
) -> float:
    """The chi-square test's p-value of answers of a few tokens against the target's distribution."""
    engine = Engine(target, ByteTokenizer(), drafter, judge=RuleJudge(rule))
    params = [SamplingParams(**shape, seed=seed, max_tokens=num_tokens) for seed in range(num_samples)]  # pyright: ignore[reportArgumentType]
    answers = list[Answer]()
    for begin in range(0, num_samples, 100):  # a long queue would be checked again at every step
        own = params[begin : begin + 100]
        answers += [tuple(seq.output_ids) for seq in run(engine, [[1, 2]] * len(own), own)]

    def logits_after(answer: Answer) -> Tensor:
        tokens = [1, 2, *answer]
        return penalise(target.logits_after(tokens)[None].clone(), params[0], tokens, Counter(answer), [])

    return chi_square(answers, enumerated(logits_after, params[0]))


SHAPES = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05},
    "penalised": {
        "temperature": 1.2,
        "top_k": 4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
    },
}


@pytest.mark.parametrize(
    ("name", "rule", "shape"),
    [
        ("sometimes", "match", "filtered"),
        ("sometimes, with probabilities", "rejection", "filtered"),
        ("sometimes, with probabilities", "block", "penalised"),
        ("adversarial", "auto", "plain"),
    ],
)
def test_sampled_answers_have_the_targets_distribution(name: str, rule: str, shape: str) -> None:
    """Each rule with settings that it does not see and with those that change what it sees, text by text.

    The tests of verify/ have the rest by enumeration.
    """
    target = FakeTarget(vocab_size=5, sharpness=1.0, num_rows=16, max_len=16)
    assert chance_of(target, drafters(target)[name], RULES[rule], SHAPES[shape]) > 1e-4


def target_for_residual(row: CheckedRow) -> RowVerdict:
    """Wrong on purpose: after a rejection the target is sampled, not the residual."""
    target_JV = row.target_probs()
    for slot, chance in enumerate(rules.accept_probs(row.draft_tokens, row.draft_probs_KV, target_JV)):
        if row.uniforms.accept(slot) >= chance:
            return RowVerdict(slot, sample(target_JV[slot], row.uniforms.residual(slot)))
    return RowVerdict(len(row.draft_tokens), row.draw(len(row.draft_tokens)))


class KeyedBySlot(Uniforms):
    """Wrong on purpose: the second round decides with draws that the first has already looked at."""

    def accept(self, slot: int) -> float:
        return Uniforms(self.seed, 0).accept(slot)


class OneDrawForBoth(Uniforms):
    """Wrong on purpose: the draw that rejected a draft also picks its replacement."""

    def residual(self, slot: int) -> float:
        return self.accept(slot)


def with_uniforms(
    verify: Callable[[CheckedRow], RowVerdict], kind: type[Uniforms]
) -> Callable[[CheckedRow], RowVerdict]:
    return lambda row: verify(replace(row, uniforms=kind(row.uniforms.seed, row.uniforms.anchor_position)))


MISTAKES = {
    "target for residual": target_for_residual,
    "rejection keyed by slot": with_uniforms(rules.rejection, KeyedBySlot),
    "one draw for both": with_uniforms(rules.rejection, OneDrawForBoth),
}


@pytest.mark.parametrize(
    "mistake", [next(iter(MISTAKES)), *(pytest.param(name, marks=pytest.mark.nightly) for name in [*MISTAKES][1:])]
)
def test_the_chi_square_sees_a_mistake(mistake: str) -> None:
    target = FakeTarget(vocab_size=3, sharpness=1.0, num_rows=16, max_len=16)
    drafter = ScriptedDrafter(target, num_drafted=1, mode="adversarial", with_probs=True)
    rule = Rule(mistake, MISTAKES[mistake], lossless=True, needs_probs=True)
    assert chance_of(target, drafter, rule, {"temperature": 1.0}, num_tokens=5) < 1e-6
