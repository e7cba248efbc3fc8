"""Decisions: which, why, and why not the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.loop.adapt.config import PolicyConfig, PriceConfig
from paceline.loop.adapt.decide.decide import Alarm, Mix, View, decide, saving
from paceline.loop.adapt.decide.policy import OTHER, NaivePolicy, SeasonalPolicy
from paceline.loop.adapt.traffic.hours import DAY, Sums
from paceline.loop.adapt.traffic.world import EPOCH

ALARM = Alarm("tickets", loss=0.3, tokens_per_round=2.1, tokens_per_hour=60_000)
MIX = Mix(period=DAY, swing=0.3, weakest="west", tokens_per_round=1.8, tokens_per_hour=30_000, best=3.0)


def decided(view: View, **changes: Any) -> Any:
    return decide(view, PolicyConfig(), PriceConfig(**changes))


class TestDecide:
    def test_without_an_alarm_nothing(self) -> None:
        decision = decided(View(100))
        assert decision.action == "none" and set(decision.declined) == {"route", "propose", "retrain"}

    def test_a_training_that_pays(self) -> None:
        decision = decided(View(100, [ALARM]))
        assert (decision.action, decision.clusters) == ("retrain", ("tickets",))
        assert "saves" in decision.why and "no member" in decision.declined["route"]

    def test_one_that_does_not_pay(self) -> None:
        decision = decided(View(100, [replace(ALARM, tokens_per_hour=100.0)]))
        assert decision.action == "none" and "cost" in decision.declined["retrain"]

    def test_the_price_is_the_user_s(self) -> None:
        view = View(100, [replace(ALARM, tokens_per_hour=4_000.0)])
        assert decided(view).action == "none"
        assert decided(view, training_price=0.1).action == "retrain"
        assert decided(view, serving_price=10.0).action == "retrain"

    def test_the_saving_is_rounds_times_their_time(self) -> None:
        prices = PriceConfig(round_ms=36.0, units=2.0, serving_price=3.0)
        rounds = 1000 * 24 * 7 * (1 / 2 - 1 / 4)
        assert saving(prices, 7.0, 1000, 2.0, 4.0) == pytest.approx(rounds * 0.036 / 3600 * 2 * 3)
        assert saving(prices, 7.0, 1000, 4.0, 2.0) == 0.0

    def test_a_member_that_is_there_comes_first(self) -> None:
        decision = decided(View(100, [replace(ALARM, members={"other": 2.0, "old": 2.9})]))
        assert (decision.action, decision.member) == ("route", "old")
        assert decided(View(100, [replace(ALARM, members={"other": 2.3})])).action == "retrain"

    def test_never_while_one_runs(self) -> None:
        decision = decided(View(100, [ALARM], is_training=True))
        assert decision.action == "none" and "running" in decision.declined["retrain"]

    def test_cool_down(self) -> None:
        assert decided(View(100, [ALARM], trained_at=80)).action == "none"
        assert decided(View(100, [ALARM], trained_at=40)).action == "retrain"

    def test_a_mix_that_returns_proposes_a_member_once(self) -> None:
        decision = decided(View(100, mix=MIX))
        assert (decision.action, decision.clusters) == ("propose", ("west",)) and "retrained" in decision.why
        assert decided(View(101, mix=MIX, proposed=frozenset({"west"}))).action == "none"
        assert decided(View(101, mix=replace(MIX, swing=0.1))).action == "none"
        assert decided(View(101, mix=replace(MIX, tokens_per_hour=10.0))).action == "none"

    def test_a_mix_that_moved_is_no_reason_to_train(self) -> None:
        decision = decided(View(100, mix=Mix(has_moved=True)))
        assert decision.action == "none" and "mix moved" in decision.declined["retrain"]


def sums(tokens_per_round: float, requests: int = 100) -> Sums:
    return Sums.of([(120.0, 120.0 / tokens_per_round)] * requests)


class TestPolicy:
    def test_a_clock_that_goes_back_is_ignored(self) -> None:
        policy = SeasonalPolicy()
        policy.hour(EPOCH + 5, {"a": sums(3)})
        line = policy.hour(EPOCH + 2, {"a": sums(1)})
        assert "clock went back" in line.notes[0] and policy.clusters["a"].series.season.num_hours == 1

    def test_a_clock_that_jumps_is_noted(self) -> None:
        policy = SeasonalPolicy()
        policy.hour(EPOCH, {"a": sums(3)})
        line = policy.hour(EPOCH + 90 * DAY, {"a": sums(3)})
        assert "nothing was seen" in line.notes[0] and line.decision.is_idle

    def test_an_empty_week_changes_nothing(self) -> None:
        policy = SeasonalPolicy()
        for at in range(7 * DAY):
            assert policy.hour(EPOCH + at, {}).decision.is_idle

    def test_without_a_baseline_nothing_is_said_to_be_usual(self) -> None:
        """Two days and an hour of traffic are needed; one kind of requests that has a baseline is enough."""
        policy = SeasonalPolicy()
        first = policy.hour(EPOCH, {"a": sums(3, requests=10)}).decision
        assert first.action == "too little" and first.why.startswith("10 requests, 1 hour; ")
        decisions = [policy.hour(EPOCH + at, {"a": sums(3, requests=10)}).decision for at in range(1, 2 * DAY + 2)]
        assert [each.action for each in decisions] == ["too little"] * (2 * DAY) + ["none"]
        assert decisions[-1].why == "acceptance is as it usually is"
        assert policy.hour(EPOCH + 3 * DAY, {"b": sums(3)}).decision.action == "none"

    def test_a_fall_that_has_not_lasted_is_named(self) -> None:
        policy = SeasonalPolicy()
        for at in range(4 * DAY):
            policy.hour(EPOCH + at, {"a": sums(3.0), "b": sums(3.0)})
        decisions = [policy.hour(EPOCH + 4 * DAY + at, {"a": sums(1.5), "b": sums(3.0)}).decision for at in range(6)]
        assert decisions[-1].is_idle
        assert "lower than usual on 'a';" in decisions[-1].why

    def test_sums_that_are_no_numbers_are_left_out(self) -> None:
        policy = SeasonalPolicy()
        policy.hour(EPOCH, {"a": Sums(3, math.nan, 2.0), "b": Sums(3, 1.0, 2.0), "c": Sums()})
        assert policy.clusters == {}

    def test_clusters_are_bounded(self) -> None:
        policy = SeasonalPolicy(PolicyConfig(max_clusters=2))
        policy.hour(EPOCH, {name: sums(3) for name in "abcde"})
        assert set(policy.clusters) == {"a", "b", OTHER}
        assert policy.clusters[OTHER].last_day.requests == 300

    @pytest.mark.slow
    def test_a_route_asks_the_scores_at_an_alarm_only(self) -> None:
        clusters = []

        def scores(cluster: str) -> dict[str, float]:
            clusters.append(cluster)
            return {"old": 3.0}

        policy = SeasonalPolicy(scores=scores)
        lines = [policy.hour(EPOCH + at, {"a": sums(3.0 if at < 9 * DAY else 2.0)}) for at in range(11 * DAY)]
        first = next(line for line in lines if not line.decision.is_idle)
        assert first.decision.action == "route" and first.decision.member == "old"
        assert first.hour - EPOCH >= 10 * DAY - 1 and set(clusters) == {"a"}

    def test_a_line_says_what_was_seen_and_why_not(self) -> None:
        policy = SeasonalPolicy()
        line = policy.hour(EPOCH, {"a": sums(3)})
        assert line.seen["a"]["tokens_per_round"] == 3.0 and line.seen["a"]["state"] == "learning"
        assert line.decision.declined["retrain"]


def test_the_naive_one_follows_every_fall() -> None:
    policy, trained = NaivePolicy(), 0
    for at in range(6 * DAY):
        line = policy.hour(EPOCH + at, {"a": sums(3.0 if at % DAY < 12 else 2.0)})
        if line.decision.action == "retrain":
            trained += 1
            policy.training(EPOCH + at)
            policy.trained(EPOCH + at, ())
    assert trained >= 5
