"""Routing by tokens per second: simulated members, whose requests bring more or less than plain decoding, with
noise."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest

from paceline.errors import ConfigError
from paceline.plan.clusters import label
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Plan
from paceline.plan.routes import CREDIT, EXPLORED, FIRST, KEEP, Cluster, Router
from paceline.types import LOOKUP, Offer, RoundStats, Row, SamplingParams, Sequence, Take

NOISE = 0.25
Gains = dict[tuple[str, str], float]
"""(cluster, member) -> tokens per second over plain decoding's."""


def request(key: int, cluster: str = "") -> Sequence:
    seq = Sequence(key, [1, 2, 3], 3, SamplingParams())
    seq.cluster = cluster
    return seq


def serve(
    router: Router,
    key: int,
    member: str,
    cluster: str,
    gain: float,
    luck: random.Random,
    num_rounds: int = 16,
    own: int = 16,
) -> float:
    """A request of two tokens in each of so many rounds, its drafter's own in `own` of them; returns what it took, in
    rounds without drafts for each token."""
    each = gain * luck.lognormvariate(0.0, NOISE) if member != "none" else 1.0
    for number in range(num_rounds):
        source = member if number < own else LOOKUP
        stats = RoundStats([7], [1], True, num_checked_B=[7], drafter_B=[member], source_B=[source])
        router.learn([request(key, cluster)], stats, lambda place, num_checked, num_alike: 2.0 / each)
    router.ended(key)
    return 1.0 / each


def traffic(
    gains: Callable[[int], Gains],
    members: list[str],
    seed: int,
    num_requests: int = 400,
    in_flight: int = 8,
) -> tuple[list[tuple[str, str, float]], Router]:
    """Requests of the clusters in turns, several at once: (cluster, member, what a token took) of each, by start."""
    router, luck = Router(), random.Random(seed)
    clusters = sorted({cluster for cluster, _ in gains(0)})
    flying: list[tuple[int, str, str]] = []
    served: list[tuple[str, str, float]] = [("", "", 0.0)] * num_requests
    for key in range(num_requests + in_flight):
        if key >= in_flight:
            done, cluster, member = flying.pop(luck.randrange(len(flying)))
            spent = serve(router, done, member, cluster, gains(done).get((cluster, member), 1.0), luck)
            served[done] = cluster, member, spent
        if key < num_requests:
            cluster = luck.choice(clusters)
            member, _ = router.choose(key, (cluster,), [*members, "none"])
            flying.append((key, cluster, member))
    return served, router


MIXED: Gains = {
    ("gsm8k", "general"): 2.0,
    ("gsm8k", "tickets"): 1.6,
    ("tickets", "general"): 1.6,
    ("tickets", "tickets"): 4.0,
}


