"""Predicts the acceptance length of draft trees from the acceptance chances (marginals) of a block drafter's
candidates. Imports no PyTorch.

    tally.add(target_ranks(candidates, tokens))     # after each round: ranks of the target's tokens in the candidates
    marginals = Marginals.of(tally)
    marginals.expected(32)[32].tokens               # acceptance length of the best trees of 32 drafts

A marginal is the chance of the candidate with a given rank at a given slot (draft position). It is counted over the
rounds in which the top candidate was right at every earlier slot: in those the target's token at the slot is known,
whatever was verified. A drafter's confidence varies from round to round, and much of a tree's acceptance comes from
that. Here the drafter's probability of a slot's top token is Beta distributed around the marginal, as in
`simulate/server/drafts.py`, and the other ranks share the rest in proportion. Candidates after a sibling are assumed to
be accepted as often as those after the top token; `tests/simulate/test_tree_prediction.py` compares the predictions
with measured trees.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import ConfigError, shown
from paceline.plan.planner import FixedPlanner
from paceline.plan.trees import NONE_OF_THEM, Candidates, TargetRanks, Weigh, grow
from paceline.types import Row

CONCENTRATION = 1.5
"""Sum of both parameters of the Beta distribution of a drafter's probabilities; small if its confidence varies much.
The shipped drafter on 12 GSM8K questions: slots with a mean of 0.80 had a variance of 0.06."""
DRAWS, _FINER = 1000, 4
"""Number of random rounds over which trees are averaged; random numbers drawn for each, to select evenly spread
ones."""
_PRIOR = 20.0
"""Weight, in tries of a slot, of its prior: the chance of the slot before it, and average shares of other ranks."""
_LEAST = 1e-4
Chances = tuple[tuple[float, ...], ...]
"""For each slot and rank: the chance that this candidate is the target's token, if the top candidate was right at every
earlier slot."""


@dataclass(slots=True)
class Tally:
    """Counts, over many rounds, how often the target's token was the drafter's candidate of each rank, for each slot
    (draft position)."""

    tried: list[int] = field(default_factory=list)
    """For each slot: number of rounds in which the target's token there is known, and the top candidate was right at
    every earlier slot."""
    stood: list[list[int]] = field(default_factory=list)
    """For each slot and rank: in how many of those rounds this candidate was the target's token."""

    def add(self, ranks: TargetRanks) -> None:
        for slot in range(ranks.num_first):
            self._count(slot, 0)
        if ranks.rank is not None:
            self._count(ranks.num_first, ranks.rank)

    def _count(self, slot: int, rank: int) -> None:
        if slot == len(self.tried):  # slots come in order: at most one is new
            self.tried.append(0)
            self.stood.append([])
        self.tried[slot] += 1
        if rank != NONE_OF_THEM:
            own = self.stood[slot]
            own += [0] * (rank + 1 - len(own))
            own[rank] += 1

    @classmethod
    def of(cls, counts: Any) -> Tally:
        """Reads the counts from a JSON object {"tried": [...], "stood": [[...], ...]}: `tried` and `stood` of this
        class, with one entry per slot. Raises ConfigError on invalid counts."""
        tried, stood = (counts.get("tried"), counts.get("stood")) if isinstance(counts, dict) else (None, None)
        if (
            not (isinstance(tried, list) and isinstance(stood, list) and tried and len(stood) == len(tried))
            or not all(map(_are_counts, [tried, *stood]))
            or any(sum(own) > count for own, count in zip(stood, tried, strict=True))
        ):
            raise ConfigError(
                'marginals are counts, {"tried": rounds of each slot, "stood": of each slot how many had each rank}: '
                "write them with paceline bench decode --speculate tree:32"
            )
        return cls(list(tried), [list(own) for own in stood])

    @property
    def num_rounds(self) -> int:
        return self.tried[0] if self.tried else 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


class Expected(NamedTuple):
    """Predicted acceptance length and depth of draft trees that all have the same number of nodes, averaged over many
    simulated rounds."""

    tokens: float
    """Acceptance length: tokens per round, including the bonus token."""
    depth: float
    """Number of drafts on the tree's longest path."""


