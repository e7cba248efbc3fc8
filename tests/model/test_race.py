"""The race that draws the target's token: its distribution, what filters leave, and who may know its numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from paceline.errors import NumericsError
from paceline.model.sampling.logits import target_probs
from paceline.model.sampling.race import FIELD, race
from paceline.rng import OTHERS, Noise
from paceline.types import SamplingParams

PLAIN = SamplingParams(temperature=1.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "all": {"temperature": 1.4, "min_p": 0.05, "top_k": 6, "top_p": 0.9},
}


def logits_of(size: int, sharpness: float = 1.0) -> torch.Tensor:
    return sharpness * torch.randn(size, generator=torch.Generator().manual_seed(size))


def p_value(logits_V: torch.Tensor, params: SamplingParams, num_draws: int = 1500) -> float:
    """Chi-square of draws at as many positions, tokens that are seldom drawn taken together."""
    counts = Counter(race(logits_V, params, Noise(11, position)) for position in range(num_draws))
    masses = (num_draws * target_probs(logits_V[None], params)[0].double()).tolist()
    assert all(masses[token] > 0 for token in counts), "a token that filters took away was drawn"
    common = [token for token, mass in enumerate(masses) if mass >= 5]
    observed, expected = [counts[each] for each in common], [masses[each] for each in common]
    if len(common) < sum(mass > 0 for mass in masses):
        observed, expected = [*observed, num_draws - sum(observed)], [*expected, num_draws - sum(expected)]
    scale = num_draws / sum(expected)
    from scipy.stats import chisquare  # here, because every process that collects this file would import it

    return float(chisquare(observed, [each * scale for each in expected]).pvalue) if len(observed) > 1 else 1.0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_token_wins_with_its_probability(name: str) -> None:
    assert p_value(logits_of(9, 1.5), SamplingParams(**{"temperature": 1.0, **SETTINGS[name]})) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.97}, {"top_k": 140}, {"min_p": 0.05}])
def test_tokens_behind_the_field_race_as_one(settings: dict[str, Any]) -> None:
    """Among 300 nearly equal tokens more than half have no race number of their own."""
    logits_V, params = logits_of(300, 0.5), SamplingParams(temperature=1.0, **settings)
    assert float(target_probs(logits_V[None], params)[0].topk(FIELD).values.sum()) < 0.85
    assert p_value(logits_V, params) > 0.001


def test_one_number_for_all_tokens_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Noise.exponentials
    monkeypatch.setattr(Noise, "exponentials", lambda noise, tokens: right(noise, [0]) * len(list(tokens)))
    assert p_value(logits_of(9, 1.5), PLAIN) < 1e-6


def test_a_rest_that_has_no_number_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noise, "of_others", property(lambda noise: math.inf))
    assert p_value(logits_of(150, 0.5), PLAIN) < 1e-6


@pytest.mark.parametrize("size", [5, 64, 400])
def test_filters_leave_what_the_distribution_has(size: int) -> None:
    """Whatever wins has a probability in `target_probs`; the most likely one wins where nothing else is left."""
    alone: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}]
    for settings in alone:
        logits_V = logits_of(size, 2.0)
        params = SamplingParams(**{"temperature": 1.0, **settings})
        assert {race(logits_V, params, Noise(3, position)) for position in range(20)} == {int(logits_V.argmax())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"top_k": 4}, {"top_k": 20}, {"top_p": 0.3}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.4}]
)
def test_of_equals_at_a_filters_cut_those_are_drawn_that_the_distribution_has(settings: dict[str, Any]) -> None:
    """Tokens of one probability: which of them a sort has first is its own affair, and two sorts may differ."""
    for size in (50, 300):
        logits_V = logits_of(size, 1.5).round().roll(size // 3)
        params = SamplingParams(temperature=1.0, **settings)
        held = set(target_probs(logits_V[None], params)[0].nonzero().flatten().tolist())
        assert {race(logits_V, params, Noise(5, position)) for position in range(200)} <= held


def test_what_is_masked_is_never_drawn() -> None:
    logits_V = torch.full((300,), -math.inf)
    logits_V[[7, 211]] = torch.tensor([0.0, 1.0])
    assert {race(logits_V, PLAIN, Noise(2, position)) for position in range(50)} == {7, 211}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_distribution_is_refused(wrong: float) -> None:
    with pytest.raises(NumericsError):
        race(torch.full((9,), wrong), PLAIN, Noise(0, 0))


def test_numbers_are_keyed_by_seed_position_and_token() -> None:
    keys = [(seed, position, token) for seed in (0, 1) for position in (0, 1) for token in (0, 1, OTHERS)]
    numbers = [Noise(seed, position).exponentials([token])[0] for seed, position, token in keys]
    assert len(set(numbers)) == len(keys) and min(numbers) > 0
    assert Noise(1, 1).exponentials([0, 1]) == [Noise(1, 1).exponentials([each])[0] for each in (0, 1)]
    many = Noise(5, 9).exponentials(range(20_000))
    assert sum(many) / len(many) == pytest.approx(1.0, abs=0.03)
