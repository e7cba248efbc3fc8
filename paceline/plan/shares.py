"""Decides how many drafts of each row one round verifies: those that add the most tokens for their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.plan.costs import RoundCosts
from paceline.plan.trees import MOST_NODES, Growing
from paceline.types import Offer

FIRST_NODES = 24
"""Initial number of nodes of a draft tree; the tree grows further if more than half of them are worth verifying."""
TREE_S, TREE_EVERY, TREE_WEIGHT = 2e-4, 16, 0.05
"""Host seconds for one row's candidates and tree; number of rounds without trees after which trees are tried again;
weight of the latest tree in the running average of their worth."""
LEAST_GAIN = 0.01
"""Minimum chance of a draft to be accepted; considering less probable ones takes longer than they save."""


@dataclass(frozen=True, slots=True)
class Want:
    """Drafts that one row could verify, all from one source (a drafter or prompt lookup). `share_out` decides how many
    of them are verified."""

    index: int
    """Index of the row in the plan."""
    offer: Offer
    lift: float = 0.0
    """Tokens that the row is expected to gain after drafting, when drafts of low confidence are left out of
    verification."""
    average: Sequence[float] = ()
    """Expected tokens that each draft adds, by acceptance chances averaged over all confidences; empty before
    drafting."""
    growing: Growing | None = None
    """The tree made of these drafts, which can still grow; None for a chain."""

    @property
    def gains(self) -> list[float]:
        """Expected tokens that each draft or tree node adds, non-increasing. Empty for a tree that has not grown any
        nodes yet."""
        return self.growing.tree.gains if self.growing else gains_of(self.offer.chances)


def gains_of(chances: Sequence[float]) -> list[float]:
    """Returns for each draft the tokens that it is expected to add: the chance that it and all earlier drafts are
    accepted. The list ends before the first value below 0.01 (LEAST_GAIN). `chances`: acceptance chance of each draft
    given that all earlier ones are accepted."""
    gain, gains = 1.0, []
    for chance in chances:
        gain *= chance
        if gain < LEAST_GAIN:
            break
        gains.append(gain)
    return gains


def surplus_of(costs: RoundCosts, rate: float, num_rows: int, gains: Sequence[float], each_s: float = 0.0) -> float:
    """Returns the surplus, in tokens, of verifying the best number of drafts of one row. The surplus of n drafts is the
    tokens that they are expected to add, minus the tokens that could be generated in the additional time; it is 0 for
    no drafts.

    `rate`: present speed in tokens per second of all rows (see `RoundHistory.rate`). `num_rows`: rows in the round, of
    which only this one drafts. `gains`: expected tokens of each draft (see `gains_of`). `each_s`: seconds to make one
    draft.
    """
    best, expected, plain_s = 0.0, 0.0, costs.pass_s(num_rows)
    for count, gain in enumerate(gains, start=1):
        expected += gain
        best = max(best, expected - rate * (costs.pass_s(num_rows + count) - plain_s + count * each_s))
    return best


def grown(drafted: list[Want], share: Callable[[list[Want]], list[int]]) -> list[int]:
    """Grows the draft trees of all rows as far as it seems worthwhile; returns for each row how many of its drafts
    (nodes of a tree, or tokens of a chain) are verified. `share`: function that decides this for `drafted`, with the
    trees as grown so far; called after each growth.

    Trees first get at most 24 nodes (FIRST_NODES). As long as more than half of the nodes of any tree would be
    verified, this limit is doubled and `share` called again.
    """
    limit = FIRST_NODES
    while True:
        for each in drafted:
            if each.growing:
                each.growing.to(limit)
        counts = share(drafted)
        full = (
            each.growing and not each.growing.is_whole and 2 * count > limit
            for each, count in zip(drafted, counts, strict=True)
        )
        if limit >= MOST_NODES or not any(full):
            return counts
        limit = min(2 * limit, MOST_NODES)


class TreeWorth:
    """Decides whether the next round uses draft trees. Compares the tokens that trees gained so far with the CPU time
    for building them. If trees cost more than they gained, they are used only once after every 16 rounds without
    (TREE_EVERY)."""

    def __init__(self) -> None:
        self._worth = 0.0
        """Running average of a tree's tokens beyond those of the best chain, less those of its time."""
        self._num_without = 0

    @property
    def is_due(self) -> bool:
        """True if the next round uses trees."""
        return self._worth >= 0.0 or self._num_without >= TREE_EVERY

    def record(self, gains: Sequence[float], rate: float) -> None:
        """Update the average gain of a tree after a round was planned. `gains`: for each tree of the round, its surplus
        minus that of the best chain, in tokens (see `surplus_of`); empty for a round without trees. `rate`: present
        speed in tokens per second, which converts the time for building a tree to tokens."""
        self._num_without = 0 if gains else self._num_without + 1
        for gain in gains:
            self._worth += TREE_WEIGHT * (gain - rate * TREE_S - self._worth)