@dataclass(frozen=True, slots=True)
class Marginals:
    """Acceptance chances of a drafter's candidate tokens, by slot (draft position) and rank (0: most probable),
    averaged over rounds. Raises ConfigError for invalid chances."""

    chances_KM: Chances
    num_rounds: int = 0
    """Number of rounds that the chances were counted over; 0 for chances that were set by hand."""

    def __post_init__(self) -> None:
        for slot, own in enumerate(self.chances_KM, start=1):
            if not own or not all(0 <= chance <= 1 for chance in own) or sum(own) > 1 + 1e-9:  # also NaN
                raise ConfigError(
                    f"marginals of slot {slot} are chances that sum up to 1 at most, the largest first: "
                    f"not {shown(own)}"
                )
        if not self.chances_KM:
            raise ConfigError("marginals need a slot at least, as in [[0.7, 0.1], [0.7, 0.1]]")

    @classmethod
    def of(cls, tally: Tally) -> Marginals:
        """Estimates the chances from counts. The fewer counts a slot has, the more its estimates are drawn towards
        typical values: for the top token, the chance at the previous slot; for lower ranks, their average over all
        slots."""
        left = sum(tally.tried) - sum(own[0] for own in tally.stood if own)
        sums = [sum(counts) for counts in itertools.zip_longest(*(own[1:] for own in tally.stood), fillvalue=0)]
        shares = [each / left if left else 0.0 for each in sums]
        before, chances_KM = None, list[tuple[float, ...]]()
        for tried, stood in zip(tally.tried, tally.stood, strict=True):
            # The first slot has none before it: its prior is its own mean.
            first = (stood[0] if stood else 0) / tried if before is None and tried else before or 0.0
            prior = [first, *(share * (1 - first) for share in shares)]
            counts = [*stood, *[0] * (len(prior) - len(stood))]
            chances = tuple((n + _PRIOR * chance) / (tried + _PRIOR) for n, chance in zip(counts, prior, strict=True))
            chances_KM.append(chances)
            before = chances[0]
        return cls(tuple(chances_KM), tally.num_rounds)

    @property
    def firsts(self) -> list[float]:
        """Acceptance chance of the top token at each slot; a chain drafts these tokens."""
        return [own[0] for own in self.chances_KM]

    @property
    def survival(self) -> tuple[float, ...]:
        """For i = 1 .. K: share of rounds in which the top tokens of the first i slots are all accepted."""
        return tuple(itertools.accumulate(self.firsts, operator.mul))

    def with_firsts(self, firsts: Sequence[float]) -> Marginals:
        """Returns marginals in which the top token of each slot has the chance in `firsts`. The rest, 1 - first, is
        divided among the lower ranks in the same proportions at every slot: those of the sums over all slots of this
        object."""
        left = sum(1 - first for first in self.firsts)
        ranks = itertools.zip_longest(*(own[1:] for own in self.chances_KM), fillvalue=0.0)
        shares = [sum(each) / left if left else 0.0 for each in ranks]
        return Marginals(tuple((first, *(share * (1 - first) for share in shares)) for first in firsts))

    def first_slots(self, count: int) -> Marginals:
        return Marginals(self.chances_KM[:count], self.num_rounds)

    def drawn(self, luck: random.Random) -> Weigh:
        """Draws random acceptance chances for one simulated round. They vary around the averages in this object,
        because a real drafter's confidence varies from round to round. Returns a function (slot, log-probabilities of
        its candidates) -> acceptance chances of the candidates. `luck`: source of the random numbers."""
        return self._weigh([_confidence(luck, own[0]) for own in self.chances_KM])

    def _weigh(self, confidence_K: Sequence[float]) -> Weigh:
        """`confidence_K`: the chance of each slot's top token in this round."""
        chances = [_rescaled(own, first) for own, first in zip(self.chances_KM, confidence_K, strict=True)]
        return lambda slot, logprobs: chances[slot][: len(logprobs)] if slot < len(chances) else [0.0]

    def expected(self, most: int, seed: int = 0) -> list[Expected]:
        """Predicts acceptance length and depth of the best draft trees with n nodes, for n = 0 .. `most`, by simulating
        1000 rounds (DRAWS). Entry n of the result is for n nodes."""
        luck, sums, depths = random.Random(seed), [0.0] * (most + 1), [0] * (most + 1)
        confidence_KD = [_spread_evenly(luck, own[0]) for own in self.chances_KM]
        named = [list(range(len(own))) for own in self.chances_KM]
        candidates = Candidates(named, [[0.0] * len(own) for own in named], most)
        for confidence_K in zip(*confidence_KD, strict=True):
            tree = grow(candidates, self._weigh(confidence_K), most)
            gains = [*tree.gains, *[0.0] * (most - len(tree.gains))]
            # Entry n: depth of the first n nodes.
            longest = [*itertools.accumulate(tree.depths, max, initial=0)]
            longest += [longest[-1]] * (most + 1 - len(longest))
            sums = [each + gain for each, gain in zip(sums, itertools.accumulate(gains, initial=0.0), strict=True)]
            depths = [each + depth for each, depth in zip(depths, longest, strict=True)]
        return [Expected(1 + tokens / DRAWS, depth / DRAWS) for tokens, depth in zip(sums, depths, strict=True)]


