"""Compares sampled answers with the distribution that they should have, which is enumerated, by a chi-square test."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest
from doubles import ByteTokenizer
from engine_runs import run
from tiny_dflash import PROMPT, tiny_target
from torch import Tensor

from paceline import types
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder
from paceline.model.sampling.logits import target_probs
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder
from paceline.types import SamplingParams
from paceline.verify.rules import RULES

Answer = tuple[int, ...]
FASTEST: type = Decoder if native_lib.load() is None else NativeDecoder


def enumerated(
    logits_after: Callable[[Answer], Tensor], params: SamplingParams, end: int | None = None
) -> dict[Answer, float]:
    """Probability of every answer of `params.max_tokens` tokens, or fewer if the last one is `end`. `logits_after`:
    returns the logits [1, V] after an answer's first tokens."""
    masses: dict[Answer, float] = {(): 1.0}
    for _ in range(params.max_tokens):
        longer: dict[Answer, float] = {}
        for answer, mass in masses.items():
            if answer and answer[-1] == end:
                longer[answer] = mass
                continue
            for token, share in enumerate(target_probs(logits_after(answer), params)[0].tolist()):
                if share > 0:
                    longer[(*answer, token)] = mass * share
        masses = longer
    return masses


def chi_square(answers: Iterable[Answer], expected: dict[Answer, float]) -> float:
    """The test's p-value of sampled answers against their probabilities; rare answers count as one. Fails for an answer
    that is impossible."""
    from scipy.stats import chisquare  # which takes most of a second to import

    counts = Counter(answers)
    num_samples = counts.total()
    assert set(counts) <= set(expected)
    common = [answer for answer, mass in expected.items() if mass * num_samples >= 5]
    observed, masses = [counts[answer] for answer in common], [expected[answer] * num_samples for answer in common]
    rest = num_samples - sum(masses)
    if rest > 1:
        observed, masses = [*observed, num_samples - sum(observed)], [*masses, rest]
    scale = num_samples / sum(masses)
    assert len(common) >= 8
    return float(chisquare(observed, [mass * scale for mass in masses]).pvalue)


@cache
def expected_answers(params: SamplingParams) -> dict[Answer, float]:
    """Probability of every answer of the tiny target to PROMPT."""
    target = tiny_target()

    def logits_after(answer: Answer) -> Tensor:
        tokens, row = PROMPT + list(answer), target.cache.allocate()
        logits_TV = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens, "last")).logits_TV
        target.cache.free(row)
        return logits_TV[-1:]

    return enumerated(logits_after, params)


def p_value(
    drafter: Drafter,
    rule: str,
    params: SamplingParams,
    least_accepted: float,
    monkeypatch: pytest.MonkeyPatch,
    num_samples: int = 300,
    kind: type = FASTEST,
    device_rounds: bool | None = None,
) -> float:
    """Chi-square of answers without a seed. Fails unless `least_accepted` drafts an answer were accepted."""
    monkeypatch.setattr(types.os, "urandom", random.Random(4).randbytes)
    engine = Engine(
        tiny_target(num_rows=30, kind=kind), ByteTokenizer(), drafter, judge=RuleJudge(RULES[rule]),
        device_rounds=device_rounds,
    )  # fmt: skip
    sequences = run(engine, [PROMPT] * num_samples, params)
    num_accepted = sum(each.num_accepted for seq in sequences for each in seq.rounds)
    assert num_accepted > least_accepted * num_samples, "the test needs drafts that stand"
    return chi_square((tuple(seq.output_ids) for seq in sequences), expected_answers(params))
