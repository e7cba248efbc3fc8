"""Decisions: which, why, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from adapt_requests import NOON, keyed, store

from paceline.loop.adapt.check import decide_once
from paceline.loop.adapt.config import PolicyConfig, PriceConfig, StoreConfig
from paceline.loop.adapt.decide.decide import Alarm, Customer, Mix, View, decide, saving
from paceline.loop.adapt.decide.policy import OTHER, NaivePolicy, SeasonalPolicy
from paceline.loop.adapt.log import AdaptLog, event_line, rebuilt
from paceline.loop.adapt.traffic.hours import DAY, Sums
from paceline.loop.adapt.traffic.world import EPOCH
from paceline.plan.clusters import label

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


ACME, GLOBEX = "tag-0a1b2c", "tag-d3e4f5"
BADLY_SERVED = Customer(ACME, share=0.3, gap=0.3, tokens_per_round=2.0, tokens_per_hour=60_000, others=3.0)


class TestCustomers:
    def test_a_large_one_that_is_served_badly_gets_a_proposal_once(self) -> None:
        decision = decided(View(100, customers=[BADLY_SERVED]))
        assert (decision.action, decision.clusters) == ("propose", (ACME,))
        rounds = 60_000 * 24 * 7 * (1 / 2 - 1 / 2.5)  # half of the gap is expected back
        assert f"would save {rounds * 0.02 / 3600:.2f} in 7 days and cost 1.00" in decision.why
        assert "30% of all tokens" in decision.why
        again = decided(View(101, customers=[BADLY_SERVED], proposed=frozenset({ACME})))
        assert again.action == "none" and "those proposed before" in again.declined["propose"]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"share": 0.09}, "no tag with 10% of all tokens"),
            ({"gap": 0.24}, "is surely 25% below other traffic"),
            ({"tokens_per_hour": 100.0}, "would save 0.01 in 7 days and cost 1.00"),
        ],
    )
    def test_others_do_not(self, changes: dict[str, float], reason: str) -> None:
        decision = decided(View(100, customers=[replace(BADLY_SERVED, **changes)]))
        assert decision.action == "none" and reason in decision.declined["propose"]

    def test_the_thresholds_are_the_user_s(self) -> None:
        view = View(100, customers=[replace(BADLY_SERVED, share=0.05, gap=0.1)])
        assert decide(view, PolicyConfig(least_customer=0.05, least_gap=0.1), PriceConfig()).action == "propose"

    def test_the_one_that_saves_most_comes_first(self) -> None:
        larger = replace(BADLY_SERVED, cluster=GLOBEX, tokens_per_hour=90_000.0)
        assert decided(View(100, customers=[BADLY_SERVED, larger])).clusters == (GLOBEX,)

    def test_alarms_and_the_cool_down_come_first(self) -> None:
        assert decided(View(100, [ALARM], customers=[BADLY_SERVED])).action == "retrain"
        cheap = replace(ALARM, tokens_per_hour=1.0)
        assert decided(View(100, [cheap], customers=[BADLY_SERVED])).action == "none"
        waiting = decided(View(100, customers=[BADLY_SERVED], trained_at=80))
        assert waiting.action == "none" and "ended 20 hours ago" in waiting.declined["propose"]
        assert decided(View(100, customers=[BADLY_SERVED], trained_at=40)).action == "propose"


def actions(days: int, traffic: Callable[[int], dict[str, Sums]], policy: SeasonalPolicy) -> dict[int, Any]:
    """Hour since the start -> decision, of all hours that were not idle."""
    lines = {at: policy.hour(EPOCH + at, traffic(at)) for at in range(days * DAY)}
    return {at: line.decision for at, line in lines.items() if not line.decision.is_idle}


class TestCustomersOfTraffic:
    def test_a_proposal_when_there_is_a_baseline(self) -> None:
        policy = SeasonalPolicy()
        decisions = actions(4, lambda at: {ACME: sums(2.0), GLOBEX: sums(3.0), "en": sums(3.0)}, policy)
        (hour,) = decisions
        assert decisions[hour].clusters == (ACME,) and 2 * DAY <= hour <= 2 * DAY + 1 and policy.proposed == {ACME}

    def test_of_stored_traces(self, tmp_path: Path) -> None:
        """The traces of a server: its cluster of a tag is a hash of it."""
        begin = NOON - timedelta(hours=NOON.hour)
        kinds = (
            {"tag": "acme", "cluster": label("tag:acme"), "accepted": [1, 0, 0]},
            {"tag": None, "cluster": "en-p1"},
        )
        rows = [
            keyed(24 * at + n, **kinds[n % 2], ended=begin + timedelta(hours=at)) for at in range(50) for n in range(24)
        ]
        stored = StoreConfig(store(tmp_path / "traces", rows), tmp_path / "state")
        decision = decide_once(stored, PolicyConfig(), PriceConfig(training_price=0.0))["decision"]
        assert (decision.action, decision.clusters) == ("propose", (label("tag:acme"),))
        assert "gets 1.50 tokens a round, other traffic 2.50" in decision.why

    def test_a_proposal_that_was_not_carried_out_is_made_again(self, tmp_path: Path) -> None:
        """By a daemon that begins with traces of weeks, or is restarted."""
        hours = {EPOCH + at: {ACME: sums(2.0), GLOBEX: sums(3.0)} for at in range(7 * DAY)}
        log, until = AdaptLog(tmp_path), EPOCH + 7 * DAY
        assert rebuilt(SeasonalPolicy(), hours, log, until)[-1].decision.action == "propose"
        log.append(event_line(EPOCH + 3 * DAY, "training", clusters=[ACME], action="propose"))
        log.append(event_line(EPOCH + 3 * DAY + 1, "refused", clusters=[ACME]))
        policy = SeasonalPolicy()
        assert rebuilt(policy, hours, log, until)[-1].decision.action == "none" and policy.proposed == {ACME}

    @pytest.mark.parametrize("event", ["training", "failed"])
    def test_one_that_was_carried_out_is_known_after_a_restart(self, event: str, tmp_path: Path) -> None:
        """A window that cannot be used fails before the training."""
        hours = {EPOCH + at: {ACME: sums(2.0), GLOBEX: sums(3.0)} for at in range(7 * DAY)}
        log, until, policy = AdaptLog(tmp_path), EPOCH + 7 * DAY, SeasonalPolicy()
        log.append(event_line(until - 1, event, clusters=[ACME], action="propose"))
        assert rebuilt(policy, hours, log, until)[-1].decision.action == "propose" and policy.proposed == {ACME}

    def test_only_for_tags(self) -> None:
        assert actions(4, lambda at: {"west": sums(2.0), GLOBEX: sums(3.0)}, SeasonalPolicy()) == {}

    def test_not_for_the_only_traffic(self) -> None:
        assert actions(4, lambda at: {ACME: sums(2.0)}, SeasonalPolicy()) == {}

    def test_not_while_the_gap_may_be_chance(self) -> None:
        few = {ACME: sums(2.2, 2), "en": sums(3.0, 2)}
        cheap = PriceConfig(training_price=0.0)
        assert actions(4, lambda at: few, SeasonalPolicy(prices=cheap)) == {}
        many = {ACME: sums(2.2, 200), "en": sums(3.0, 200)}
        assert [each.clusters for each in actions(4, lambda at: many, SeasonalPolicy(prices=cheap)).values()] == [
            (ACME,)
        ]

    def test_not_for_one_who_has_left(self) -> None:
        """Its last day with traffic is weeks ago, so that its share is small by now."""
        policy = SeasonalPolicy(PolicyConfig(least_customer=0.2), PriceConfig(training_price=1e9))
        actions(3, lambda at: {ACME: sums(2.0), "en": sums(3.0)}, policy)
        policy.prices = PriceConfig()
        later = {at: policy.hour(EPOCH + at, {"en": sums(3.0)}) for at in range(30 * DAY, 32 * DAY)}
        assert all(line.decision.is_idle for line in later.values())
        assert policy.hour(EPOCH + 32 * DAY, {ACME: sums(2.0), "en": sums(3.0)}).decision.is_idle


def sums(tokens_per_round: float, requests: int = 100) -> Sums:
    return Sums.of([(120.0, 120.0 / tokens_per_round)] * requests)


class TestClustersThatEnded:
    """Old requests, of the lowest acceptance length, came for two and a half days only."""

    def test_a_returning_mix_proposes_one_that_is_there(self) -> None:
        def traffic(at: int) -> dict[str, Sums]:
            east = 150 if at % DAY < 12 else 50
            mixed = {"east": sums(3.0, east), "west": sums(1.8, 200 - east)}
            return mixed | ({"old": sums(1.2, 60)} if at < 60 else {})

        policy = SeasonalPolicy(prices=PriceConfig(training_price=1e9))
        assert actions(6, traffic, policy) == {}
        policy.prices = PriceConfig()
        decision = policy.hour(EPOCH + 6 * DAY, traffic(6 * DAY)).decision
        assert (decision.action, decision.clusters) == ("propose", ("west",))

    def test_a_mix_that_moved_is_about_one_that_is_there(self) -> None:
        def traffic(at: int) -> dict[str, Sums]:
            seen = {"east": sums(3.0, 150)} | ({"old": sums(1.2, 100)} if at < 60 else {})
            return seen | ({"new": sums(1.5, 150)} if at >= 9 * DAY else {})

        policy = SeasonalPolicy()
        first = next(iter(actions(20, traffic, policy).values()))
        assert (first.action, first.clusters) == ("retrain", ("new",))
        quiet = policy.hour(EPOCH + 22 * DAY, {}).decision
        assert quiet.action == "none" and "no cluster fell" in quiet.declined["retrain"], "nothing came for two days"

    def test_a_fall_of_one_that_is_gone_is_no_alarm(self) -> None:
        """Its last hours are those of a fall; then nothing of it comes, while the others are as they were."""
        policy = SeasonalPolicy(prices=PriceConfig(training_price=0.0))
        fell = {"a": sums(3.0), "b": sums(2.0)}
        actions(8, lambda at: {"a": sums(3.0), "b": sums(3.0)}, policy)
        for at in range(8 * DAY, 10 * DAY):
            policy.hour(EPOCH + at, fell)
        assert policy.hour(EPOCH + 10 * DAY, {"a": sums(3.0)}).decision.clusters == ("b",)
        assert policy.hour(EPOCH + 18 * DAY, {"a": sums(3.0)}).decision.is_idle


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

        policy = SeasonalPolicy()
        policy.scores = scores
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
            policy.is_training = True
            policy.trained(EPOCH + at, ())
    assert trained >= 5
