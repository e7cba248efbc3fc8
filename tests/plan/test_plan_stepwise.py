"""The planner beside drafters that take a step for each draft: the more is drafted the longer it takes, however
sure."""

from __future__ import annotations

import pytest
from simulated_rounds import FLAT, counts, stats

from paceline.plan.planner import AdaptivePlanner, Row
from paceline.plan.shares import TREE_S
from paceline.plan.trees import Candidates

STEP_S = 0.3


@pytest.mark.parametrize("is_stepwise", [True, False])
def test_steps_are_paid_one_by_one(is_stepwise: bool) -> None:
    """Passes cost nothing more for another position: what is drafted alone decides. The third draft hardly ever
    stands."""
    planner, drafted = AdaptivePlanner(FLAT), list[int]()
    for _ in range(300):
        offer = planner.offer("eagle3", "greedy", 5, is_stepwise=is_stepwise)
        plan = planner.next([Row(0, "greedy", [offer])])
        [count] = counts(plan)
        drafted.append(count)
        done = stats(plan, [min(count, 2)], 1.0, STEP_S * (count if is_stepwise else 1) if count else 0.0)
        done.confidence_B = [[-0.1] * count]
        planner.learn(plan, done)
    offer = planner.offer("eagle3", "greedy", 5, is_stepwise=is_stepwise)
    assert offer.each_s == pytest.approx(STEP_S if is_stepwise else 0.0, rel=0.2)
    assert offer.cost_s == pytest.approx(1e-9 if is_stepwise else STEP_S, rel=0.2)
    often = max(set(drafted[-100:]), key=drafted[-100:].count)
    assert often == 2 if is_stepwise else often > 2, drafted[-100:]


def test_the_time_of_trees_is_not_drafting_s() -> None:
    """The cost of candidates is weighed against the gain of trees: drafting must not look costly where trees run."""
    planner, drafting_s = AdaptivePlanner(FLAT, grows_trees=True), 1e-3
    likely = Candidates([[1, 2]] * 7, [[-0.1, -3.0]] * 7)
    for _ in range(60):
        plan = planner.next([Row(0, "greedy", [planner.offer("dflash", "greedy", 7)])])
        [count] = counts(plan)
        named = likely if count and planner.num_candidates else None
        planner.narrow(plan, [[-0.1] * count if count else None], [named])
        assert plan.num_trees.total() == (named is not None)
        done = stats(plan, [count], 1.0, drafting_s + TREE_S * plan.num_trees.total() if count else 0.0)
        done.confidence_B = [[-0.1] * count]
        planner.learn(plan, done)
    assert planner.num_candidates, "the test needs rounds that name candidates"
    assert planner.offer("dflash", "greedy", 7).cost_s == pytest.approx(drafting_s, rel=0.02)
