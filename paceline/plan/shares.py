"""How a round's positions are shared out among its rows: the drafts that bring the most tokens over their time. No PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.plan.costs import RoundCosts
from paceline.plan.trees import MOST_NODES, Growing
from paceline.types import Offer, Row, Take

Objective = Literal["throughput", "latency"]
"""Most tokens per second of all rows together, or the least mean time per token over the rows."""

FIRST_NODES = 24
"""Nodes that a tree has at first; it grows on where so many are worth checking."""
TREE_S, TREE_EVERY, TREE_WEIGHT = 2e-4, 16, 0.05
"""Seconds that a row's candidates and tree take of the host; rounds without trees until they are tried again; weight of the
latest tree in what they are worth."""
LEAST_GAIN = 0.01
"""Chance to stand of a draft that is looked at: to weigh those behind it takes longer than they are worth."""


@dataclass(frozen=True, slots=True)
class Want:
    """The offer that the row at `place` of the plan would take; `lift`: tokens that it brings beyond what its average chances
    say, because its drafts are cut where the drafter is unsure."""

    place: int
    offer: Offer
    lift: float = 0.0
    gains: list[float] | None = None
    """Of a tree's nodes, falling; None: those of the offer's chances."""


def gains_of(chances: Sequence[float]) -> list[float]:
    """Chance that each draft is kept, falling."""
    kept, gains = 1.0, []
    for chance in chances:
        kept *= chance
        if kept < LEAST_GAIN:
            break
        gains.append(kept)
    return gains


def surplus_of(costs: RoundCosts, rate: float, num_rows: int, gains: Sequence[float], each_s: float = 0.0) -> float:
    """Most tokens over the time of checking that drafts with these gains bring to a round in which nobody else has any."""
    best, expected, plain_s = 0.0, 0.0, costs.pass_s(num_rows)
    for count, gain in enumerate(gains, start=1):
        expected += gain
        best = max(best, expected - rate * (costs.pass_s(num_rows + count) - plain_s + count * each_s))
    return best


def spared_by(row: Row, take: Take) -> float:
    """1 - 1 / E of a row that takes these drafts, as it was offered them; 0 of one that takes none."""
    offer = next((offer for offer in row.offers if offer.source == take.source), None) if take.count else None
    return 1 - 1 / (1 + sum(gains_of(offer.chances[: take.count]))) if offer else 0.0


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a row's drafter has drafted, before it is known how much of it is checked."""

    place: int
    offer: Offer
    average: list[float]
    """Chance that each draft stands, as such drafts do on average."""
    growing: Growing | None
    """The tree that it can be; None: a chain."""

    @property
    def gains(self) -> list[float]:
        """Chance that each draft stands, falling; of a tree that has not grown yet, none."""
        return self.growing.tree.gains if self.growing else gains_of(self.offer.chances)

    def want(self, most: int) -> Want:
        """With a tree of at most so many nodes."""
        if self.growing:
            self.growing.to(most)
        return Want(self.place, self.offer, gains=self.gains)


def grown(drafted: Sequence[Drafted], share: Callable[[list[Want]], list[int]]) -> list[int]:
    """What `share` gives each row, of trees that grow while more than half of one would be checked: most of what could be in a
    tree is worth no position, and takes as long to weigh as to check."""
    limit = FIRST_NODES
    while True:
        counts = share([each.want(limit) for each in drafted])
        full = (
            each.growing and not each.growing.is_whole and 2 * count > limit
            for each, count in zip(drafted, counts, strict=True)
        )
        if limit >= MOST_NODES or not any(full):
            return counts
        limit = min(2 * limit, MOST_NODES)


class TreeWorth:
    """Whether trees are worth asking for. Naming candidates and growing trees takes the host's time, also where a chain comes
    of it, as where a position costs much: then they are asked for once in TREE_EVERY rounds, to notice another time."""

    def __init__(self) -> None:
        self._worth = 0.0
        """Tokens that a tree brings beyond the best chain, less those of its time, of late."""
        self._num_without = 0

    @property
    def is_asked(self) -> bool:
        """For the next round."""
        return self._worth >= 0.0 or self._num_without >= TREE_EVERY

    def record(self, gains: Sequence[float], rate: float) -> None:
        """A round is planned: `gains`, for each of its trees, is the tree's surplus less that of the chain, in tokens; empty in
        a round without. `rate`: tokens per second."""
        self._num_without = 0 if gains else self._num_without + 1
        for gain in gains:
            self._worth += TREE_WEIGHT * (gain - rate * TREE_S - self._worth)


