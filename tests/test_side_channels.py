"""The attack on streams and on drafters: distinct answers are named, equal ones are not, and intervals hold."""

from __future__ import annotations

import random

import numpy as np
import pytest
from drafter_membership import auc, compared
from side_channels import PROMPTS, VIEWS, Seen, attacked, price, wilson


def answers(draw: random.Random, shift: int) -> dict[tuple[int, int], Seen]:
    """Six answers to each prompt; chunks of prompt `n` are `shift * n` bytes longer."""
    seen = {}
    for prompt in range(len(PROMPTS)):
        for number in range(6):
            sizes = [200 + shift * prompt + draw.randrange(4) for _ in range(20)]
            seen[prompt, number] = (sizes, [0.1 + 0.01 * place for place in range(20)])
    return seen


def test_only_what_differs_is_named() -> None:
    result = attacked(answers(random.Random(0), 9))
    assert set(result) == {"prompt", "language"} and set(result["prompt"]) == set(VIEWS)
    assert result["prompt"]["sizes and times"]["accuracy"] > 0.9
    assert result["prompt"]["times"]["accuracy"] < 0.3
    assert attacked(answers(random.Random(0), 0))["prompt"]["sizes and times"]["accuracy"] < 0.3


def test_the_price_is_a_ratio_of_pairs() -> None:
    plain = answers(random.Random(0), 1)
    slower = {key: (sizes, [2 * time for time in times]) for key, (sizes, times) in plain.items()}
    figures = price(slower, plain)
    for part in ("first_s", "total_s"):
        assert figures[part]["of_plain"] == pytest.approx(2.0)
        assert figures[part]["interval"] == pytest.approx((2.0, 2.0))


def test_intervals() -> None:
    assert wilson(10, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert auc(np.array([2.0, 3.0]), np.array([1.0, 2.0])) == pytest.approx(0.875)
    draw = np.random.default_rng(0)
    trained, heldout = draw.normal(0.0, 1.0, (80, 2)), draw.normal(2.0, 1.0, (60, 2))
    result = compared(trained, heldout)
    assert result["loss"]["auc"] > 0.85 > 0.15 > result["acceptance_length"]["auc"]
    low, high = result["loss"]["interval"]
    assert 0.8 < low < result["loss"]["auc"] < high < 1.0
