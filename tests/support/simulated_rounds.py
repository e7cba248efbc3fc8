"""Rounds of the planner on a simulated machine, whose times and chances are given, for its tests."""

from __future__ import annotations

import random

from paceline.plan.costs import PassCosts
from paceline.plan.planner import Offer, Plan, Planner, Row
from paceline.types import RoundStats, RowKind, Take

FLAT = PassCosts(((1, 1.0), (64, 1.0)))
"""A pass costs the same for any number of positions: all drafts are free."""
STEEP = PassCosts(((1, 1.0), (64, 64.0)))
"""Every position costs as much as a pass of one: no draft pays."""


def row(planner: Planner, *, most: int = 7, kind: RowKind = "greedy", lookup: float = 0.0) -> Row:
    offers = [planner.offer("dflash", kind, most)] if most else []
    return Row(0, kind, offers + ([Offer("ngram", (lookup,) * 16)] if lookup else []))


def counts(plan: Plan) -> list[int]:
    return [take.count for take in plan.drafts]


def stats(
    plan: Plan, accepted: list[int], verify_s: float, draft_s: float = 0.0, checked: list[int] | None = None
) -> RoundStats:
    checked = checked or counts(plan)
    return RoundStats(checked, accepted, True, draft_s=draft_s, verify_s=verify_s, num_checked_B=checked)


class Machine:
    """Rounds of one row on a simulated machine: passes and drafting take given times, drafts stand with given
    chances."""

    def __init__(
        self, planner: Planner, pass_s: PassCosts, draft_s: float, *, num_rows: int = 1, seed: int = 0
    ) -> None:
        self.planner, self.pass_s, self.draft_s, self.num_rows = planner, pass_s, draft_s, num_rows
        self.random = random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.num_drafting = 0

    def rounds(
        self, number: int, chances: list[float], lookup: float = 0.0, kind: RowKind = "greedy", slow: float = 1.0
    ) -> float:
        """Tokens per second of so many rounds; `slow`: how much longer everything takes now."""
        began = self.tokens, self.seconds
        for _ in range(number):
            rows = [row(self.planner, most=len(chances), lookup=lookup) for _ in range(self.num_rows)]
            plan = self.planner.next(rows)
            accepted = [self._kept(take, chances, lookup) for take in plan.drafts]
            drafting = sum(take.source == "dflash" and take.count > 0 for take in plan.drafts)
            self.num_drafting += drafting > 0
            draft_s = slow * self.draft_s * (1 + 0.3 * (drafting - 1)) if drafting else 0.0
            verify_s = slow * self.pass_s.seconds(self.num_rows + sum(counts(plan))) * self.random.uniform(0.97, 1.06)
            done = stats(plan, accepted, verify_s, draft_s)
            done.confidence_B = [[-0.3] * take.count if take.source == "dflash" else None for take in plan.drafts]
            self.planner.learn(plan, done)
            self.tokens += self.num_rows + sum(accepted)
            self.seconds += verify_s + draft_s
        return (self.tokens - began[0]) / (self.seconds - began[1])

    def _kept(self, take: Take, chances: list[float], lookup: float) -> int:
        each = [lookup] * 16 if take.source == "ngram" else chances
        return next((place for place in range(take.count) if self.random.random() >= each[place]), take.count)


class UnsteadyMachine(Machine):
    """Its pace changes every twenty rounds or so, up to three times, as that of a machine which others use too."""

    pace, quiet_s = 1.0, 0.0

    def unsteady(self, number: int, chances: list[float]) -> None:
        for _ in range(number):
            if self.random.random() < 0.05:
                self.pace = self.random.choice([1.0, 1.0, 1.0, 1.3, 2.0, 3.0])
            before = self.seconds
            self.rounds(1, chances, slow=self.pace)
            self.quiet_s += (self.seconds - before) / self.pace
