"""How often a block drafter's candidates stand, by slot and rank, and what trees of n drafts keep by it. No PyTorch.

    tally.add(said_of(candidates, tokens))               # of each round: what the target said beside what was likely
    marginals = Marginals.of(tally)
    marginals.expected(32)[32].tokens                    # tokens a round of the best trees of 32 drafts

A marginal is counted over the rounds in which the likeliest token stood at every slot before: then it is known what the
target says at the slot, whatever was checked, a chain or a tree. Trees differ from round to round, because a drafter is
surer of some slots than of others, and that is where much of what they keep comes from. Here its probability of a
slot's likeliest token is Beta distributed around the marginal, as in `simulate/server/server.py`, and what it leaves
falls to the other ranks in proportion. Candidates are taken to stand behind a sibling as often as behind the likeliest
token; `tests/simulate/test_tree_prediction.py` has how near that comes to what trees kept.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.plan.planner import FixedPlanner
from paceline.plan.trees import NONE_OF_THEM, Candidates, Said, Weigh, grow
from paceline.types import Row

SURENESS = 1.5
"""Sum of both parameters of the Beta distribution of a drafter's probabilities: small when it is sure or knows that it is not.
Of the shipped drafter on 12 GSM8K questions: slots of a mean of 0.80 had a variance of 0.06."""
DRAWS, _FINER = 1000, 4
"""Rounds over which trees are averaged; draws among which the evenly spread ones of a slot are chosen, for each of them."""
_PRIOR = 20.0
"""Tries of a slot for which counts: the chance of the slot before, and the shares that other ranks have over all slots."""
_LEAST = 1e-4
Chances = tuple[tuple[float, ...], ...]
"""By slot and rank: the chance that this candidate stands where the likeliest tokens of all slots before it do."""


@dataclass(slots=True)
class Tally:
    """Counts of many rounds."""

    tried: list[int] = field(default_factory=list)
    """By slot: rounds in which it is known what the target said there, the likeliest tokens before it standing."""
    stood: list[list[int]] = field(default_factory=list)
    """By slot and rank: how many of them said this candidate."""

    def add(self, said: Said) -> None:
        for slot in range(said.num_first):
            self._count(slot, 0)
        if said.rank is not None:
            self._count(said.num_first, said.rank)

    def _count(self, slot: int, rank: int) -> None:
        if slot == len(self.tried):
            self.tried.append(0)
            self.stood.append([])
        self.tried[slot] += 1
        if rank != NONE_OF_THEM:
            own = self.stood[slot]
            own += [0] * (rank + 1 - len(own))
            own[rank] += 1

    @classmethod
    def of(cls, told: Any) -> Tally:
        """From {"tried": [...], "stood": [[...], ...]}. Raises ConfigError for what is none."""
        tried, stood = (told.get("tried"), told.get("stood")) if isinstance(told, dict) else (None, None)
        if (
            not (isinstance(tried, list) and isinstance(stood, list) and tried and len(stood) == len(tried))
            or not all(map(_are_counts, [tried, *stood]))
            or any(sum(own) > count for own, count in zip(stood, tried, strict=True))
        ):
            raise ConfigError(
                'marginals are counts, {"tried": rounds of each slot, "stood": of each slot how many said each rank}: '
                "write them with paceline bench decode --plan tree:32"
            )
        return cls(list(tried), [list(own) for own in stood])

    @property
    def num_rounds(self) -> int:
        return self.tried[0] if self.tried else 0


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


class Expected(NamedTuple):
    """What a round that checks a given number of drafts keeps on average."""

    tokens: float
    """The bonus token included."""
    depth: float
    """Drafts of the longest path."""


@dataclass(frozen=True, slots=True)
class Marginals:
    """Raises ConfigError for chances that are none."""

    chances_KM: Chances
    num_rounds: int = 0
    """Over which they were counted; 0 of those that somebody set."""

    def __post_init__(self) -> None:
        for slot, own in enumerate(self.chances_KM, start=1):
            if not own or not all(0 <= chance <= 1 for chance in own) or sum(own) > 1 + 1e-9:  # also NaN
                raise ConfigError(
                    f"marginals of slot {slot} are chances that sum up to 1 at most, the likeliest first: not {own}"
                )
        if not self.chances_KM:
            raise ConfigError("marginals need a slot at least, as in [[0.7, 0.1], [0.7, 0.1]]")

    @classmethod
    def of(cls, tally: Tally) -> Marginals:
        """Slots that few rounds reached lean on the slot before, and on the shares of ranks over all slots."""
        left = sum(tally.tried) - sum(own[0] for own in tally.stood if own)
        sums = [sum(counts) for counts in itertools.zip_longest(*(own[1:] for own in tally.stood), fillvalue=0)]
        shares = [each / left if left else 0.0 for each in sums]
        before, found = None, list[tuple[float, ...]]()
        for tried, stood in zip(tally.tried, tally.stood, strict=True):
            first = (stood[0] if stood else 0) / tried if before is None and tried else before or 0.0
            prior = [first, *(share * (1 - first) for share in shares)]
            counts = [*stood, *[0] * (len(prior) - len(stood))]
            found.append(tuple((n + _PRIOR * chance) / (tried + _PRIOR) for n, chance in zip(counts, prior, strict=True)))
            before = found[-1][0]
        return cls(tuple(found), tally.num_rounds)

    @property
    def firsts(self) -> list[float]:
        """Chance of each slot's likeliest token: that of a chain's drafts."""
        return [own[0] for own in self.chances_KM]

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of rounds in which the likeliest tokens of the first slots all stand."""
        return tuple(itertools.accumulate(self.firsts, operator.mul))

    def with_firsts(self, firsts: Sequence[float]) -> Marginals:
        """These chances of the likeliest tokens, one for each slot; other ranks share what they leave as they do here."""
        left = sum(1 - first for first in self.firsts)
        ranks = itertools.zip_longest(*(own[1:] for own in self.chances_KM), fillvalue=0.0)
        shares = [sum(each) / left if left else 0.0 for each in ranks]
        return Marginals(tuple((first, *(share * (1 - first) for share in shares)) for first in firsts))

    def first_slots(self, count: int) -> Marginals:
        return Marginals(self.chances_KM[:count], self.num_rounds)

    def drawn(self, luck: random.Random) -> Weigh:
        """Chances of one round, of a drafter that is surer of some slots than of others; none beyond the last slot."""
        return self._weigh([_sure(luck, own[0]) for own in self.chances_KM])

    def _weigh(self, sure_K: Sequence[float]) -> Weigh:
        """`sure_K`: the chance of each slot's likeliest token in this round."""
        rows = [_round_of(own, sure) for own, sure in zip(self.chances_KM, sure_K, strict=True)]
        return lambda slot, logprobs: rows[slot][: len(logprobs)] if slot < len(rows) else [0.0]

    def expected(self, most: int, seed: int = 0) -> list[Expected]:
        """Of rounds with 0, 1, ... `most` drafts: tokens and depth of the best trees, on average over DRAWS rounds."""
        luck, sums, depths = random.Random(seed), [0.0] * (most + 1), [0] * (most + 1)
        sure_KD = [_evenly(luck, own[0]) for own in self.chances_KM]
        named = [list(range(len(own))) for own in self.chances_KM]
        candidates = Candidates(named, [[0.0] * len(own) for own in named], most)
        for sure_K in zip(*sure_KD, strict=True):
            tree = grow(candidates, self._weigh(sure_K), most)
            gains = [*tree.gains, *[0.0] * (most - len(tree.gains))]
            longest = [*itertools.accumulate(tree.depths, max, initial=0)]
            longest += [longest[-1]] * (most + 1 - len(longest))
            sums = [each + gain for each, gain in zip(sums, itertools.accumulate(gains, initial=0.0), strict=True)]
            depths = [each + depth for each, depth in zip(depths, longest, strict=True)]
        return [Expected(1 + tokens / DRAWS, depth / DRAWS) for tokens, depth in zip(sums, depths, strict=True)]


