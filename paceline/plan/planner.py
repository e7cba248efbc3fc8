"""Plans each engine step: how much of a prompt to prefill, and which drafts every running row verifies. Imports no
PyTorch.

    plan = planner.next(rows)                      # Row: a sequence and the drafts it could verify (Offer) -> Plan
    widths = planner.narrow(plan, confidence_B)    # after drafting: the number of drafts, or the tree, of each row
    planner.learn(plan, stats)                     # durations of the round, and which drafts were accepted

The engine executes a plan with the real target, `simulate` with a cost model; both use the same planner. A draft is
verified if the tokens it is expected to add are worth its time at the rate that rounds reach anyway:

    expected tokens > rate * extra seconds    # rate: tokens per second without drafts, or of recent rounds if higher

All inputs are known before a round's tokens are sampled: the confidence at a slot (draft position) comes from the
drafter's distribution, never from the sampled token, so a plan does not change the generated text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from paceline.plan.chances import PRIORS, Calibration, Chances
from paceline.plan.chunks import ChunkSizes
from paceline.plan.costs import PassCosts, RoundCosts, drafting_by
from paceline.plan.history import RECENT, RoundHistory
from paceline.plan.shares import TREE_S, TreeWorth, Want, gains_of, grown, share_out, surplus_of
from paceline.plan.trees import Candidates, Growing, Tree, Weigh, drafter_probs, grow
from paceline.types import Offer, RoundStats, Row, RowKind, Take

MARGIN = 0.02
"""Minimum expected gain of a round's drafts, in tokens per row, beyond the tokens that their time costs, because
estimates err."""
LIFT_WEIGHT = 0.05
"""Weight of the latest round in the average of tokens gained by not verifying drafts of low confidence."""
SURE_TRIALS, HOPELESS = 3, 5.0
"""After SURE_TRIALS trials (drafts that seem not to pay), further ones are HOPELESS times rarer if drafts would not pay
even if 95% of them were accepted."""
FEW_CANDIDATES, MOST_CANDIDATES = 8, 32
"""Candidate tokens per slot (draft position) for a tree: the adaptive planner's number, and the maximum."""
SPARE = 2
"""Slots drafted beyond the number that pays on average, by a block drafter: its confidence there may be high."""
NO_DRAFTS = Take()
Confidences = Sequence[Sequence[float] | None]
"""For each row, the log-probability of the drafter's top token at each slot (draft position); None if unknown."""


@dataclass(slots=True)
class Plan:
    """The plan of one engine step: the number of prompt tokens to prefill (`chunk`), and the source and maximum number
    of drafts of each row."""

    chunk: int
    rows: list[Row]
    drafts: list[Take]
    num_rows: int
    """Rows that decode, including the one whose prompt ends in this step."""
    whole_blocks: bool = False
    """True if block drafters always draft a full block, so that drafts do not depend on how many are verified."""
    num_trees: Counter[str] = field(default_factory=Counter)
    """Source (drafter) -> number of rows for which it returned candidates for a tree."""
    is_trial: bool = False
    """True if the drafts are expected to cost more time than they save, and only serve to update the estimates."""