class _Drafting:
    """Seconds of drafting for the drafts counted so far."""

    def __init__(self, costs: RoundCosts, wants: Sequence[Want]) -> None:
        self._costs, self._wants = costs, wants
        self._counts = [0] * len(wants)
        self._rows: dict[str, int] = {}
        self._longest: dict[str, int] = {}
        self._seconds = 0.0

    def with_one_more(self, want: int) -> float:
        """Returns the seconds with one more draft of the want with this index."""
        offer = self._wants[want].offer
        self._counts[want] += 1  # the draft stays counted: call once for each, in order
        count = self._counts[want]
        if offer.cost_s and (count == 1 or offer.each_s):
            self._rows[offer.source] = self._rows.get(offer.source, 0) + (count == 1)
            # One pass drafts a whole block; drafted token by token, the longest row decides the passes.
            self._longest[offer.source] = max(self._longest.get(offer.source, 1), count) if offer.each_s else 1
            drafting = self._rows.items()
            self._seconds = sum(
                self._costs.drafting_s(source, rows) * self._longest[source] for source, rows in drafting
            )
        return self._seconds


def _steps(wants: Sequence[Want]) -> list[tuple[float, int]]:
    """Returns (gain, index of the want) of each draft, largest first."""
    steps: list[tuple[float, int]] = []
    for index, want in enumerate(wants):
        for slot, gain in enumerate(want.gains):
            steps.append((gain + (want.lift if slot == 0 else 0.0), index))
    # A row's gains never increase: the first n steps have a prefix of each row's drafts.
    return sorted(steps, reverse=True)


def share_out(
    costs: RoundCosts,
    rate: float,
    num_rows: int,
    wants: list[Want],
    most_s: float,
    num_fixed: int = 0,
    margin: float = 0.0,
) -> list[int]:
    """Decides how many drafts of each row a round verifies, so that it gives the most tokens for its time. Each of
    `wants` is a row with its drafts; returns a number for each.

    The drafts of all rows are sorted by their expected tokens, the largest first, and the first n are verified. n is
    chosen for the largest surplus: the expected tokens of these drafts minus `rate` * the round's additional seconds.
    If no surplus exceeds `margin` * `num_rows` tokens, no drafts are verified.

    `rate`: present speed in tokens per second of all rows (see `RoundHistory.rate`). `num_rows`: all rows that decode.
    `most_s`: time limit of the round in seconds. `num_fixed`: drafts of rows outside `wants`, which are verified in any
    case.
    """
    steps, drafting, base = _steps(wants), _Drafting(costs, wants), num_rows + num_fixed
    base_s, total = costs.pass_s(base), 0.0
    best, best_count = margin * num_rows, 0
    for count, (value, index) in enumerate(steps, start=1):
        total += value
        round_s = costs.pass_s(base + count) + drafting.with_one_more(index)
        if round_s > most_s:
            break
        score = total - rate * (round_s - base_s)
        if score > best:
            best, best_count = score, count
    counts = [0] * len(wants)
    for _, index in steps[:best_count]:
        counts[index] += 1
    return counts
