"""Lossy rules say exactly what `verify/lossy.py` states, by enumeration; at lossless values they are the lossless
rules' bits.

Nothing of the rules' own arithmetic is used: every draft, every token of the target and every number that a rule draws
is gone through (a rule is piecewise constant in each number, so that bisection finds where it changes), and what is
said is compared with the docstring's formulas, written out anew here in plain Python.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from checked_rows import checked, judged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import NumericsError
from paceline.lossy import Ledger, Lossy
from paceline.verify import rules
from paceline.verify.lossy import follow, lossy_rule
from paceline.verify.rules import Uniforms

SETTINGS = (
    "typical:eps=0.3,delta=0.5",
    "typical:eps=0.05,delta=0.3",
    "relaxed:n=2,delta=0.3",
    "relaxed:n=1,delta=1",
    "relaxed:n=4,delta=0.9",
    "threshold:single=0.25",
    "threshold:single=0.4,acc=0.6",
    "lenience:0.5",
    "lenience:0.2",
    "mixture:0.7",
    "mixture:0",
)
LOSSLESS = ("relaxed:n=3,delta=0", "threshold:1", "lenience:1", "mixture:1", "typical:eps=1,delta=1000")
TARGETS = {
    "spread": [0.4, 0.3, 0.15, 0.1, 0.05],
    "with ties": [0.3, 0.3, 0.2, 0.2, 0.0],
    "nearly sure": [0.9, 0.0, 0.0, 0.06, 0.04],
    "sure": [0.0, 0.0, 1.0, 0.0, 0.0],
    "flat": [0.2] * 5,
}
DRAFTS = {
    "near": [0.3, 0.4, 0.1, 0.1, 0.1],
    "far": [0.05, 0.05, 0.1, 0.2, 0.6],
    "sure of itself": [0.0, 0.95, 0.05, 0.0, 0.0],
    "the target's zeros": [0.0, 0.2, 0.3, 0.0, 0.5],
}
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
VOCAB = range(5)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given(Uniforms):
    """The number of each use, one for all slots."""

    seed: int = 0
    anchor_position: int = 0
    own: float = 0.0
    coin: float = 0.0
    again: float = 0.0

    def sample(self, slot: int) -> float:
        return self.own

    def accept(self, slot: int) -> float:
        return self.coin

    def residual(self, slot: int) -> float:
        return self.again


def measures(outcome: Callable[[float], T], pieces: int = 20) -> dict[T, float]:
    """How much of [0, 1) leads to each outcome of a piecewise constant function; pieces must be longer than 1 /
    `pieces`."""
    measure: dict[T, float] = defaultdict(float)
    edges = [place / pieces for place in range(pieces)]
    begin, now = 0.0, outcome(0.0)
    for low, high in zip(edges, [*edges[1:], 1.0 - 1e-15], strict=True):
        after = outcome(high)
        if after != now:
            left, right = low, high
            for _ in range(34):
                middle = (left + right) / 2
                left, right = (middle, right) if outcome(middle) == now else (left, middle)
            measure[now] += right - begin
            begin, now = right, after
    measure[now] += 1.0 - begin
    return dict(measure)


def chance(rule: Lossy, x: int, target: list[float], draft: float) -> float:
    """a(x), as the docstring has it."""
    values: Any = rule.rule
    if target[x] == 0:
        return 0.0
    lossless = min(1.0, target[x] / draft)
    match rule.name:
        case "typical":
            entropy = -sum(share * math.log(share) for share in target if share)
            return 1.0 if target[x] > min(values.eps, values.delta * math.exp(-entropy)) else lossless
        case "relaxed":
            best = sorted(VOCAB, key=lambda token: (-target[token], token))[: values.n]
            return 1.0 if x in best and target[x] > max(target) - values.delta else lossless
        case "threshold":
            return 1.0 if target[x] >= values.single else min(1.0, target[x] / (values.acc * draft))
        case "lenience":
            return min(1.0, target[x] / (values.l * draft))
        case _:
            return min(1.0, values.lam * target[x] / draft + 1 - values.lam)


def said_drawn(rule: Lossy, target: list[float], draft: list[float]) -> list[float]:
    """Distribution that the docstring states for a sampled draft."""
    pairs = list(zip(target, draft, strict=True))
    lossless = [min(1.0, p / q) if q else 0.0 for p, q in pairs]
    extra = [q * (chance(rule, x, target, q) - lossless[x]) if q else 0.0 for x, (_, q) in enumerate(pairs)]
    short = [max(p - q, 0.0) for p, q in pairs]
    moved = sum(extra) / sum(short) if sum(short) else 0.0
    return [p + e - moved * s for p, e, s in zip(target, extra, short, strict=True)]


def distance(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


def divergence(stated: list[float], target: list[float]) -> float:
    return sum(s * math.log(s / p) for s, p in zip(stated, target, strict=True) if s > 1e-15)


def tensor(row: list[float]) -> Tensor:
    return torch.tensor(row, dtype=torch.float64)


def one_draft(
    rule: Lossy, x: int, rows_JV: Tensor, row_KV: Tensor, ledger: Ledger
) -> Callable[[float], tuple[bool, bool]]:
    """From the number that decides on the draft x: whether it stands, and whether that is a change."""

    def outcome(coin: float) -> tuple[bool, bool]:
        ledger.keep(0)
        stands = judged(lossy_rule(rule, ledger).verify, [x], row_KV, rows_JV, Given(coin=coin)).num_accepted == 1
        return stands, bool(ledger.sums[0].num_changed)

    return outcome


def replaced(rule: Lossy, x: int, rows_JV: Tensor, row_KV: Tensor) -> Callable[[float], int]:
    """From the number that draws it: the token in the place of the draft x when that falls."""

    def outcome(again: float) -> int:
        given = Given(coin=1 - 1e-12, again=again)
        return judged(lossy_rule(rule, Ledger()).verify, [x], row_KV, rows_JV, given).next_token

    return outcome


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


def said_beside(rule: Lossy, target: list[float], children: list[int]) -> list[float]:
    """Distribution that the docstring states after a node with these children."""
    outside, before = 1 - sum(target[child] for child in children), 1.0
    probs = [0.0] * 5
    for child in children:
        mine = (chance(rule, child, target, 1.0) - target[child]) / (1 - target[child]) if target[child] < 1 else 0.0
        probs[child] = target[child] + outside * mine * before
        before *= 1 - mine
    return [probs[x] if x in children else target[x] * before for x in VOCAB]


def behind(
    rule: Lossy, children: list[int], own: int, row: list[float], coin: float, ledger: Ledger, is_greedy: bool = False
) -> int:
    """Token committed after a node with these children, if the target's own token there is `own`."""
    draws = [own, 0]
    kept, token = follow(
        rule,
        children,
        [-1] * len(children),
        lambda path: draws[len(path)],
        lambda path: tensor(row),
        lambda slot: coin,
        ledger,
        is_greedy,
    )
    return children[kept[0]] if kept else token


