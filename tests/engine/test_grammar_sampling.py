"""Sampled answers that keep to a grammar have the target's distribution, constrained to the grammar."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from doubles import FakeTarget
from engine_runs import run
from grammar_engines import drafters, tiny_tokenizer
from sampled_answers import Answer, chi_square, enumerated
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.sampling.logits import penalise
from paceline.types import GrammarSpec, SamplingParams
from paceline.verify.rules import RULES

PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 1.3, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 0.6}
PIECES = ["a", "b", "c", "ab"]
LANGUAGE = "c?[ab](a|bb|c)?b*"


def in_language(text: str, max_len: int = 5) -> list[bool]:
    """Allowed next tokens, end last, by Python's `re` and every string that could still follow."""
    ends = ["".join(letters) for count in range(max_len) for letters in itertools.product("abc", repeat=count)]
    begins = [any(re.fullmatch(LANGUAGE, text + piece + end) for end in ends) for piece in PIECES]
    return [*begins, re.fullmatch(LANGUAGE, text) is not None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule", "shape"),
    [
        ("sometimes", "auto", PLAIN),
        ("sometimes, with probabilities", "rejection", PLAIN),
        ("adversarial", "block", FILTERED),
    ],
    ids=["auto-plain", "rejection-plain", "block-filtered"],
)
def test_sampled_answers_have_the_constrained_distribution(name: str, rule: str, shape: dict[str, float]) -> None:
    target = FakeTarget(vocab_size=5, sharpness=1.0, num_rows=16, max_len=16)
    engine = Engine(
        target,
        tiny_tokenizer(),
        drafters(target)[name],
        judge=RuleJudge(RULES[rule]),
        eos_token_ids=(4,),
    )
    num_samples, spec = 500, GrammarSpec("regex", LANGUAGE)
    params = [SamplingParams(**shape, seed=seed, max_tokens=4, grammar=spec) for seed in range(num_samples)]  # pyright: ignore[reportArgumentType]

    def logits_after(answer: Answer) -> Tensor:
        tokens = [1, 2, *answer]
        logits = penalise(target.logits_after(tokens)[None], params[0], tokens, Counter(answer), []).clone()
        allowed = in_language("".join(PIECES[token] for token in answer))
        logits[0, [token for token in range(5) if not allowed[token]]] = -torch.inf
        return logits

    answers = [tuple(seq.output_ids) for seq in run(engine, [[1, 2]] * num_samples, params)]
    assert chi_square(answers, enumerated(logits_after, params[0], end=4)) > 1e-4