class Planner(Protocol):
    """Interface of planners, which decide before every engine step how many tokens each row drafts and how many prompt
    tokens are prefilled."""

    reports_target_ranks: bool  # True if rounds report which candidates the target generated: for measurements

    @property
    def num_candidates(self) -> int:
        """Number of candidate tokens that drafters return at each slot, for trees; 0: no trees."""
        ...

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        """Estimates the benefit and cost of verifying up to `most` drafts from `source` (a drafter's name) for one row:
        the drafts' acceptance chances, and the seconds of making them. `kind`: sampling mode of the row. `is_stepwise`:
        True if each draft takes a forward pass of its own."""
        ...

    def next(self, rows: list[Row], prompt_left: int = 0) -> Plan:
        """Plans the next step: the drafts of each row that decodes (`rows`), and how many prompt tokens are prefilled.
        `prompt_left`: tokens left of the prompt that is being prefilled; 0 without one. That request is not in `rows`;
        if this step completes its prompt, it also decodes in this step."""
        ...

    def join(self, plan: Plan, index: int, row: Row) -> None:
        """Insert a row into the plan at `index`: the request in prefill, whose prompt this step completed, so that it
        decodes in the same step."""

    def narrow(
        self, plan: Plan, confidence_B: Confidences, candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        """Decides after drafting what is verified: returns for each row a number of drafts, or a draft tree.
        `confidence_B`: for each row the drafter's log-probability of its top token at each slot (draft position).
        `candidates_B`: the drafter's most probable tokens at each slot, for rows that may verify a tree."""
        ...

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        """Update the estimates of durations and acceptance with a finished round. `plan`: the plan that it followed."""

    def price(self, plan: Plan, index: int, num_checked: int, num_alike: int) -> float | None:
        """Estimates what the drafts of row `index` cost: 1 plus the share of a round's time that they add, if every row
        drafted like this one (1.5: such a round takes 1.5 times as long as one without drafts). None if unknown.
        `num_checked`: verified drafts of this row. `num_alike`: number of rows that share one drafting pass, this one
        included."""

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Update the estimates with a prefill chunk of `num_tokens` tokens that took `seconds`."""

    def forget(self, source: str) -> None:
        """Discard the statistics of a drafter that was replaced or removed."""


@dataclass(slots=True)
class FixedPlanner(Planner):
    """Plans the same number of drafts for a row in every round, and prefill chunks of one size; ignores all timings.
    The drafts come from the first of these sources that has any: the request's prediction, its drafter, prompt
    lookup."""

    num_drafted: int | None = None
    """Drafts per row; None: all that are offered."""
    most_chunk: int = 256
    whole_blocks: bool = True
    num_nodes: int = 0
    """Nodes of the tree that each row verifies instead of a chain, if its drafter returns candidates; 0: chains."""
    num_named: int = 0
    """Minimum number of candidate tokens that drafters return at each slot, also for chains; they are needed for
    `RoundStats.target_ranks_B`."""
    reports_target_ranks: bool = True

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
        """Called before a round of `num_rows` rows is planned."""

    def _take(self, row: Row) -> Take:
        offers = row.weigh() if self.num_drafted != 0 else []
        if not offers:
            return NO_DRAFTS
        most = len(offers[0].chances)
        return Take(offers[0].source, most if self.num_drafted is None else min(self.num_drafted, most))

    def join(self, plan: Plan, index: int, row: Row) -> None:
        plan.rows.insert(index, row)
        plan.drafts.insert(index, self._take(row))

    def narrow(
        self, plan: Plan, confidence_B: Confidences, candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        rows = zip(plan.rows, plan.drafts, candidates_B or [None] * len(plan.rows), strict=True)
        return [
            grow(candidates, self.weigh(row, candidates), self.num_nodes)
            if candidates and self.num_nodes
            else take.count
            for row, take, candidates in rows
        ]

    def weigh(self, row: Row, candidates: Candidates) -> Weigh:
        return drafter_probs


class AdaptivePlanner:
    """Plans the drafts that give the most tokens per second, by measured durations and acceptance. Drafts that seem to
    cost more time than they save are made only in rare trials, which keep the estimates up to date."""

    def __init__(
        self, passes: PassCosts, *, most_chunk: int = 256, adapts_chunks: bool = True, grows_trees: bool = False
    ) -> None:
        """`passes`: measured seconds of target passes. Set `adapts_chunks` only for a target whose outputs do not
        depend on chunk sizes, and `grows_trees` only for one that accepts trees."""
        self.reports_target_ranks, self._trees = False, TreeWorth() if grows_trees else None
        self._histories = {name: RoundHistory(RoundCosts(passes)) for name in ("greedy", "drawn")}
        self._history = self._histories["greedy"]
        """History for the rows planned last; it prices drafting, whatever a row's own sampling mode."""
        self._chances: dict[tuple[str, str], Chances] = {}
        """By source and kind of row."""
        self._lifts: dict[tuple[str, str], float] = {}
        """Tokens per row gained on average by cutting drafts of low confidence; by source and kind of row."""
        self._calibrations: dict[tuple[str, str], Calibration] = {}
        """By source, of those that do not compute their drafts, and kind of row."""
        self._blocks: set[str] = set()
        """Sources that draft a whole block at once and report a confidence at each slot."""
        self._computed, self._stepwise = set[str](), set[str]()
        """Sources that compute their drafts; those of them that take a step for each."""
        self.chunks = ChunkSizes(most_chunk, adapts_chunks)

    @property
    def num_candidates(self) -> int:
        return FEW_CANDIDATES if self._trees and self._trees.is_due else 0

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self.chunks.prefilled(num_tokens, seconds)

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        self._computed.add(source)
        if is_stepwise:
            self._stepwise.add(source)
        chances = self._known(source, kind, most).average
        drafting_s = self._history.costs.drafting_s(source, 1)
        whole_s, each_s = (drafting_s, 0.0) if source in self._blocks else (0.0, drafting_s)
        return Offer(source, tuple(chances[:most]), max(whole_s, 1e-9), each_s)

    def _known(self, source: str, kind: RowKind, most: int) -> Chances:
        if (known := self._chances.get((source, kind))) is None:
            known = self._chances[source, kind] = Chances(max(most, 1), PRIORS[kind])
        if len(known.average) < most:
            known.extend(most)
        return known

    def next(self, rows: list[Row], prompt_left: int = 0) -> Plan:
        chunk = min(self.chunks.size(len(rows)), prompt_left)
        history = self._history = self._history_of(rows)  # before rows make their offers
        num_rows = len(rows) + (chunk == prompt_left > 0)
        plan = Plan(chunk, rows, [NO_DRAFTS] * len(rows), num_rows)
        history.begin({row.key for row in rows})
        if not rows or history.plain.is_due(len(rows)):
            return plan
        # Both calls count one round down; rounds that returned above do not count.
        may_compute, paused, costs = not history.rests(num_rows), history.pauses.next(), history.costs
        most_s = self.chunks.most_round_s / costs.slowness if prompt_left else math.inf
        if costs.pass_s(num_rows + 1) > most_s:
            return plan
        unwanted = paused if may_compute else paused | self._computed
        # A trial may use a paused drafter, so that its offer is needed; `_best` still ignores it.
        if may_compute and history.trials.is_affordable:
            unwanted = paused - self._computed
        if not sum(len(row.weigh(unwanted)) for row in rows):  # not `any`: every row must fill its `offers`
            return plan
        rate = history.rate(num_rows)
        bests = (self._best(costs, rate, num_rows, index, row, may_compute, paused) for index, row in enumerate(rows))
        wants = [want for want in bests if want]
        counts = share_out(costs, rate, num_rows, wants, most_s, margin=MARGIN)
        for want, count in zip(wants, counts, strict=True):
            if count:
                more = SPARE if want.offer.source in self._blocks else 0  # further slots hardly lengthen a block
                plan.drafts[want.index] = Take(want.offer.source, min(count + more, len(want.offer.chances)))
        # A time limit says nothing about whether drafts pay: no rest, no trial.
        if may_compute and most_s == math.inf and not any(counts):
            history.rest(num_rows)
            self._try(history, plan)
        return plan

    def join(self, plan: Plan, index: int, row: Row) -> None:
        plan.rows.insert(index, row)
        plan.drafts.insert(index, NO_DRAFTS)

    def _history_of(self, rows: list[Row]) -> RoundHistory:
        return self._histories["greedy" if all(row.kind == "greedy" for row in rows) else "drawn"]

    def _best(
        self, costs: RoundCosts, rate: float, num_rows: int, index: int, row: Row, may_compute: bool, paused: set[str]
    ) -> Want | None:
        """Returns the row's offer with the largest surplus if no other row drafted; all rows share the cost of
        drafting."""
        best, most = None, 0.0
        for offer in row.offers:
            if (offer.cost_s and not may_compute) or offer.source in paused:
                continue
            if calibration := self._calibrations.get((offer.source, row.kind)):
                offer = Offer(offer.source, calibration.apply(offer.chances))  # these cost nothing
            lift = self._lifts.get((offer.source, row.kind), 0.0) if offer.cost_s else 0.0
            checking = surplus_of(costs, rate, num_rows, gains_of(offer.chances), offer.each_s / num_rows)
            surplus = lift + checking - rate * offer.cost_s / num_rows
            if surplus > most:
                best, most = Want(index, offer, lift), surplus
        return best

    def _try(self, history: RoundHistory, plan: Plan) -> None:
        """Plan a trial if the budget allows: one row drafts although it does not seem to pay."""
        trials, costs = history.trials, history.costs
        for index in range(len(plan.rows)):
            index = (index + trials.count) % len(plan.rows)  # each trial begins at another row
            offer = next((offer for offer in plan.rows[index].offers if offer.cost_s and offer.chances), None)
            if offer is None:
                continue
            count = min(3, len(offer.chances))
            extra_s = (
                offer.cost_s + count * offer.each_s + costs.pass_s(plan.num_rows + count) - costs.pass_s(plan.num_rows)
            )
            is_hopeless = trials.count >= SURE_TRIALS and not self._could_pay(history, plan)
            # Set even if it is not affordable: the budget grows until it is.
            trials.wanted_s = extra_s * (HOPELESS if is_hopeless else 1.0)
            if trials.is_affordable:
                plan.drafts[index], plan.is_trial = Take(offer.source, count), True
                trials.count += 1
            return

    def _could_pay(self, history: RoundHistory, plan: Plan) -> bool:
        """True if drafts that are nearly always accepted would be worth their time in a round of these rows."""
        wants = [
            Want(index, Offer(offer.source, (0.95,) * len(offer.chances), offer.cost_s, offer.each_s))
            for index, row in enumerate(plan.rows)
            for offer in row.offers[:1]
        ]
        return any(share_out(history.costs, history.rate(plan.num_rows), plan.num_rows, wants, math.inf, margin=MARGIN))

    def narrow(
        self, plan: Plan, confidence_B: Confidences, candidates_B: Sequence[Candidates | None] | None = None
    ) -> list[int | Tree]:
        widths: list[int | Tree] = [take.count for take in plan.drafts]
        if all(confidence is None for confidence in confidence_B):
            return widths
        history, candidates_B = self._history_of(plan.rows), candidates_B or [None] * len(plan.rows)
        drafted, fixed = list[Want](), 0
        rows = zip(plan.rows, plan.drafts, confidence_B, candidates_B, strict=True)
        for index, (row, take, confidence, candidates) in enumerate(rows):
            if not take.count or confidence is None:
                fixed += take.count
                continue
            known = self._known(take.source, row.kind, take.count)
            offer = Offer(take.source, tuple(known.of(confidence[: take.count])))
            growing = candidates and Growing(candidates, known.of_candidates)
            drafted.append(Want(index, offer, average=gains_of(known.average[: take.count]), growing=growing))
            plan.num_trees[take.source] += candidates is not None
        rate = history.rate(plan.num_rows)
        shared, tree_gains = (history.costs, rate, plan.num_rows), list[float]()
        share, surplus = partial(share_out, *shared, num_fixed=fixed), partial(surplus_of, *shared)
        for each, count in zip(drafted, grown(drafted, lambda wants: share(wants, math.inf)), strict=True):
            best, key = surplus(each.gains), (each.offer.source, plan.rows[each.index].kind)
            before = self._lifts.get(key, 0.0)
            self._lifts[key] = max(before + LIFT_WEIGHT * (best - surplus(each.average) - before), 0.0)
            if each.growing:
                tree_gains.append(best - surplus(gains_of(each.offer.chances)))
            if not plan.is_trial:  # a trial verifies all that it drafted
                widths[each.index] = count if each.growing is None else each.growing.tree.first(count)
        if self._trees:
            self._trees.record(tree_gains, rate)
        return widths

    def learn(self, plan: Plan, stats: RoundStats) -> None:
        history, num_rows = self._history_of(plan.rows), len(plan.rows)
        costs, computing, longest = history.costs, dict[str, int](), dict[str, int]()
        confidence_B, trees_B = stats.confidence_B or [None] * num_rows, stats.trees_B or [None] * num_rows
        outcomes = zip(
            plan.rows, plan.drafts, stats.num_drafted_B, stats.num_accepted_B, confidence_B, trees_B, strict=True
        )
        for row, take, num_drafted, num_accepted, confidence, outcome in outcomes:
            if not take.count:
                continue
            offer = next(offer for offer in row.offers if offer.source == take.source)
            if offer.cost_s:
                computing[take.source] = computing.get(take.source, 0) + 1
                longest[take.source] = max(longest.get(take.source, 1), take.count)
                if confidence is not None and take.source not in self._stepwise:
                    self._blocks.add(take.source)
                known = self._known(take.source, row.kind, take.count)
                if outcome is None:
                    known.record(num_drafted, num_accepted, confidence)
                else:
                    known.record_tree(outcome, confidence)
            elif num_drafted:
                expected = sum(offer.chances[: min(num_accepted + 1, num_drafted)])  # of the tested drafts
                calibration = self._calibrations.setdefault((take.source, row.kind), Calibration())
                calibration.add(num_accepted, expected, RECENT)
        costs.record(num_rows + sum(stats.num_checked_B), stats.verify_s + stats.host_s)
        for source, drafting_s in drafting_by(stats, computing).items():
            drafting_s = max(drafting_s - plan.num_trees[source] * TREE_S, 0.5 * drafting_s)  # trees: see TreeWorth
            costs.drafted(source, computing[source], drafting_s / (1 if source in self._blocks else longest[source]))
        round_s = stats.draft_s + stats.verify_s + stats.host_s
        sources = {take.source for take, count in zip(plan.drafts, stats.num_checked_B, strict=True) if count}
        history.record(num_rows, num_rows + sum(stats.num_accepted_B), round_s, sources, plan.is_trial, plan.chunk > 0)
        self.chunks.decoded(round_s, beside_chunk=plan.chunk > 0)

    def price(self, plan: Plan, index: int, num_checked: int, num_alike: int) -> float:
        costs, num_rows, take = self._history_of(plan.rows).costs, len(plan.rows), plan.drafts[index]
        plain_s = costs.pass_s(num_rows)
        extra_s = costs.pass_s(num_rows + num_checked) - plain_s
        if take.count and take.source in self._computed:
            num_passes = 1 if take.source in self._blocks else take.count
            extra_s += num_passes * costs.drafting_s(take.source, num_alike) / num_alike
        return 1.0 + extra_s * num_rows / plain_s

    def forget(self, source: str) -> None:
        for history in self._histories.values():
            history.pauses.forget(source)
            history.costs.forget(source)
        for sources in (self._blocks, self._computed, self._stepwise):
            sources.discard(source)
        for records in (self._chances, self._lifts, self._calibrations):
            for key in [key for key in records if key[0] == source]:
                del records[key]
