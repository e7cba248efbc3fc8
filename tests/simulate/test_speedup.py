"""Curves, their best, tokens per second, the split and what more acceptance brings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import FractionDrafter, RooflineCosts, ShapeDrafter, StepCosts, ToyCosts, table_of
from paceline.simulate.speedup import Load, best, constant, from_survival, predict, tokens_per_round


def roofline(host_s: float = 0.0, fraction: float = 0.1) -> RooflineCosts:
    shape = catalogue.find("Qwen3-8B")
    return RooflineCosts(
        shape, Deployment(catalogue.machines()["H100"], shape.precisions), FractionDrafter(fraction), host_s
    )


def test_the_toy_is_the_tokens_per_round() -> None:
    prediction = predict(ToyCosts(), constant(0.8), Load(max_draft=5), has_unit=False)
    assert prediction.curve == [(length, pytest.approx(tokens_per_round(constant(0.8), length))) for length in range(6)]
    assert (prediction.best_draft_length, prediction.tokens_per_s) == (5, None)


def test_the_curve_is_the_formula() -> None:
    costs, acceptance = roofline(), from_survival([0.8, 0.6, 0.5])
    prediction = predict(costs, acceptance, Load(4, 2000, 3))
    plain = costs.verify_s(4, 1, 2000)
    expected = tokens_per_round(acceptance, 2) / (costs.verify_s(4, 3, 2000) / plain + 0.1 * 2)
    assert prediction.curve[0] == (0, 1.0)
    assert prediction.curve[2][1] == pytest.approx(expected, rel=1e-12)


def test_host_time_counts_on_both_sides() -> None:
    plain_s = roofline().verify_s(1, 1, 4096)
    assert (
        predict(roofline(plain_s), constant(0.8), Load()).speedup > predict(roofline(), constant(0.8), Load()).speedup
    )


def test_rates_and_split() -> None:
    prediction = predict(roofline(1e-4), constant(0.8), Load(8, 4096, 8))
    assert prediction.tokens_per_s is not None and prediction.plain_tokens_per_s is not None
    assert prediction.plain_tokens_per_s == pytest.approx(8 / prediction.plain_round_s)
    assert prediction.tokens_per_s / prediction.plain_tokens_per_s == pytest.approx(prediction.speedup)
    assert sum(prediction.time_split.values()) == pytest.approx(1.0)
    assert prediction.time_split["host"] == pytest.approx(1e-4 / prediction.round_s)
    assert prediction.time_split["drafter"] > 0


def test_the_shortest_of_equals_is_the_best() -> None:
    assert best([(0, 1.0), (1, 2.0), (2, 2.0)]) == (1, 2.0)
    assert best([(0, 1.0), (1, 0.9)]) == (0, 1.0)


def test_more_acceptance_buys_more() -> None:
    prediction = predict(roofline(), constant(0.8), Load())
    changes = {change.points: change for change in prediction.sensitivity}
    assert (
        changes[-0.1].speedup
        < changes[-0.01].speedup
        < prediction.speedup
        < changes[0.01].speedup
        < changes[0.1].speedup
    )
    assert changes[0.1].best_draft_length >= prediction.best_draft_length
    assert changes[0.01].gain == pytest.approx(changes[0.01].speedup / prediction.speedup - 1)


def test_a_drafter_of_its_own_size_does_not_grow_with_the_target() -> None:
    shape = catalogue.find("Qwen3-8B")
    deployment = Deployment(catalogue.machines()["H100"], shape.precisions)
    drafter = ShapeDrafter(0.5e9, 9.895e14, 3.35e12, block=16)
    costs = RooflineCosts(shape, deployment, drafter)
    assert costs.draft_s(1, 15, 4096) == pytest.approx(2 * 0.5e9 / 3.35e12)


def test_a_table_takes_the_place_of_the_roofline() -> None:
    steps = {"verify": [[1, 1, 0.010], [1, 3, 0.012]], "draft": [[1, 1, 0.001], [1, 2, 0.002]], "host_s": 0.001}
    costs: StepCosts = table_of(steps)
    prediction = predict(costs, constant(0.5), Load(1, 100, 2))
    assert prediction.curve[2][1] == pytest.approx(1.75 * 0.011 / 0.015)
    fallback = replace(table_of({"verify": steps["verify"]}), drafter=FractionDrafter(0.1))
    assert fallback.draft_s(1, 2, 100) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"batch": 0}, "batch must be"),
        ({"context": 0}, "context must be"),
        ({"max_draft": -1}, "max_draft must be"),
        ({"max_draft": 9999}, "between 0 and 1024"),
    ],
)
def test_impossible_loads(options: dict[str, int], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        Load(**options)