@pytest.mark.slow
def test_half_and_half_is_within_three_percent_of_routing_by_hand() -> None:
    """After 200 requests, over 2 runs: what a token took on average, over what it takes with each cluster's best."""
    spent = best = 0.0
    for seed in range(2):
        served, _ = traffic(lambda _: MIXED, ["general", "tickets"], seed)
        for cluster, member, _ in served[200:]:
            spent += 1.0 / MIXED.get((cluster, member), 1.0)
            best += 1.0 / max(MIXED[cluster, "general"], MIXED[cluster, "tickets"])
    assert spent / best < 1.03


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.6, 1.0])
def test_a_member_with_random_weights_is_abandoned_within_fifty_requests(gain: float) -> None:
    """A useless drafter: it costs time, or under a planner that stops drafting only brings nothing."""
    gains = {("all", "general"): 2.0, ("all", "random"): gain}
    served, _ = traffic(lambda _: gains, ["random", "general"], seed=0)
    counts = Counter(member for _, member, _ in served[50:])
    assert counts["random"] <= 0.02 * len(served[50:]) and counts["none"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("gain", [0.97, 1.05])
def test_where_lookups_do_the_work_a_member_without_drafts_of_its_own_gives_way(gain: float) -> None:
    """All are equally fast then, and luck alone would share requests out."""
    router, luck, members = Router(), random.Random(0), []
    for key in range(300):
        member, cluster = router.choose(key, ("all",), ["random", "general", "none"])
        serve(router, key, member, cluster, gain * 1.1, luck, own=0 if member == "random" else 1)
        members.append(member)
    after = Counter(members[50:])
    assert after["random"] <= 0.02 * len(members[50:])


@pytest.mark.slow
def test_a_member_whose_drafts_bring_less_is_taken_where_it_is_clearly_faster() -> None:
    router, luck, members = Router(), random.Random(0), []
    for key in range(200):
        member, cluster = router.choose(key, ("all",), ["small", "large", "none"])
        serve(router, key, member, cluster, 2.0 if member == "small" else 1.4, luck, own=5 if member == "small" else 16)
        members.append(member)
    assert Counter(members[50:])["small"] >= 140


def test_a_member_that_brings_nothing_does_not_keep_a_better_one_away() -> None:
    """Even when the better one had no luck with its first requests: one that never deviates leaves no doubt."""
    router = Router()
    for key in range(3):
        router.choose(key, ("all",), ["useless", "good", "none"])  # before it is a cluster
    for key in range(10, 10 + 2 * FIRST):
        member, cluster = router.choose(key, ("all",), ["useless", "good", "none"])
        router.clusters[cluster].add(member, 64, 64.0 if member == "useless" else 64 / 0.9)
    members = []
    for key in range(100, 112):
        member, cluster = router.choose(key, ("all",), ["useless", "good", "none"])
        router.clusters[cluster].add(member, 64, 64.0 if member == "useless" else 40.0)
        router._sessions.clear()
        router.begin()
        members.append(member)
    assert "good" in members and members[-1] == "good"


@pytest.mark.slow
def test_a_useless_member_is_tried_once_in_each_of_many_clusters() -> None:
    gains = {(f"c{number}", name): gain for number in range(10) for name, gain in (("good", 2.0), ("useless", 1.0))}
    served, _ = traffic(lambda _: gains, ["useless", "good"], seed=0, num_requests=600)
    counts = Counter(cluster for cluster, member, _ in served if member == "useless")
    assert sum(counts.values()) <= 2 + FIRST * 4 + 10 + 0.02 * 600


@pytest.mark.slow
def test_where_no_member_is_faster_than_plain_decoding_none_is_chosen() -> None:
    gains = {("all", "a"): 0.7, ("all", "b"): 0.5}
    served, _ = traffic(lambda _: gains, ["a", "b"], seed=0)
    counts = Counter(member for _, member, _ in served[100:])
    assert counts["none"] >= 0.95 * len(served[100:])


@pytest.mark.slow
@pytest.mark.parametrize("after", [{"a": 1.1, "b": 1.8}, {"a": 2.0, "b": 4.0}])
def test_a_member_that_gets_worse_or_better_is_found_out(after: dict[str, float]) -> None:
    def gains(key: int) -> Gains:
        now = {"a": 2.0, "b": 1.4} if key < 300 else after
        return {("all", name): gain for name, gain in now.items()}

    served, _ = traffic(gains, ["a", "b"], seed=0, num_requests=1000)
    assert Counter(member for _, member, _ in served[200:300])["a"] >= 90
    assert Counter(member for _, member, _ in served[900:])["b"] >= 90


@pytest.mark.slow
@pytest.mark.parametrize(("num_members", "spread"), [(2, 0.0), (3, 0.05), (5, 0.5)])
def test_exploring_is_bounded_as_it_is_stated(num_members: int, spread: float) -> None:
    members = [f"m{number}" for number in range(num_members)]
    gains = {("all", name): max(2.0 - spread * number, 0.3) for number, name in enumerate(members)}
    served, router = traffic(lambda _: gains, members, seed=1, num_requests=1000, in_flight=1)
    (cluster,) = (each for name, each in router.clusters.items() if name == "all")
    best = cluster.arms["m0"].num_given if spread == 0.5 else max(arm.num_given for arm in cluster.arms.values())
    if spread == 0.5:
        assert len(served) - best <= num_members * (FIRST + CREDIT) + EXPLORED * len(served) + 3
    assert cluster.credit <= CREDIT * num_members


@pytest.mark.slow
@pytest.mark.parametrize("num_members", [4])
def test_exploring_is_bounded_where_members_are_nearly_equal(num_members: int) -> None:
    """There it may always be that another is better: only the credit keeps requests with the one that looks best."""
    members, num_requests = [f"m{number}" for number in range(num_members)], 1000
    router, luck, strayed = Router(), random.Random(5), 0
    for key in range(num_requests):
        arms = router.clusters["all"].arms if "all" in router.clusters else {}
        best = max((name for name in members if name in arms), key=lambda name: arms[name].gain, default=None)
        member, cluster = router.choose(key, ("all",), [*members, "none"])
        strayed += cluster == "all" and member != best
        serve(router, key, member, cluster, 2.0 - 0.01 * members.index(member), luck)
    assert num_members * FIRST < strayed <= num_members * (FIRST + CREDIT) + EXPLORED * num_requests


@pytest.mark.slow
def test_a_new_drafter_under_an_old_name_is_tried_anew() -> None:
    gains = {("all", "a"): 2.0, ("all", "b"): 0.5}
    served, router = traffic(lambda _: gains, ["a", "b"], seed=3)
    assert served[-1][1] == "a"
    router.forget("b")
    assert [router.choose(key, ("all",), ["a", "b", "none"])[0] for key in range(1000, 1000 + FIRST)] == ["b"] * FIRST


def test_a_cancelled_request_gives_its_credit_back() -> None:
    router, luck = Router(), random.Random(0)
    for key in range(100):
        cluster = router.clusters.get("all")
        before = cluster.credit if cluster else 0.0
        member, name = router.choose(key, ("all",), [*"abcd", "none"])
        if cluster and cluster.credit < before:
            router.cancel(key)
            assert cluster.credit >= before
            return
        serve(router, key, member, name, 2.0, luck)
    pytest.fail("nothing was explored")


def test_a_drafter_that_is_gone_while_its_request_runs_harms_nothing() -> None:
    router, luck = Router(), random.Random(0)
    member, cluster = router.choose(1, (), ["a", "b", "none"])
    router.forget(member)
    serve(router, 1, member, cluster, 3.0, luck)
    assert member not in router.clusters[cluster].arms
    router.ended(1)  # and a second time
    router.ended(2)  # never chosen for


def test_one_member_gets_everything_and_is_counted() -> None:
    router = Router()
    assert {router.choose(key, ("all",), ["a", "none"])[0] for key in range(50)} == {"a"}
    assert router.choose(99, ("all",), ["none"])[0] == "none"
    assert router.clusters["all"].num_requests == 49  # the first two came before it was a cluster


def test_what_a_neighbour_does_is_not_blamed_on_a_request() -> None:
    """The price of a row that drafts nothing is that of a round without drafts, whatever its neighbour drafts and
    takes."""
    planner = AdaptivePlanner(PassCosts([(1, 1.0), (16, 4.0)]))
    offers = [Offer("a", (0.9,) * 7, 0.5), Offer("b", (0.9,) * 7, 2.0)]
    rows = [Row(number, "greedy", [offer]) for number, offer in enumerate(offers)]
    for source in ("a", "b"):
        planner.offer(source, "greedy", 7)
    plan = Plan(0, rows, [Take(), Take("b", 7)], 2)
    for _ in range(5):
        stats = RoundStats(
            [0, 7],
            [0, 3],
            True,
            2.0,
            3.0,
            num_checked_B=[0, 7],
            source_B=["none", "b"],
            confidence_B=[None, [-0.1] * 7],
        )
        planner.learn(plan, stats)
    assert planner.price(plan, 0, 0, 1) == 1.0
    alone, with_others = planner.price(plan, 1, 7, 1), planner.price(plan, 1, 7, 4)
    assert alone > with_others > 1.0  # its cluster's rows would share the drafting
    assert FixedPlanner().price(plan, 1, 7, 1) is None


def test_time_of_two_drafters_in_one_round_is_learned_by_each() -> None:
    planner = AdaptivePlanner(PassCosts([(1, 1.0), (64, 1.0)]))
    rows = [Row(number, "greedy", [planner.offer(source, "greedy", 4)]) for number, source in enumerate("ab")]
    stats = RoundStats(
        [4, 4],
        [2, 2],
        True,
        3.5,
        1.0,
        num_checked_B=[4, 4],
        confidence_B=[[-0.1] * 4] * 2,
        source_s={"a": 0.5, "b": 3.0},
    )
    for _ in range(10):
        rows = [Row(number, "greedy", [Offer(source, (0.5,) * 4, 1e-9)]) for number, source in enumerate("ab")]
        planner.learn(Plan(0, rows, [Take("a", 4), Take("b", 4)], 2), stats)
    costs = planner._histories["greedy"].costs
    assert costs.drafting_s("a", 1) * costs.slowness == pytest.approx(0.5)
    assert costs.drafting_s("b", 1) * costs.slowness == pytest.approx(3.0)


def test_older_requests_count_less() -> None:
    assert KEEP**100 < 0.2


@pytest.mark.slow
def test_a_cluster_that_is_pinned_gets_its_member_while_that_may_be_worth_it() -> None:
    """Under its name or its label; not below plain decoding; and chosen again when it is released or the member is
    gone."""
    router, members = Router(), ["good", "bad", "none"]

    def ask(key: int, gain: float, there: list[str] = members) -> str:
        member, cluster = router.choose(key, ("tag:x",), there)
        serve(router, key, member, cluster, gain, random.Random(key))
        return member

    for key in range(3):
        ask(key, 1.5)
    router.pin(label("tag:x"), "bad")
    assert {ask(key, 1.2) for key in range(3, 30)} == {"bad"}
    assert ask(30, 1.2, ["good", "none"]) == "good"
    assert {ask(key, 0.4) for key in range(31, 130)} != {"bad"}
    router.pin("tag:x", "none")
    assert {ask(key, 1.5) for key in range(130, 150)} == {"none"}
    assert ask(150, 1.5, ["good", "none"]) == "none", "of two, too"
    router.pin("tag:x", None)
    assert ask(151, 1.5, ["good", "none"]) == "good"
    with pytest.raises(ConfigError, match=r"no cluster 'tag:y' here: there are other, tag-"):
        router.pin("tag:y", "good")


def test_an_evicted_cluster_keeps_its_pin_and_the_counts_of_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.clusters.MOST_CLUSTERS", 1)
    monkeypatch.setattr("paceline.plan.clusters.IDLE", 1)
    router, members, keys = Router(), ["good", "bad", "none"], itertools.count()

    def choose(tag: str, times: int) -> str:
        return [router.choose(next(keys), (f"tag:{tag}",), members) for _ in range(times)][-1][0]

    choose("x", 3)
    router.pin("tag:x", "bad")
    choose("y", 4)
    assert "tag:x" not in router.clusters and "tag:y" in router.clusters
    router.pin("tag:y", "bad")
    choose("x", 3)
    assert {choose("x", 1) for _ in range(9)} == {"bad"}
    for key in range(3):
        router.ended(key)
    assert all(arm.num_running >= 0 for arm in router.clusters["tag:x"].arms.values())
    assert router.pin("tag:y", None) == ("tag:y", Cluster())  # while it is evicted
    choose("y", 4)
    assert router.clusters["tag:y"].pinned is None