def beside_own(
    rule: Lossy, children: list[int], own: int, row: list[float], ledger: Ledger
) -> Callable[[float], tuple[int, bool]]:
    """From the number that decides: what is said, and whether that is a change."""

    def outcome(coin: float) -> tuple[int, bool]:
        ledger.keep(0)
        token = behind(rule, children, own, row, coin, ledger)
        return token, bool(ledger.sums[0].num_changed)

    return outcome


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
    verify = lossy_rule(Lossy.of(name), ledger).verify
    assert judged(verify, drafts, draft_KV, target_JV, uniforms) == judged(
        rules.rejection, drafts, draft_KV, target_JV, uniforms
    )
    assert judged(verify, drafts, None, target_JV, uniforms) == judged(rules.match, drafts, None, target_JV, uniforms)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "max_tv", "num_tokens"),
    [
        ("drawn", 0.02, 2_000),
        ("certain", 0.2, 1_000),
        ("tree", 0.02, 2_000),
        ("greedy", 0.02, 5_000),
        ("drawn", 0.0, 500),
        ("tree", 0.0, 500),
    ],
)
def test_the_budget_is_never_exceeded(kind: str, max_tv: float, num_tokens: int) -> None:
    """At no token. What is said is priced here by the formulas above, not by the ledger."""
    random = torch.Generator().manual_seed(5)
    rows = torch.softmax(torch.randn(64, 5, generator=random, dtype=torch.float64) * 1.5, -1).tolist()
    rule, ledger = Lossy.of("lenience:0.3" if kind == "drawn" else "typical:eps=0.1,delta=0.3"), Ledger(max_tv)
    total, count, picks = 0.0, 0, torch.randint(0, 64, (2 * num_tokens, 2), generator=random).tolist()
    for number, (a, b) in enumerate(picks):
        uniforms, before = Uniforms(number, 3), len(ledger.sums)
        if kind == "drawn":
            row = checked([b % 5], tensor(rows[b]).unsqueeze(0), tensor(rows[a]).repeat(2, 1), uniforms)
            lossy_rule(rule, ledger).verify(row)
            prices = [distance(said_drawn(rule, rows[a], rows[b]), rows[a]), 0.0]
        else:
            children = [b % 5, (b + 1) % 5] if kind == "tree" else [b % 5]
            best, draws = rows[a].index(max(rows[a])), uniforms.sample(0)
            own = best if kind == "greedy" else next(x for x in VOCAB if sum(rows[a][: x + 1]) > draws or x == 4)
            token = behind(rule, children, own, rows[a], uniforms.accept(0), ledger, kind == "greedy")
            prices = [
                float(token != best) if kind == "greedy" else distance(said_beside(rule, rows[a], children), rows[a]),
                0.0,
            ]
        if number % 5 == 4:
            ledger.keep(len(ledger.sums) - 1)  # the last one was not said after all
        for place, sums in enumerate(ledger.sums[before:]):
            spent = sums.tv - (ledger.sums[before + place - 1].tv if before + place else 0.0)
            assert spent == 0.0 or spent == pytest.approx(prices[place]), "a lossy token counts as much as it costs"
            total += prices[place] if spent else 0.0
            count += 1
            assert total / count <= max_tv * (1 + 1e-12) + 1e-15
            assert sums.tv / count <= max_tv
        if count >= num_tokens:
            break
    assert count >= num_tokens
    assert max_tv == 0 or total / count > 0.9 * min(max_tv, 0.02), "the budget is used"


@pytest.mark.slow
def test_without_a_budget_it_would_be_exceeded() -> None:
    rule, ledger = Lossy.of("lenience:0.3"), Ledger()
    for number in range(500):
        row = checked(
            [4], tensor([DRAFTS["far"]][0]).unsqueeze(0), tensor(TARGETS["spread"]).repeat(2, 1), Uniforms(number, 1)
        )
        lossy_rule(rule, ledger).verify(row)
    assert ledger.mean_tv > 0.05


def test_damaged_numbers_refuse_drafts() -> None:
    row = checked([1], tensor(DRAFTS["near"]).unsqueeze(0), tensor([math.nan] * 5).repeat(2, 1), Uniforms(1, 1))
    with pytest.raises(NumericsError, match="no distribution"):
        lossy_rule(Lossy.of("lenience:0.5"), Ledger()).verify(row)
