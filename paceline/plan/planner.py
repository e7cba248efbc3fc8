"""What a step does next: how much of a prompt, and which drafts every running row has checked. No PyTorch.

    plan = planner.next(rows)                  # Row: a sequence and what it could check (Offer) -> Plan
    widths = planner.narrow(plan, sure_B)      # after drafting: how many drafts of each row are worth checking, or which tree
    planner.learn(plan, stats)                 # what the round took and which drafts stood

The engine executes a plan with the real target, `simulate` with a cost model: the same object decides in both. A draft is
checked when the tokens it is expected to bring are worth its time at the rate that rounds reach anyway:

    expected tokens > rate * extra seconds        rate: tokens per second without drafts, or of recent rounds where that is more

All of it is known before a round's tokens are drawn: how sure a drafter is of a slot is read off its distribution, never off
the token that was drawn. So a plan changes nothing of what is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from paceline.errors import ConfigError
from paceline.plan.chances import PRIORS, Chances, Truth
from paceline.plan.chunks import ChunkSizes
from paceline.plan.costs import RECENT, PassCosts, RoundCosts, RoundRecord, drafting_by
from paceline.plan.shares import TREE_S, Drafted, Objective, TreeWorth, Want, gains_of, grown, share_out, spared_by, surplus_of
from paceline.plan.trees import MOST_NODES, Candidates, Growing, Tree, Weigh, as_told, grow
from paceline.types import Offer, RoundStats, Row, RowKind, Take

MARGIN = 0.02
"""Drafts must promise this share more tokens than their time costs: estimates err."""
LIFT_WEIGHT = 0.05
"""Of the latest round in what cutting unsure drafts gains on average."""
SURE_TRIALS, HOPELESS = 3, 5.0
"""After so many trials those become so many times rarer that no drafter could make pay: many rows on a slow processor."""
FEW_CANDIDATES, MOST_CANDIDATES = 8, 32
"""Tokens of each slot that may be in a tree."""
SPARE = 2
"""Slots that a block drafter drafts beyond those that are worth checking on average: it may be sure of them."""

NO_DRAFTS = Take()


@dataclass(slots=True)
class Plan:
    """One step: `chunk` tokens of the prompt that is being read, and what each row checks."""

    chunk: int
    rows: list[Row]
    drafts: list[Take]
    num_rows: int
    """Rows that decode, the one whose prompt ends in this step included."""
    whole_blocks: bool = False
    """Whether block drafters draft their whole block, so that drafts do not depend on how many are checked."""
    num_trees: Counter[str] = field(default_factory=Counter)
    """By source: rows whose drafter has named candidates for a tree."""
    is_trial: bool = False
    """Drafts to learn whether they pay by now."""


class Planner(Protocol):
    """Decides what the steps of one engine do; the module's docstring has the order of calls."""

    tells_said: bool  # whether rounds tell which candidates the target said: for measurements

    @property
    def num_candidates(self) -> int:
        """Tokens of a slot that it wants to know, to make trees of; 0: it makes none."""
        ...

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        """What a source that computes its drafts, each in a step of its own if `is_stepwise`, promises a row of this kind that
        may check `most` of them."""
        ...

    def next(self, rows: list[Row], prompt_left: int = 0) -> Plan:
        """The next step: `prompt_left` tokens wait to be read of the prompt whose turn it is. If its chunk ends it, its
        row decodes in this step's round too; prompts behind it do not."""
        ...

    def join(self, plan: Plan, place: int, row: Row) -> None:
        """A row whose prompt ended in this step decodes too."""

    def narrow(
        self, plan: Plan, sure_B: Sequence[Sequence[float] | None], candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        """How many drafts of each row to check, or which tree of them, now that drafters have said how sure they are of each
        slot: the log-probability of its most likely token, None where nothing of the kind is known; and what else is likely
        there, None of rows that may check no tree."""
        ...

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        """A round is over."""

    def price(self, plan: Plan, place: int, num_checked: int, num_alike: int) -> float | None:
        """What a row's part of a round takes, in rounds of as many rows without drafts, by learned costs: 1.0 where it drafted
        nothing, whatever others did. `num_alike` rows share its drafting. None when nothing is learned."""

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A chunk of a prompt was run."""

    def forget(self, source: str) -> None:
        """Another drafter drafts under this name from now on: what was learned of it holds no more."""


@dataclass(slots=True)
class FixedPlanner:
    """As many drafts in every round, the first offer's, and chunks of one size: nothing depends on the clock."""

    num_drafted: int | None = None
    """None: all that is offered."""
    most_chunk: int = 256
    whole_blocks: bool = True
    num_nodes: int = 0
    """Of a tree that each row checks in place of a chain, where its drafter says what is likely; 0: chains."""
    num_named: int = 0
    """Tokens of each slot that are asked for at least, so that `RoundStats.said_B` tells of them beside chains too."""
    tells_said: bool = True

    @property
    def num_candidates(self) -> int:
        return min(max(self.num_nodes, self.num_named), MOST_CANDIDATES)

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        return Offer(source, (1.0,) * most)

    def next(self, rows: list[Row], prompt_left: int = 0) -> Plan:
        chunk = min(self.most_chunk, prompt_left)
        num_rows = len(rows) + (chunk == prompt_left > 0)
        self._begin(num_rows)
        return Plan(chunk, rows, [self._take(row) for row in rows], num_rows, self.whole_blocks)

    def _begin(self, num_rows: int) -> None:
        """Before a round of so many rows is planned."""

    def _take(self, row: Row) -> Take:
        offers = row.weigh() if self.num_drafted != 0 else []
        if not offers:
            return NO_DRAFTS
        most = len(offers[0].chances)
        return Take(offers[0].source, most if self.num_drafted is None else min(self.num_drafted, most))

    def join(self, plan: Plan, place: int, row: Row) -> None:
        plan.rows.insert(place, row)
        plan.drafts.insert(place, self._take(row))

    def narrow(
        self, plan: Plan, sure_B: Sequence[Sequence[float] | None], candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        return [
            grow(candidates, self.weigh(row, candidates), self.num_nodes) if candidates and self.num_nodes else take.count
            for row, take, candidates in zip(plan.rows, plan.drafts, candidates_B or [None] * len(plan.rows), strict=True)
        ]

    def weigh(self, row: Row, candidates: Candidates) -> Weigh:
        return as_told

    def learn(self, plan: Plan, stats: RoundStats) -> None: ...

    def price(self, plan: Plan, place: int, num_checked: int, num_alike: int) -> float | None:
        return None

    def prefilled(self, num_tokens: int, seconds: float) -> None: ...

    def forget(self, source: str) -> None: ...


def fixed_planner(plan: str, most_chunk: int = 256) -> FixedPlanner:
    """That of `fixed` (as many drafts as the drafter may), `fixed:K` or `tree:N`. Raises ConfigError for anything else."""
    name, _, number = plan.partition(":")
    if number.isascii() and number.isdecimal() and name == "fixed":
        return FixedPlanner(int(number), most_chunk)
    if number.isascii() and number.isdecimal() and name == "tree" and 1 <= int(number) <= MOST_NODES:
        return FixedPlanner(None, most_chunk, num_nodes=int(number))
    if plan == "fixed":
        return FixedPlanner(None, most_chunk)
    raise ConfigError(
        "plan must be auto, fixed, fixed:K (at most K drafts in every round) or "
        f"tree:N (a tree of N drafts, at most {MOST_NODES}), not {plan!r}"
    )


class AdaptivePlanner:
    """Most tokens per second by what rounds have taught; never below plain decoding but for short trials."""

    def __init__(
        self,
        passes: PassCosts,
        *,
        most_chunk: int = 256,
        adapts_chunks: bool = True,
        grows_trees: bool = False,
        objective: Objective = "throughput",
    ) -> None:
        """`passes`: seconds of a target pass, as measured at the start. `adapts_chunks` only for a target that gives a token
        the same bits in chunks of any size, so that no text depends on it; `grows_trees` only for one that takes them. With
        the `objective` latency rounds are for each row's next token (`shares.share_sooner`), not for all rows' together."""
        self._is_for_latency = objective == "latency"
        self._share_out = partial(share_out, sooner=self._is_for_latency)
        self.tells_said, self._trees = False, TreeWorth() if grows_trees else None
        self._kinds = {name: RoundRecord(RoundCosts(passes)) for name in ("greedy", "drawn")}
        self._now = self._kinds["greedy"]  # of the rows planned last: prices drafting, whatever a row's own kind
        self._chances: dict[tuple[str, str], Chances] = {}
        """By source and kind of row."""
        self._lifts: dict[tuple[str, str], float] = {}
        """Tokens that a row gains on average because its drafts are cut where their drafter is unsure of them."""
        self._truths: dict[tuple[str, str], Truth] = {}
        self._blocks: set[str] = set()
        """Sources that draft whole blocks at once and say how sure they are of each slot."""
        self._computed, self._stepwise = set[str](), set[str]()
        """Sources that compute their drafts; those of them that take a step for each."""
        self.chunks = ChunkSizes(most_chunk, adapts_chunks)

    @property
    def num_candidates(self) -> int:
        return FEW_CANDIDATES if self._trees and self._trees.is_asked else 0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self.chunks.prefilled(num_tokens, seconds)

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        self._computed.add(source)
        if is_stepwise:
            self._stepwise.add(source)
        places = self._known(source, kind, most).places
        drafting_s = self._now.costs.drafting_s(source, 1)
        whole_s, each_s = (drafting_s, 0.0) if source in self._blocks else (0.0, drafting_s)
        return Offer(source, tuple(places[:most]), max(whole_s, 1e-9), each_s)

    def _known(self, source: str, kind: RowKind, most: int) -> Chances:
        if (known := self._chances.get((source, kind))) is None:
            known = self._chances[source, kind] = Chances(max(most, 1), PRIORS[kind])
        if len(known.places) < most:
            known.reach(most)
        return known

    def next(self, rows: list[Row], prompt_left: int = 0) -> Plan:
        chunk = min(self.chunks.size(len(rows)), prompt_left)
        kind, num_rows = self._kind(rows), len(rows) + (chunk == prompt_left > 0)
        self._now = kind  # before rows make their offers
        plan = Plan(chunk, rows, [NO_DRAFTS] * len(rows), num_rows)
        kind.begin({row.key for row in rows})
        if not rows or kind.needs_plain(len(rows)):
            return plan
        may_compute, paused = not kind.rests(num_rows), kind.paused()
        most_s = self.chunks.most_round_s / kind.costs.slowness if prompt_left else math.inf
        if kind.costs.pass_s(num_rows + 1) > most_s:
            return plan
        unwanted = paused if may_compute else paused | self._computed
        if may_compute and kind.wanted_s <= kind.trial_s:
            unwanted = paused - self._computed
        if not sum(len(row.weigh(unwanted)) for row in rows):
            return plan
        rate = num_rows / kind.costs.pass_s(num_rows) if self._is_for_latency else kind.rate(num_rows)
        bests = (self._best(kind, rate, num_rows, place, row, may_compute, paused) for place, row in enumerate(rows))
        wants = [want for want in bests if want]
        counts = self._share_out(kind.costs, rate, num_rows, wants, most_s, margin=MARGIN)
        for want, count in zip(wants, counts, strict=True):
            if count:
                more = SPARE if want.offer.source in self._blocks else 0  # slots that may prove sure cost a block hardly more
                plan.drafts[want.place] = Take(want.offer.source, min(count + more, len(want.offer.chances)))
        if may_compute and most_s == math.inf and not any(counts):
            kind.rest(num_rows)
            self._try(kind, plan)
        return plan

    def join(self, plan: Plan, place: int, row: Row) -> None:
        plan.rows.insert(place, row)
        plan.drafts.insert(place, NO_DRAFTS)

    def _kind(self, rows: list[Row]) -> RoundRecord:
        return self._kinds["greedy" if all(row.kind == "greedy" for row in rows) else "drawn"]

    def _best(
        self, kind: RoundRecord, rate: float, num_rows: int, place: int, row: Row, may_compute: bool, paused: set[str]
    ) -> Want | None:
        """The offer that would bring the most over its time if no other row checked any; drafting costs are shared by all."""
        best, most = None, -math.inf if self._is_for_latency else 0.0
        for offer in row.offers:
            if (offer.cost_s and not may_compute) or offer.source in paused:
                continue
            if truth := self._truths.get((offer.source, row.kind)):
                offer = Offer(offer.source, truth.right(offer.chances))
            lift = self._lifts.get((offer.source, row.kind), 0.0) if offer.cost_s else 0.0
            checking = surplus_of(kind.costs, rate, num_rows, gains_of(offer.chances), offer.each_s / num_rows)
            surplus = lift + checking - rate * offer.cost_s / num_rows
            if surplus > most:
                best, most = Want(place, offer, lift), surplus
        return best

    def _try(self, kind: RoundRecord, plan: Plan) -> None:
        """Let one row draft though it does not seem to pay, when trials have taken little time of late."""
        for place in range(len(plan.rows)):
            place = (place + kind.turn) % len(plan.rows)
            offer = next((offer for offer in plan.rows[place].offers if offer.cost_s and offer.chances), None)
            if offer is None:
                continue
            count = min(3, len(offer.chances))
            costs = kind.costs
            extra_s = offer.cost_s + count * offer.each_s + costs.pass_s(plan.num_rows + count) - costs.pass_s(plan.num_rows)
            is_hopeless = kind.turn >= SURE_TRIALS and not self._could_pay(kind, plan)
            kind.wanted_s = extra_s * (HOPELESS if is_hopeless else 1.0)
            if kind.wanted_s <= kind.trial_s:
                plan.drafts[place], plan.is_trial = Take(offer.source, count), True
                kind.turn += 1
            return

    def _could_pay(self, kind: RoundRecord, plan: Plan) -> bool:
        """Whether drafts that nearly always stand would be worth their time in a round of these rows."""
        wants = [
            Want(place, Offer(offer.source, (0.95,) * len(offer.chances), offer.cost_s, offer.each_s))
            for place, row in enumerate(plan.rows)
            for offer in row.offers[:1]
        ]
        return any(self._share_out(kind.costs, kind.rate(plan.num_rows), plan.num_rows, wants, math.inf, margin=MARGIN))

    def narrow(
        self, plan: Plan, sure_B: Sequence[Sequence[float] | None], candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        widths: list[int | Tree] = [take.count for take in plan.drafts]
        if all(sure is None for sure in sure_B):
            return widths
        kind, candidates_B = self._kind(plan.rows), candidates_B or [None] * len(plan.rows)
        drafted, fixed, spared = list[Drafted](), 0, 0.0
        for place, (row, take, sure, candidates) in enumerate(zip(plan.rows, plan.drafts, sure_B, candidates_B, strict=True)):
            if not take.count or sure is None:
                fixed += take.count
                spared += spared_by(row, take)
                continue
            known = self._known(take.source, row.kind, take.count)
            offer, average = Offer(take.source, tuple(known.of(sure[: take.count]))), gains_of(known.places[: take.count])
            drafted.append(Drafted(place, offer, average, candidates and Growing(candidates, known.of_candidates)))
            plan.num_trees[take.source] += candidates is not None
        asked, more = (kind.costs, kind.rate(plan.num_rows), plan.num_rows), list[float]()
        share, surplus = partial(self._share_out, *asked, num_fixed=fixed, spared=spared), partial(surplus_of, *asked)
        for each, count in zip(drafted, grown(drafted, lambda wants: share(wants, math.inf)), strict=True):
            best, key = surplus(each.gains), (each.offer.source, plan.rows[each.place].kind)
            before = self._lifts.get(key, 0.0)
            self._lifts[key] = max(before + LIFT_WEIGHT * (best - surplus(each.average) - before), 0.0)
            more += [best - surplus(gains_of(each.offer.chances))] if each.growing else []
            if not plan.is_trial:
                widths[each.place] = count if each.growing is None else each.growing.tree.first(count)
        if self._trees:
            self._trees.record(more, kind.rate(plan.num_rows))
        return widths

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        kind, num_rows = self._kind(plan.rows), len(plan.rows)
        costs, computing, longest = kind.costs, dict[str, int](), dict[str, int]()
        sure_B = stats.sure_B or [None] * num_rows
        trees_B = stats.trees_B or [None] * num_rows
        outcomes = zip(plan.rows, plan.drafts, stats.num_drafted_B, stats.num_accepted_B, sure_B, trees_B, strict=True)
        for row, take, num_drafted, num_kept, sure, outcome in outcomes:
            if not take.count:
                continue
            offer = next(offer for offer in row.offers if offer.source == take.source)
            if offer.cost_s:
                computing[take.source] = computing.get(take.source, 0) + 1
                longest[take.source] = max(longest.get(take.source, 1), take.count)
                if sure is not None and take.source not in self._stepwise:
                    self._blocks.add(take.source)
                known = self._known(take.source, row.kind, take.count)
                if outcome is None:
                    known.record(num_drafted, num_kept, sure)
                else:
                    known.record_tree(outcome, sure)
            elif num_drafted:
                expected = sum(offer.chances[: min(num_kept + 1, num_drafted)])
                self._truths.setdefault((take.source, row.kind), Truth()).add(num_kept, expected, RECENT)
        costs.record(num_rows + sum(stats.num_checked_B), stats.verify_s + stats.host_s)
        for source, drafting_s in drafting_by(stats, computing).items():
            spent = max(drafting_s - plan.num_trees[source] * TREE_S, 0.5 * drafting_s)  # trees: see TreeWorth
            costs.drafted(source, computing[source], spent / (1 if source in self._blocks else longest[source]))
        round_s = stats.draft_s + stats.verify_s + stats.host_s
        kind.record(num_rows, num_rows + sum(stats.num_accepted_B), round_s / costs.slowness, plan.is_trial)
        kind.drafted(num_rows, any_checked=any(stats.num_checked_B))
        if not plan.is_trial and not plan.chunk:
            drafting = {take.source for take, count in zip(plan.drafts, stats.num_checked_B, strict=True) if count}
            kind.compare(num_rows, num_rows + sum(stats.num_accepted_B), round_s, drafting)
        self.chunks.decoded(round_s, beside_chunk=plan.chunk > 0)

    def price(self, plan: Plan, place: int, num_checked: int, num_alike: int) -> float:
        costs, num_rows, take = self._kind(plan.rows).costs, len(plan.rows), plan.drafts[place]
        plain_s = costs.pass_s(num_rows)
        extra_s = costs.pass_s(num_rows + num_checked) - plain_s
        if take.count and take.source in self._computed:
            num_passes = 1 if take.source in self._blocks else take.count
            extra_s += num_passes * costs.drafting_s(take.source, num_alike) / num_alike
        return 1.0 + extra_s * num_rows / plain_s

    def forget(self, source: str) -> None:
        for kind in self._kinds.values():
            kind.forget(source)
        for records in (self._chances, self._lifts, self._truths):
            for key in [key for key in records if key[0] == source]:
                del records[key]
