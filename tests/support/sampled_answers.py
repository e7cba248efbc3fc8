"""Answers of the tiny target, sampled with a drafter, against the distribution of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
from doubles import ByteTokenizer
from engine_runs import run
from scipy.stats import chisquare
from tiny_dflash import PROMPT, tiny_target

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

FASTEST: type = Decoder if native_lib.load() is None else NativeDecoder


@cache
def expected_answers(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer to PROMPT, by enumeration."""
    target = tiny_target()
    masses: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        longer = {}
        for answer, mass in masses.items():
            tokens, row = PROMPT + list(answer), target.cache.allocate()
            logits_TV = target.forward(ForwardBatch([row], [0], [len(tokens)], tokens, "last")).logits_TV
            target.cache.free(row)
            for token, share in enumerate(target_probs(logits_TV[-1:], params)[0].tolist()):
                if share > 0:
                    longer[(*answer, token)] = mass * share
        masses = longer
    return masses


def p_value(
    drafter: Drafter,
    rule: str,
    params: SamplingParams,
    least_accepted: float,
    monkeypatch: pytest.MonkeyPatch,
    num_samples: int = 300,
) -> float:
    """Chi-square of answers without a seed. Fails unless `least_accepted` drafts an answer were accepted."""
    monkeypatch.setattr(types.os, "urandom", random.Random(4).randbytes)
    engine = Engine(tiny_target(num_rows=30, kind=FASTEST), ByteTokenizer(), drafter, judge=RuleJudge(RULES[rule]))
    sequences = run(engine, [PROMPT] * num_samples, params)
    num_accepted = sum(each.num_accepted for seq in sequences for each in seq.rounds)
    assert num_accepted > least_accepted * num_samples, "the test needs drafts that stand"
    counts, expected = Counter(tuple(seq.output_ids) for seq in sequences), expected_answers(params)
    assert set(counts) <= set(expected)
    common = [answer for answer, mass in expected.items() if mass * num_samples >= 5]
    observed, masses = [counts[each] for each in common], [expected[each] * num_samples for each in common]
    observed, masses = [*observed, num_samples - sum(observed)], [*masses, num_samples - sum(masses)]
    return float(chisquare(observed, masses).pvalue)
