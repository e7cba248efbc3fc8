"""The budget of lossy rules: no part of an answer exceeds it, and without one it would be exceeded."""

from __future__ import annotations

import math

import pytest
import torch
from checked_rows import checked
from lossy_outcomes import DRAFTS, TARGETS, VOCAB, behind, distance, said_beside, said_drawn, tensor

from paceline.errors import NumericsError
from paceline.lossy import Ledger, Lossy
from paceline.verify.lossy import drawn
from paceline.verify.rules import Uniforms


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
            drawn(rule, row, ledger)
            prices = [distance(said_drawn(rule, rows[a], rows[b]), rows[a]), 0.0]
        else:
            children = [b % 5, (b + 1) % 5] if kind == "tree" else [b % 5]
            best, draws = rows[a].index(max(rows[a])), uniforms.noise(0).uniform
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
        drawn(rule, row, ledger)
    assert ledger.mean_tv > 0.05


def test_damaged_numbers_refuse_drafts() -> None:
    row = checked([1], tensor(DRAFTS["near"]).unsqueeze(0), tensor([math.nan] * 5).repeat(2, 1), Uniforms(1, 1))
    with pytest.raises(NumericsError, match="no distribution"):
        drawn(Lossy.of("lenience:0.5"), row, Ledger())
