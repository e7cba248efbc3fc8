"""Seasons, residuals and alarms on series whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.loop.adapt.config import PolicyConfig
from paceline.loop.adapt.traffic.baseline import Seasonal
from paceline.loop.adapt.traffic.drift import Series
from paceline.loop.adapt.traffic.hours import DAY, SHORTER, WEEK, Sums, _hour_s, total

FIRST = 20_454 * DAY


def noise(seed: int, number: int, sd: float = 0.03) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, sd, number)


def run(values: np.ndarray, sd: float = 0.03, skip: Sequence[int] = ()) -> tuple[Series, list[int]]:
    """A series over hourly values; the hours at which an alarm was held."""
    series, held = Series(PolicyConfig()), []
    for at, value in enumerate(values):
        if at not in skip:
            series.update(FIRST + at, float(value), sd**2)
        series.tick(FIRST + at)
        if series.held_at == FIRST + at:
            held.append(at)
    return series, held


class TestSums:
    def test_the_error_is_that_of_a_ratio_over_requests(self) -> None:
        draw = np.random.default_rng(1)
        ratios = []
        for _ in range(400):
            lengths = draw.lognormal(4.8, 0.7, 60).astype(int) + 8
            rounds = 1 + draw.binomial(lengths - 1, 1 / draw.normal(3, 0.4, 60).clip(1.2))
            ratios.append(Sums.of(zip(lengths.tolist(), rounds.tolist(), strict=True)))
        spread = np.std([math.log(each.tokens_per_round) for each in ratios])
        assert np.mean([each.log_variance for each in ratios]) ** 0.5 == pytest.approx(spread, rel=0.2)

    def test_they_add_up(self) -> None:
        parts = [(10.0, 4.0), (30.0, 9.0), (0.0, 0.0)]
        assert total([Sums.of(parts[:1]), Sums.of(parts[1:])]) == Sums.of(parts)
        assert Sums().log_variance == math.inf and Sums().tokens_per_round == 1.0


@pytest.mark.parametrize(("text", "seconds"), [(None, 3600), ("8", 8), ("0.5", 0.5)])
def test_hours_can_be_shorter(text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHORTER, raising=False)
    if text is not None:
        monkeypatch.setenv(SHORTER, text)
    assert _hour_s() == seconds


@pytest.mark.parametrize("text", ["", "an hour", "nan", "0", "-8", "7200"])
def test_hours_of_no_length(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHORTER, text)
    with pytest.raises(ConfigError, match=f"{SHORTER} is '{text}': give the seconds"):
        _hour_s()


class TestSeason:
    def test_days_and_weekends_are_learned(self) -> None:
        season = Seasonal()
        truth = np.array(
            [0.1 * math.cos(at / DAY * 2 * math.pi) - 0.15 * (at % WEEK >= 5 * DAY) for at in range(3 * WEEK)]
        )
        for at, value in enumerate(truth[: 2 * WEEK] + noise(0, 2 * WEEK)):
            season.learn(FIRST + at, float(value), 0.03**2)
        errors = [season.predict(FIRST + at)[0] - truth[at] for at in range(2 * WEEK, 3 * WEEK)]
        assert np.abs(errors).mean() < 0.03

    def test_little_is_known_of_what_was_seldom_seen(self) -> None:
        season = Seasonal()
        assert season.predict(FIRST)[1] == math.inf
        for at in range(DAY):
            season.learn(FIRST + at, 1.0, 0.03**2)
        seen, unseen = season.predict(FIRST)[1], season.predict(FIRST + 3 * DAY)[1]
        assert unseen > seen
        assert not season.has_week

    def test_numbers_that_are_none_teach_nothing(self) -> None:
        season = Seasonal()
        season.learn(FIRST, math.nan, 1.0)
        season.learn(FIRST, 1.0, math.nan)
        assert season.num_hours == 0


class TestSeries:
    @pytest.mark.slow
    def test_a_fall_is_raised_within_hours_and_held_after_a_day(self) -> None:
        values = noise(2, 2 * WEEK)
        values[9 * DAY :] -= 0.12
        series, held = run(values)
        assert series.raised_at is not None and 0 <= series.raised_at - FIRST - 9 * DAY <= 6
        assert held == [series.raised_at - FIRST + DAY - 1]
        assert series.loss == pytest.approx(1 - math.exp(-0.12), abs=0.03)
        assert series.season.num_hours == series.raised_at - FIRST, "what was seen since teaches the season nothing"

    def test_a_fall_that_goes_away_is_none(self) -> None:
        values = noise(3, 2 * WEEK)
        values[9 * DAY : 9 * DAY + 8] -= 0.3
        series, held = run(values)
        assert series.num_raised >= 1 and held == [] and series.state == "calm"

    def test_the_first_week_is_slow(self) -> None:
        """A weekend that was never seen looks like a fall of two days."""
        values = noise(4, 2 * WEEK)
        weekend = [at for at in range(2 * WEEK) if (at // DAY + 3) % 7 >= 5]
        values[weekend] -= 0.15
        series, held = run(values)
        assert held == [] and series.season.has_week

    @pytest.mark.parametrize("seed", range(4))
    def test_a_fall_after_two_days_of_little_traffic_lasts(self, seed: int) -> None:
        """Three requests an hour, then a third less, as two vLLM replicas on a small machine had it: the first hours of
        the drop are half of what is known of autocorrelation."""
        values = noise(seed, 54 + 36, 0.17)
        values[54:] -= 0.4
        series = Series(PolicyConfig(early_periods=1))
        for at, value in enumerate(values):
            series.update(FIRST + at, float(value), 0.2**2)
            series.tick(FIRST + at)
        assert series.state == "held" and series.loss > 0.25

    def test_before_a_week_an_alarm_must_hold_six_days(self) -> None:
        values = noise(10, 2 * WEEK)
        values[4 * DAY :] -= 0.4
        series, held = run(values)
        assert series.raised_at is not None and not series.season.has_week
        assert held == [series.raised_at - FIRST + PolicyConfig().early_periods * DAY - 1]

    def test_a_day_of_few_hours_is_not_judged(self) -> None:
        values = noise(11, 2 * WEEK)
        values[9 * DAY :] -= 0.3
        series, held = run(values, skip=range(9 * DAY + 9, 10 * DAY + 9))
        assert series.raised_at is not None and series.raised_at - FIRST < 9 * DAY + 9
        assert held == [series.raised_at - FIRST + 2 * DAY - 1]

    @pytest.mark.parametrize(("hours", "days"), [(10, 3), (6, 5)])
    def test_a_fall_of_office_hours_is_held(self, hours: int, days: int) -> None:
        """Traffic of ten or six hours on five days of the week: two workdays, with six hours and a weekend."""
        values = noise(13, 8 * WEEK)
        values[5 * WEEK :] -= 0.12  # a Thursday
        closed = [at for at in range(8 * WEEK) if at // DAY % 7 in (2, 3) or not 8 <= at % DAY < 8 + hours]
        series, held = run(values, skip=closed)
        assert len(held) == 1 and held[0] < 5 * WEEK + days * DAY
        assert series.state == "calm" and series.season.level == pytest.approx(-0.12, abs=0.03), "two weeks later"

    def test_no_fall_of_office_hours_is_held(self) -> None:
        closed = [at for at in range(8 * WEEK) if at // DAY % 7 in (2, 3) or not 8 <= at % DAY < 18]
        ended = [run(noise(seed, 8 * WEEK), skip=closed) for seed in range(200, 208)]
        assert [held for _, held in ended] == 8 * [[]] and all(series.state == "calm" for series, _ in ended)

    def test_an_alarm_without_traffic_ends(self) -> None:
        """A few low hours, and nothing since: they do not become the usual ones."""
        values = noise(11, 4 * WEEK)
        values[9 * DAY :] -= 0.3
        series, held = run(values, skip=range(9 * DAY + 9, 4 * WEEK))
        assert series.num_raised == 1 and held == [] and series.state == "calm"
        assert series.season.level == pytest.approx(0.0, abs=0.03)

    def test_an_alarm_that_nobody_acts_on_becomes_the_usual(self) -> None:
        values = noise(12, 5 * WEEK)
        values[9 * DAY :] -= 0.3
        series, held = run(values)
        assert len(held) == 1 and series.state == "calm"
        assert series.season.level == pytest.approx(-0.3, abs=0.03)

    def test_before_two_days_there_is_no_baseline(self) -> None:
        values = noise(5, DAY)
        values[12:] -= 0.5
        series, _ = run(values)
        assert series.state == "learning" and series.num_raised == 0

    def test_a_slow_fall_is_found(self) -> None:
        values = noise(6, 2 * WEEK)
        values[8 * DAY :] -= np.linspace(0, 0.3, 6 * DAY)
        _, held = run(values)
        assert held and held[0] < 12 * DAY

    def test_an_empty_day_says_nothing(self) -> None:
        series, held = run(noise(7, 2 * WEEK), skip=range(9 * DAY, 10 * DAY))
        assert held == [] and series.state == "calm"

    def test_another_drafter_moves_the_level_and_keeps_the_season(self) -> None:
        series, _ = run(noise(8, 9 * DAY))
        series.change_drafter(FIRST + 9 * DAY)
        for at, value in enumerate(noise(9, 3 * DAY) + 0.5, start=9 * DAY):
            series.update(FIRST + at, float(value), 0.03**2)
            series.tick(FIRST + at)
        assert series.state == "calm"
        assert series.season.predict(FIRST + 12 * DAY)[0] == pytest.approx(0.5, abs=0.05)

    @pytest.mark.slow
    def test_false_alarms_are_as_rare_as_theory_says(self) -> None:
        """16 series of four weeks without a fall: theory has 0.04 suspicions in each after the first; none is held."""
        ended = [run(noise(seed, 4 * WEEK)) for seed in range(100, 116)]
        assert sum(len(held) for _, held in ended) == 0
        assert sum(series.num_raised for series, _ in ended) <= 4
