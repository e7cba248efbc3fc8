"""Two runs beside each other: intervals, chance by enumeration, verdicts, gates."""

from __future__ import annotations

import itertools
from math import comb

import numpy as np
import pytest
from eval_doubles import scores

from paceline.errors import ConfigError
from paceline.loop.evals.compare import Gate, cases_needed, compare, findable, resampled, sign_flips


def test_chance_is_that_of_all_ways_to_flip_signs() -> None:
    gains = np.array([0.5, -0.25, 1.0, 0.0, 0.75])
    moved = [0.5, 0.25, 1.0, 0.75]
    sums = [
        abs(sum(s * m for s, m in zip(signs, moved, strict=True))) for signs in itertools.product((-1, 1), repeat=4)
    ]
    assert sign_flips(gains) == pytest.approx(sum(each >= 2.0 - 1e-9 for each in sums) / 16)
    assert sign_flips(np.zeros(9)) == 1.0
    assert sign_flips(np.array([1.0] * 10)) == pytest.approx(2 / 2**10), "McNemar's exact test of 10 against 0"


def test_many_that_differ_are_drawn_and_agree_with_the_exact_law() -> None:
    gains = np.array([1.0] * 22 + [-1.0] * 8)
    exact = 2 * sum(comb(30, k) for k in range(9)) / 2**30
    assert sign_flips(gains) == pytest.approx(exact, abs=0.005)


@pytest.mark.slow
def test_the_interval_covers_as_often_as_it_says() -> None:
    generator, hits = np.random.default_rng(1), 0
    for seed in range(200):
        gains = generator.choice([-1.0, 0.0, 1.0], 150, p=[0.15, 0.65, 0.2])
        low, high = resampled(gains, -1.0, seed, draws=500)
        hits += low <= 0.05 <= high
    assert 180 <= hits <= 199  # 95% of 200


def test_verdicts_and_what_would_be_found() -> None:
    before = scores([1.0] * 60 + [0.0] * 40)
    same = compare(before, before)
    assert (same.verdict, same.difference, same.chance, same.same_text) == ("no difference seen", 0.0, 1.0, 100)
    worse = compare(before, scores([1.0] * 45 + [0.0] * 55, "two"))
    assert (
        worse.verdict == "worse" and worse.difference == pytest.approx(-0.15) and (worse.gained, worse.lost) == (0, 15)
    )
    assert worse.interval[0] < -0.15 < worse.interval[1] < 0
    assert compare(scores([0.0] * 100), before).verdict == "better"
    few = compare(scores([1.0] * 5), scores([0.0] + [1.0] * 4))
    assert few.verdict == "no difference seen", "one of five is chance"


def test_power_is_what_simulation_finds() -> None:
    number = cases_needed(0.05, 0.45)
    assert findable(number, 0.45) <= 0.05 < findable(number - 1, 0.45)
    generator, num_significant = np.random.default_rng(0), 0
    spread = 0.45**2 + 0.05**2
    chances = [(spread + 0.05) / 2, 1 - spread, (spread - 0.05) / 2]
    for seed in range(60):
        num_significant += sign_flips(generator.choice([-1.0, 0.0, 1.0], number, p=chances), seed, draws=999) < 0.01
    assert num_significant >= 45, "nine in ten"


def test_other_suites_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="different suites"):
        compare(scores([1.0]), scores([1.0], digest="other"))


def test_gates() -> None:
    good, bad = scores([1.0] * 90 + [0.0] * 10), scores([1.0] * 70 + [0.0] * 30, "student")
    assert Gate(fail_below=0.9).refusals(good) == []
    assert "0.700, is below 0.9" in Gate(fail_below=0.9).refusals(bad)[0]
    assert "low end" in Gate(fail_below=0.9, surely=True).refusals(good)[0]
    assert "student is worse than one" in Gate().refusals(bad, compare(good, bad))[0]
    near = scores([1.0] * 89 + [0.0] * 11, "student")
    assert Gate(margin=0.05).refusals(near, compare(good, near)) == []
    assert "is not ruled out" in Gate(margin=0.01).refusals(near, compare(good, near))[0]
    other_words = scores([1.0] * 90 + [0.0] * 10, "drafted", texts=["x"] * 100)
    assert "100 of 100 answers differ" in Gate(same_text=True).refusals(other_words, compare(good, other_words))[0]


def test_one_case_is_not_surely_above_anything() -> None:
    """Its score was compared in place of the interval that it does not have."""
    (why,) = Gate(fail_below=0.5, surely=True).refusals(scores([1.0]))
    assert "unknown with a single case" in why and Gate(fail_below=0.5).refusals(scores([1.0])) == []
    with pytest.raises(ConfigError, match="--surely needs --fail-below"):
        Gate(surely=True)


def test_agreement_of_few_cases_proves_little() -> None:
    right = scores([1.0] * 5)
    assert right.interval == pytest.approx((0.025**0.2, 1.0)), "Clopper and Pearson"
    assert compare(right, right).interval == pytest.approx((0.025**0.2 - 1, 1 - 0.025**0.2))
    assert Gate(fail_below=0.9, surely=True).refusals(right) and Gate(margin=0.05).refusals(
        right, compare(right, right)
    )
    assert not Gate(margin=0.05).refusals(right, compare(scores([1.0] * 72), scores([1.0] * 72)))
    assert scores([0.5] * 5).interval == pytest.approx((0.5 * 0.025**0.2, 1 - 0.5 * 0.025**0.2))
    one_lost = compare(scores([1.0] * 100), scores([0.0] + [1.0] * 99))
    assert one_lost.interval[0] < -0.04, "a loss of 0.04 leaves one lost case or none in 9 of 100 runs"
