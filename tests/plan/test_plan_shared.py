"""Rows of several kinds, drafters and lengths under one planner: what is learned of some is used for others."""

from __future__ import annotations

import pytest
from simulated_rounds import FLAT, counts, row, stats

from paceline.plan.chances import Chances
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, Offer, Row
from paceline.plan.shares import TREE_S
from paceline.plan.trees import Candidates
from paceline.types import RoundStats, Take

DRAFTING_S = 0.4


def test_prompts_that_wait_do_not_stop_drafts() -> None:
    """Two rows with lookups draft as much while prompts wait as without: none of them decodes in this round."""
    planner = AdaptivePlanner(PassCosts(((1, 1.0), (8, 1.3), (16, 2.6), (32, 5.2))), most_chunk=16, adapts_chunks=False)
    rows = [Row(key, "greedy", [Offer("ngram", (0.8,) * 16)]) for key in range(2)]
    assert counts(planner.next(rows)) == counts(planner.next(rows, prompt_left=100)) == [5, 5]


def test_mixed_rows_pay_for_drafting_what_it_takes_in_their_rounds() -> None:
    """Greedy and sampled rows together, with drafts that are never accepted: drafting must not seem free to either."""
    planner = AdaptivePlanner(FLAT)
    for _ in range(40):
        plan = planner.next([row(planner), row(planner, kind="sampled")])
        plan.drafts = [Take("dflash", 3), Take("dflash", 3)]
        done = stats(plan, [0, 0], 1.0, DRAFTING_S)
        done.confidence_B = [[-0.3] * 3] * 2
        planner.learn(plan, done)
    priced = [row(planner, kind=kind).offers[0].cost_s for kind in ("greedy", "sampled")]
    assert priced[0] == priced[1] and 0.2 * DRAFTING_S < priced[0] < DRAFTING_S


def test_offers_made_while_planning_are_priced_by_the_rows_of_the_round() -> None:
    planner, costs = AdaptivePlanner(FLAT), list[float]()
    for _ in range(8):
        planner.learn(plan := planner.next([row(planner)]), stats(plan, [0], 1.0, DRAFTING_S))

    def ask(unwanted: object) -> list[Offer]:
        costs.append((offer := planner.offer("dflash", "greedy", 7)).each_s)
        return [offer]

    planner.next([Row(1, "greedy", ask=ask)])
    planner.next([Row(1, "greedy", ask=ask), Row(2, "sampled")])
    planner.next([Row(1, "greedy", ask=ask)])
    assert costs[0] == costs[2] > 0.0 and costs[1] == 0.0, "nothing is known of mixed rounds yet"


def test_a_request_that_may_check_more_drafts_keeps_what_was_learned() -> None:
    planner = AdaptivePlanner(FLAT)
    for _ in range(60):
        plan = planner.next([row(planner, most=3)])
        plan.drafts = [Take("dflash", 3)]
        planner.learn(plan, stats(plan, [0], 1.0))
    before = planner.offer("dflash", "greedy", 3).chances
    assert before[0] < 0.1
    assert planner.offer("dflash", "greedy", 7).chances == before + before[-1:] * 4
    assert planner.offer("dflash", "greedy", 3).chances == before


def test_places_that_are_reached_later_learn_as_the_first_ones_do() -> None:
    long, grown = Chances(5, 0.5), Chances(1, 0.5)
    grown.extend(5)
    for _ in range(20):
        for each in (long, grown):
            each.record(5, 3, [-0.3] * 5)
    assert grown.average == long.average and grown.of([-0.3] * 5) == long.of([-0.3] * 5)


def taught(*sources: str, has_trees: bool = False, is_told: bool = True) -> AdaptivePlanner:
    """A planner after rounds of a row for each source. Drafting takes DRAFTING_S in all: a quarter of it is shared by
    all, the rest is theirs in equal parts."""
    planner = AdaptivePlanner(FLAT, grows_trees=has_trees)
    shared_s, likely = 0.25 * DRAFTING_S, Candidates([[1, 2]] * 3, [[-0.1, -3.0]] * 3)
    for _ in range(30):
        offers = [planner.offer(name, "greedy", 3) for name in sources]
        plan = planner.next([Row(key, "greedy", [offer]) for key, offer in enumerate(offers)])
        plan.drafts, plan.is_trial = [Take(name, 3) for name in sources], False
        spent_s = DRAFTING_S
        if has_trees:
            planner.narrow(plan, [[-0.1] * 3] * len(sources), [likely] * len(sources))
            spent_s += TREE_S * len(sources)
        own_s = (DRAFTING_S - shared_s) / len(sources)
        done = RoundStats([3] * len(sources), [0] * len(sources), True, draft_s=spent_s, verify_s=1.0, host_s=0.0)
        done.num_checked_B, done.confidence_B = [3] * len(sources), [[-0.1] * 3] * len(sources)
        done.source_s = dict.fromkeys(sources, own_s) if is_told else {}
        planner.learn(plan, done)
    return planner


@pytest.mark.parametrize("is_told", [True, False], ids=["by source", "in all"])
@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
def test_drafting_takes_what_it_takes_with_one_source_and_with_several(has_trees: bool, is_told: bool) -> None:
    """Seconds that no source took, to weigh drafts and to cut them, are shared by those that drafted."""
    alone, beside = (taught(*names, has_trees=has_trees, is_told=is_told) for names in ("a", "ab"))
    assert alone.offer("a", "greedy", 3).cost_s == pytest.approx(DRAFTING_S, rel=1e-3)
    assert [beside.offer(name, "greedy", 3).cost_s for name in "ab"] == pytest.approx([DRAFTING_S / 2] * 2, rel=1e-3)


def test_lookups_beside_a_drafter_are_no_time_of_its_own() -> None:
    planner = AdaptivePlanner(FLAT)
    for _ in range(5):
        rows = [row(planner), Row(1, "greedy", [Offer("ngram", (0.9,) * 5)])]
        plan = planner.next(rows)
        plan.drafts = [Take("dflash", 3), Take("ngram", 5)]
        done = stats(plan, [0, 5], 1.0, DRAFTING_S)
        done.source_s = {"dflash": 0.75 * DRAFTING_S, "ngram": 0.25 * DRAFTING_S}
        done.confidence_B = [[-0.3] * 3, None]
        planner.learn(plan, done)
    assert planner.offer("dflash", "greedy", 7).cost_s == pytest.approx(0.75 * DRAFTING_S)