def _rescaled(chances: Sequence[float], first: float) -> list[float]:
    """Returns a slot's chances, non-increasing, if its top token has the chance `first`."""
    left = 1 - chances[0]
    scale = (1 - first) / left if left else 0.0
    return [*itertools.accumulate((first, *(chance * scale for chance in chances[1:])), min)]


def _confidence(luck: random.Random, chance: float) -> float:
    chance = min(max(chance, _LEAST), 1 - _LEAST)
    return luck.betavariate(CONCENTRATION * chance, CONCENTRATION * (1 - chance))


def _spread_evenly(luck: random.Random, chance: float) -> list[float]:
    """Returns DRAWS values of `_confidence` at evenly spread quantiles, in random order."""
    spread = sorted(_confidence(luck, chance) for _ in range(DRAWS * _FINER))[_FINER // 2 :: _FINER]
    luck.shuffle(spread)
    return spread


@dataclass(slots=True)
class MockedPlanner(FixedPlanner):
    """Plans trees of `num_nodes` drafts for benchmarks with mocked acceptance, where random numbers decide instead of
    the target which drafts are accepted. Trees are built by the acceptance chances in `marginals`, not by the drafter's
    probabilities."""

    marginals: Marginals | None = None
    num_rounds: int = 0
    """Number of rounds planned so far."""

    def _begin(self, num_rows: int) -> None:
        self.num_rounds += 1

    def weigh(self, row: Row, candidates: Candidates) -> Weigh:
        """Returns a function that gives this row's candidates random acceptance chances in this round, as
        `Marginals.drawn` does. The random seed consists of the row's key and the number of rounds planned so far."""
        assert self.marginals is not None
        return self.marginals.drawn(random.Random(f"{row.key} {self.num_rounds}"))


def path_that_stands(parents: Sequence[int], gains: Sequence[float], lucks: Sequence[float]) -> list[int]:
    """Selects by random numbers which path of a draft tree is accepted; returns the indices of its nodes, root to leaf.
    Each node is on the path with the probability `gains[node]`, so sum(gains) nodes are accepted on average.

    `parents`: index of each node's parent, or -1. `gains`: chance that a node and all nodes above it are accepted.
    `lucks`: a random number in [0, 1) for each slot (depth).
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    accepted, gain = list[int](), 1.0
    for luck in lucks:
        left = luck * gain  # luck < gains[child] / gain, the child's chance given its parent
        for child in children.get(accepted[-1] if accepted else -1, ()):
            if left < gains[child]:
                accepted.append(child)
                gain = gains[child]
                break
            left -= gains[child]
        else:
            break
    return accepted
