"""Sampled answers that keep to a grammar have the target's distribution, constrained to the grammar."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import torch
from doubles import FakeTarget, ScriptedDrafter
from engine_runs import run
from grammar_engines import drafters, tiny_tokenizer

from paceline.engine.engine import Engine
from paceline.engine.round import RuleJudge
from paceline.model.sampling.logits import penalise, target_probs
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


def exact_distribution(target: FakeTarget, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every answer of at most `max_tokens`, by enumeration."""
    answers: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for answer, mass in answers.items():
            if answer[-1:] == (4,):
                longer[answer] = mass
                continue
            tokens = prompt + list(answer)
            logits = penalise(target.logits_after(tokens)[None], params, tokens, Counter(answer), []).clone()
            allowed = in_language("".join(PIECES[token] for token in answer))
            logits[0, [token for token in range(5) if not allowed[token]]] = -torch.inf
            for token, share in enumerate(target_probs(logits, params)[0].tolist()):
                if share > 0:
                    longer[(*answer, token)] = mass * share
        answers = longer
    return answers


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
    adversary = ScriptedDrafter(target, mode="adversarial", with_probs=True)
    engine = Engine(
        target,
        tiny_tokenizer(),
        adversary if name == "adversarial" else drafters(target)[name],
        judge=RuleJudge(RULES[rule]),
        eos_token_ids=(4,),
    )
    num_samples, spec = 500, GrammarSpec("regex", LANGUAGE)
    params = [SamplingParams(**shape, seed=seed, max_tokens=4, grammar=spec) for seed in range(num_samples)]  # pyright: ignore[reportArgumentType]
    counts = Counter(tuple(seq.output_ids) for seq in run(engine, [[1, 2]] * num_samples, params))
    expected = exact_distribution(target, [1, 2], params[0])
    assert set(counts) <= set(expected)
    common = [answer for answer, mass in expected.items() if mass * num_samples >= 5]
    observed, masses = [counts[answer] for answer in common], [expected[answer] * num_samples for answer in common]
    rest = num_samples - sum(masses)
    if rest > 1:
        observed, masses = [*observed, num_samples - sum(observed)], [*masses, rest]
    scale = num_samples / sum(masses)
    assert len(common) >= 8
    from scipy.stats import chisquare  # which takes most of a second to import

    assert chisquare(observed, [mass * scale for mass in masses]).pvalue > 1e-4
