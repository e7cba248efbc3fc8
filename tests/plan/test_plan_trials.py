"""Trials and pauses of the planner: drafts that lose time are left, and tried again when they may pay."""

from __future__ import annotations

import math

import pytest
from simulated_rounds import FLAT, UnsteadyMachine, row, stats

from paceline.plan.costs import PassCosts
from paceline.plan.history import COLD, TRIAL_SHARE, Pauses, Trials
from paceline.plan.planner import AdaptivePlanner, Row
from paceline.plan.trees import Candidates, Tree
from paceline.types import Take


class TestUnsteady:
    """Estimates that an unsteady machine has led astray must not be believed for long."""

    PASSES = PassCosts(((1, 6.1), (2, 6.5), (3, 7.9), (4, 9.4), (5, 10.3), (8, 14.6), (16, 28.0)))

    @pytest.mark.parametrize("seed", [27, 59, 5, 0, 1, 2])
    def test_drafts_that_lose_time_are_left(self, seed: int) -> None:
        """With seeds 27 and 59 the first rounds make checking look cheap: without pauses they end at 0.77 and 0.91 of
        plain."""
        machine = UnsteadyMachine(AdaptivePlanner(self.PASSES), self.PASSES, 2.6, seed=seed)
        machine.unsteady(800, [0.42, 0.37, 0.28, 0.3, 0.31, 0.32, 0.32])
        assert machine.tokens / machine.quiet_s * 6.1 > 0.93

    @pytest.mark.slow
    def test_they_are_taken_up_again_when_they_pay(self) -> None:
        planner = AdaptivePlanner(self.PASSES)
        machine = UnsteadyMachine(planner, self.PASSES, 2.6, seed=4)
        machine.unsteady(300, [0.1] * 7)
        before = machine.num_drafting
        machine.unsteady(700, [0.9] * 7)
        assert machine.num_drafting - before > 350

    def test_a_new_drafter_begins_without_a_pause(self) -> None:
        planner = AdaptivePlanner(self.PASSES)
        pauses = planner._histories["greedy"].pauses
        for _ in range(3):
            pauses.record(1, 1, 20.0, {"dflash"})
            pauses.record(1, 1, 6.0, set())
        assert pauses.next() == {"dflash"}
        planner.forget("dflash")
        assert not pauses.next()

    def test_a_new_drafter_begins_without_the_costs_of_the_replaced_one(self) -> None:
        planner = AdaptivePlanner(self.PASSES)
        histories = planner._histories.values()
        for source in ("dflash", "other"):
            planner.offer(source, "greedy", 4, is_stepwise=True)
            planner._blocks.add(source)
            for costs in [history.costs for history in histories for _ in range(5)]:
                costs.drafted(source, 1, 50.0)
        planner.forget("dflash")
        for history in histories:
            history.costs.drafted("dflash", 1, 1.0)
            assert history.costs.drafting_s("dflash", 1) == 0.0, "one pass is not enough for an estimate"
            assert history.costs.drafting_s("other", 1) == 50.0
        assert planner._blocks == planner._computed == planner._stepwise == {"other"}

    def test_a_source_does_not_pause_right_after_a_gain(self) -> None:
        """Its first rounds were slow, as those of a process that has just started; the latest eight were not."""
        pauses = Pauses()
        for _ in range(2):
            pauses.record(1, 1, 20.0, {"dflash"})
            pauses.record(1, 1, 6.0, set())
        for _ in range(8):
            pauses.record(1, 8, 12.0, {"dflash"})
        assert not pauses.record(1, 1, 6.0, set())
        pauses.record(1, 1, 20.0, {"dflash"})
        assert pauses.record(1, 1, 6.0, set()) and pauses.next() == {"dflash"}

    def test_the_first_rounds_of_a_request_are_not_compared(self) -> None:
        """Each request begins with slow rounds, since the machine was idle or did other work; its drafts pay."""
        planner = AdaptivePlanner(self.PASSES)
        history = planner._histories["greedy"]
        for key in range(30):
            for number in range(6):
                history.begin({key})
                slow = 10.0 if number < COLD else 1.0
                tokens, seconds, sources = (1, 6.1, set()) if number == 5 else (4, 14.0, {"dflash"})
                history.record(1, tokens, seconds * slow, sources, False, False)
                assert not history.pauses.next(), f"request {key}, round {number}"

    def test_only_the_source_that_disappointed_pauses(self) -> None:
        pauses = Pauses()
        for _ in range(3):
            pauses.record(2, 2, 20.0, {"dflash"})
            pauses.record(2, 2, 6.0, set())
            pauses.record(2, 8, 8.0, {"ngram"})
            pauses.record(2, 2, 6.0, set())
            pauses.record(2, 2, 60.0, {"ngram", "dflash"})
            pauses.record(2, 2, 6.0, set())
        assert pauses.next() == {"dflash"}

    def test_members_of_a_pool_that_disappointed_together_pause_together(self) -> None:
        pauses = Pauses()
        for _ in range(3):
            pauses.record(2, 2, 20.0, {"general", "tickets"})
            pauses.record(2, 2, 6.0, set())
        assert pauses.next() == {"general", "tickets"}
        pauses.forget("tickets")
        assert pauses.next() == {"general"} and not pauses._gains


