"""Lossy rules say exactly what `verify/lossy.py` states, by enumeration; at lossless values they are the lossless
rules' bits.

Nothing of the rules' own arithmetic is used: every draft, every token of the target and every number that a rule draws
is gone through (a rule is piecewise constant in each number, so that bisection finds where it changes), and what is
said is compared with the docstring's formulas, written out anew here in plain Python.
"""

from __future__ import annotations

import math

import pytest
import torch
from checked_rows import checked, judged
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_outcomes import (
    DRAFTS,
    LOSSLESS,
    SETTINGS,
    TARGETS,
    VOCAB,
    behind,
    beside_own,
    distance,
    divergence,
    measures,
    one_draft,
    replaced,
    said_beside,
    said_drawn,
    tensor,
)

from paceline.lossy import Ledger, Lossy
from paceline.verify import rules
from paceline.verify.lossy import drawn, follow
from paceline.verify.rules import Uniforms

DRAWN = [
    (name, list(TARGETS)[(number + place) % len(TARGETS)], drafted)
    for number, name in enumerate(SETTINGS)
    for place, drafted in enumerate(DRAFTS)
]
"""Every pair of a setting and a drafter, every target with each of the rules."""
CERTAIN = [
    (name, list(TARGETS)[(number + place) % len(TARGETS)], children)
    for number, name in enumerate(SETTINGS)
    for place, children in enumerate(([0], [1], [3], [2, 0], [4, 3, 1], []))
]
"""Every pair of a setting, a target and a node's children."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "aimed", "drafted"), DRAWN)
def test_drawn_drafts_are_said_as_stated(name: str, drafted: str, aimed: str) -> None:
    rule, target, draft = Lossy.of(name), TARGETS[aimed], DRAFTS[drafted]
    rows_JV, row_KV = tensor(target).repeat(2, 1), tensor(draft).unsqueeze(0)
    probs, ledger, changed = [0.0] * 5, Ledger(), 0.0
    for x in (x for x in VOCAB if draft[x]):
        for (stands, is_changed), length in measures(one_draft(rule, x, rows_JV, row_KV, ledger)).items():
            changed += draft[x] * length * is_changed
            if stands:
                probs[x] += draft[x] * length
                continue
            for token, part in measures(replaced(rule, x, rows_JV, row_KV)).items():
                probs[token] += draft[x] * length * part
    stated = said_drawn(rule, target, draft)
    assert probs == pytest.approx(stated, abs=1e-9)
    assert ledger.sums[0].tv == pytest.approx(distance(stated, target), abs=1e-9)
    assert ledger.sums[0].kl == pytest.approx(divergence(stated, target), abs=1e-9)
    assert changed == pytest.approx(distance(stated, target), abs=1e-9), "no more tokens are changed than must be"


@pytest.mark.parametrize(("name", "aimed", "children"), CERTAIN)
def test_certain_drafts_and_trees_are_said_as_stated(name: str, children: list[int], aimed: str) -> None:
    rule, target = Lossy.of(name), TARGETS[aimed]
    probs, ledger, changed = [0.0] * 5, Ledger(), 0.0
    for own in (own for own in VOCAB if target[own]):
        for (token, is_changed), length in measures(beside_own(rule, children, own, target, ledger)).items():
            probs[token] += target[own] * length
            changed += target[own] * length * is_changed
    stated = said_beside(rule, target, children)
    assert probs == pytest.approx(stated, abs=1e-9)
    assert ledger.sums[0].tv == pytest.approx(distance(stated, target), abs=1e-9)
    assert ledger.sums[0].kl == pytest.approx(divergence(stated, target), abs=1e-9)
    assert changed == pytest.approx(distance(stated, target), abs=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_chain_of_certain_drafts_is_the_formula_of_drawn_ones(name: str) -> None:
    for target in TARGETS.values():
        for x in VOCAB:
            one_hot = [float(token == x) for token in VOCAB]
            assert said_beside(Lossy.of(name), target, [x]) == pytest.approx(
                said_drawn(Lossy.of(name), target, one_hot)
            )


def test_known_distributions() -> None:
    """Known results of rules, computed without the formulas above."""
    target, draft = TARGETS["spread"], DRAFTS["far"]
    mixed = [0.7 * p + 0.3 * q for p, q in zip(target, draft, strict=True)]
    assert said_drawn(Lossy.of("mixture:0.7"), target, draft) == pytest.approx(mixed)
    lenient = said_drawn(Lossy.of("lenience:0.5"), target, draft)
    assert lenient[4] == pytest.approx(min(draft[4], target[4] / 0.5))
    everything = said_drawn(Lossy.of("typical:eps=0.01,delta=0.01"), target, draft)
    assert everything == pytest.approx(draft), "all tokens allowed: the draft's own shape"


weights = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=4, max_size=4)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    weights,
    weights,
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from(LOSSLESS),
)
def test_lossless_values_have_the_bits_of_the_lossless_rules(
    target_weights: list[list[int]], draft_weights: list[list[int]], drafts: list[int], seed: int, name: str
) -> None:
    target_JV = torch.nn.functional.normalize(torch.tensor(target_weights, dtype=torch.float32), p=1, dim=-1)
    draft_KV = torch.nn.functional.normalize(torch.tensor(draft_weights[:3], dtype=torch.float32), p=1, dim=-1)
    uniforms, ledger = Uniforms(seed, 7), Ledger()
    rule, row = Lossy.of(name), checked(drafts, draft_KV, target_JV, uniforms)
    assert drawn(rule, row, ledger) == rules.rejection(row)
    accepted, token = follow(
        rule,
        drafts,
        range(-1, len(drafts) - 1),
        lambda path: row.draw(len(path)),
        lambda path: target_JV[len(path)],
        uniforms.accept,
        ledger,
        False,
    )
    assert (len(accepted), token) == judged(rules.match, drafts, None, target_JV, uniforms)
    assert ledger.spent == (0.0, 0.0, 0)


def greedily(name: str, model: list[float], children: list[int], ledger: Ledger | None = None) -> int:
    return behind(
        Lossy.of(name), children, model.index(max(model)), model, 0.0, Ledger() if ledger is None else ledger, True
    )


@pytest.mark.parametrize("name", [*LOSSLESS, "relaxed:n=1,delta=1"])
@pytest.mark.parametrize("aimed", TARGETS)
def test_greedy_lossless_values_say_the_likeliest_token(name: str, aimed: str) -> None:
    for children in ([0], [1], [2], [3], [4], [1, 0], [4, 3, 2, 1]):
        model = TARGETS[aimed]
        assert greedily(name, model, children) == model.index(max(model))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("typical:eps=0.12,delta=1", {0, 1, 2}),
        ("relaxed:n=3,delta=0.2", {0, 1}),
        ("relaxed:n=1,delta=1", {0}),
        ("threshold:single=0.15", {0, 1, 2}),
        ("threshold:single=1,acc=0.5", {0, 1}),
        ("lenience:0.3", {0, 1, 2}),
        ("mixture:0.8", {0, 1, 2}),  # 0.8 * 0.4 < 0.8 * x + 0.2: above 0.15 - in floats 0.15 just holds
    ],
)
def test_greedy_drafts_stand_as_stated(name: str, allowed: set[int]) -> None:
    model = [0.4, 0.3, 0.1501, 0.1, 0.0499]
    assert {x for x in VOCAB if greedily(name, model, [x]) == x} == allowed
    ledger = Ledger()
    first = next((x for x in (4, 1, 2) if x in allowed), 0)
    assert greedily(name, model, [4, 1, 2], ledger) == first, "of several the first that is allowed"
    if first:
        assert ledger.sums[0] == (1.0, pytest.approx(math.log(0.4 / model[first])), 1)
    assert greedily(name, model, [4, 0]) == 0, "the likeliest goes before others"


@pytest.mark.parametrize("name", ["typical", "relaxed", "threshold:0.1", "lenience:0.3", "mixture:0.2"])
def test_greedy_says_nothing_that_cannot_be(name: str) -> None:
    assert greedily(name, [0.6, 0.4, 0.0, 0.0, 0.0], [3]) == 0