class _Drafting:
    """Seconds that drafting takes for the drafts that are looked at so far."""

    def __init__(self, costs: RoundCosts, wants: Sequence[Want]) -> None:
        self._costs, self._wants = costs, wants
        self._counts = [0] * len(wants)
        self._rows: dict[str, int] = {}
        self._longest: dict[str, int] = {}
        self._spent_s = 0.0

    def with_one_more(self, index: int) -> float:
        """The want at `index` has one more draft checked."""
        offer = self._wants[index].offer
        self._counts[index] += 1
        count = self._counts[index]
        if offer.cost_s and (count == 1 or offer.each_s):
            self._rows[offer.source] = self._rows.get(offer.source, 0) + (count == 1)
            self._longest[offer.source] = max(self._longest.get(offer.source, 1), count) if offer.each_s else 1
            drafting = self._rows.items()
            self._spent_s = sum(self._costs.drafting_s(source, rows) * self._longest[source] for source, rows in drafting)
        return self._spent_s


def _gains(want: Want) -> list[float]:
    """Tokens that each of its drafts is expected to add."""
    kept = gains_of(want.offer.chances) if want.gains is None else want.gains
    return [gain + (want.lift if slot == 0 else 0.0) for slot, gain in enumerate(kept)]


def share_out(
    costs: RoundCosts,
    rate: float,
    num_rows: int,
    wants: list[Want],
    most_s: float,
    num_fixed: int = 0,
    margin: float = 0.0,
    spared: float = 0.0,
    sooner: bool = False,
) -> list[int]:
    """How many drafts of each want to check together: gains in falling order, as long as the surplus of all grows.

    `num_fixed` drafts are checked anyway. The round takes `most_s` at most. `sooner` asks `share_sooner`, which alone needs
    `spared`.
    """
    if sooner:
        return share_sooner(costs, num_rows, wants, most_s, num_fixed, margin, spared)
    gains = sorted(((gain, index) for index, want in enumerate(wants) for gain in _gains(want)), reverse=True)
    base = num_rows + num_fixed
    base_s, drafting, expected = costs.pass_s(base), _Drafting(costs, wants), 0.0
    best, best_count = margin * num_rows, 0
    for count, (gain, index) in enumerate(gains, start=1):
        expected += gain
        round_s = costs.pass_s(base + count) + drafting.with_one_more(index)
        if round_s > most_s:
            break
        if (surplus := expected - rate * (round_s - base_s)) > best:
            best, best_count = surplus, count
    return [sum(index == place for _, index in gains[:best_count]) for place in range(len(wants))]


def share_sooner(
    costs: RoundCosts,
    num_rows: int,
    wants: list[Want],
    most_s: float,
    num_fixed: int = 0,
    margin: float = 0.0,
    spared: float = 0.0,
) -> list[int]:
    """As `share_out`, for the objective latency: what makes the mean time per token over the rows least.

    A row that expects E tokens of a round has one each round / E seconds, so what is made least is round time * sum of 1 / E. A
    further draft of a row lessens its 1 / E by less and less, whoever else drafts: so those that lessen it most come first.
    Rows that check nothing, and those about to join, count with E = 1. `spared`: sum of 1 - 1 / E over rows that are not among
    the wants. A plan that makes this less than without drafts has more tokens per second than without, too: the mean of E is at
    least the harmonic one.
    """
    steps: list[tuple[float, int]] = []
    for index, want in enumerate(wants):
        expected = 1.0
        for gain in _gains(want):
            steps.append((1 / expected - 1 / (expected + gain), index))
            expected += gain
    steps.sort(reverse=True)
    base, rounds_per_token = num_rows + num_fixed, num_rows - spared
    drafting, best_count = _Drafting(costs, wants), 0
    least = costs.pass_s(base) * rounds_per_token * (1 - margin)
    for count, (step, index) in enumerate(steps, start=1):
        rounds_per_token -= step
        round_s = costs.pass_s(base + count) + drafting.with_one_more(index)
        if round_s > most_s:
            break
        if (waited := round_s * rounds_per_token) < least:
            least, best_count = waited, count
    return [sum(index == place for _, index in steps[:best_count]) for place in range(len(wants))]