class TestTrials:
    @pytest.mark.parametrize("begins", [False, True])
    def test_a_request_that_begins_may_try_its_drafter(self, begins: bool) -> None:
        """Time saved by the rounds before a trial is added to its budget, up to the cost of one trial."""
        planner = AdaptivePlanner(FLAT)
        trials = planner._histories["greedy"].trials
        trials.budget_s, trials.wanted_s = -1000.0, 2.0
        before = []
        for key in [0] * 500 + [int(begins)]:
            before.append(trials.budget_s)
            plan = planner.next([Row(key, "greedy", row(planner).offers)])
            plan.drafts, plan.is_trial = [Take()], False
            planner.learn(plan, stats(plan, [0], 1.0))
        assert trials.budget_s - before[-1] == pytest.approx(TRIAL_SHARE + begins * 2.0)

    @pytest.mark.parametrize(("num_tokens", "is_free"), [(1, False), (2, False), (3, True), (4, True)])
    def test_one_that_paid_for_itself_takes_nothing_of_the_allowance(self, num_tokens: int, is_free: bool) -> None:
        """A trial of 2.5 plain rounds: two tokens do not pay for it, three do."""
        trials = Trials(before := 2.0)
        trials.record(1, num_tokens, 2.5, plain_s=1.0, is_trial=True)
        assert (trials.budget_s == before) == is_free
        if not is_free:
            assert trials.budget_s == pytest.approx(before - (1.5 if num_tokens == 1 else 0.5))


@pytest.mark.parametrize(("sibling", "pays"), [(0.4, True), (1e-6, False)])
def test_trees_are_asked_for_where_siblings_stand(sibling: float, pays: bool) -> None:
    planner = AdaptivePlanner(PassCosts(((1, 2.5e-3), (64, 2.5e-3))), grows_trees=True)
    likely = Candidates([[1, 2]] * 7, [[math.log(0.5), math.log(sibling)]] * 7)
    num_with_trees = siblings = 0
    for _ in range(170):
        plan = planner.next([row(planner)])
        has_trees, count = planner.num_candidates > 0, plan.drafts[0].count
        num_with_trees += has_trees
        [chosen] = planner.narrow(plan, [[math.log(0.5)] * count], [likely if has_trees else None])
        siblings += isinstance(chosen, Tree) and any(chosen.ranks)
        done = stats(plan, [1], 2.5e-3)
        done.confidence_B = [[math.log(0.5)] * count]
        planner.learn(plan, done)
    assert (num_with_trees > 160 and siblings > 100) if pays else (num_with_trees < 20 and not siblings), (
        num_with_trees,
        siblings,
    )
    assert AdaptivePlanner(FLAT).num_candidates == 0
