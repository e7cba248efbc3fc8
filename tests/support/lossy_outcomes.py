"""Outcomes of lossy rules by enumeration, and the distributions that `verify/lossy.py` states for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from checked_rows import checked
from torch import Tensor

from paceline.lossy import Ledger, Lossy
from paceline.verify.lossy import drawn, follow
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

VOCAB = range(5)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Given(Uniforms):
    """The number of each use, one for all slots."""

    seed: int = 0
    anchor_position: int = 0
    coin: float = 0.0
    again: float = 0.0

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
        stands = drawn(rule, checked([x], row_KV, rows_JV, Given(coin=coin)), ledger).num_accepted == 1
        return stands, bool(ledger.sums[0].num_changed)

    return outcome


def replaced(rule: Lossy, x: int, rows_JV: Tensor, row_KV: Tensor) -> Callable[[float], int]:
    """From the number that draws it: the token in the place of the draft x when that falls."""

    def outcome(again: float) -> int:
        uniforms = Given(coin=1 - 1e-12, again=again)
        return drawn(rule, checked([x], row_KV, rows_JV, uniforms), Ledger()).next_token

    return outcome


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