def _round_of(chances: Sequence[float], sure: float) -> list[float]:
    """A slot's chances, falling, where its likeliest token has the chance `sure`."""
    left = 1 - chances[0]
    scale = (1 - sure) / left if left else 0.0
    return [*itertools.accumulate((sure, *(chance * scale for chance in chances[1:])), min)]


def _sure(luck: random.Random, chance: float) -> float:
    chance = min(max(chance, _LEAST), 1 - _LEAST)
    return luck.betavariate(SURENESS * chance, SURENESS * (1 - chance))


def _evenly(luck: random.Random, chance: float) -> list[float]:
    """DRAWS of `_sure` that are spread as evenly as its distribution is, in any order."""
    spread = sorted(_sure(luck, chance) for _ in range(DRAWS * _FINER))[_FINER // 2 :: _FINER]
    luck.shuffle(spread)
    return spread


@dataclass(slots=True)
class MockedPlanner(FixedPlanner):
    """Trees of `num_nodes` drafts by marginals in place of what the drafter says, for a mocked acceptance."""

    marginals: Marginals | None = None

    def weigh(self, row: Row, candidates: Candidates) -> Weigh:
        """Drawn for each row and round, by the request's number and the room that its row has left."""
        assert self.marginals is not None
        return self.marginals.drawn(random.Random(f"{row.key} {candidates.most}"))


def path_that_stands(parents: Sequence[int], gains: Sequence[float], lucks: Sequence[float]) -> list[int]:
    """Nodes of a tree that stand by lot, root to leaf: behind what stands, each child with its own chance, one of them at most.

    `gains` as Tree.gains; `lucks` in [0, 1), one for each slot. On average as many stand as `gains` sum up to.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    kept, gain = list[int](), 1.0
    for luck in lucks:
        left = luck * gain
        for child in children.get(kept[-1] if kept else -1, ()):
            if left < gains[child]:
                kept.append(child)
                gain = gains[child]
                break
            left -= gains[child]
        else:
            break
    return kept
