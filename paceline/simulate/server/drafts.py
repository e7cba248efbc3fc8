"""What becomes of a simulated row's drafts in a round: drawn from a survival curve, or, for trees, from marginals."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import takewhile

from paceline.plan.marginals import SURENESS, Marginals
from paceline.plan.trees import NONE_OF_THEM, Candidates, Outcome, Tree

Survival = tuple[float, ...]
"""survival[i]: share of rounds whose first i + 1 drafts would all stand; one for each draft that may be made, 0 beyond."""


def num_accepted(survival: Survival, luck: float, num_drafted: int) -> int:
    """Of a round's drafts those that stand; `luck` in [0, 1) decides, and more drafts never make fewer stand."""
    return sum(luck < share for share in survival[:num_drafted])


@dataclass(frozen=True, slots=True)
class Drafted:
    """One row's drafts of a round."""

    num_right: int
    """How many would stand if all were checked."""
    sure: list[float] | None = None
    """As DraftBlock.sure_B: the log-probability of the drafter's best token at each slot."""
    candidates: Candidates | None = None
    """What a tree may be made of; tokens are ranks."""
    ranks: tuple[int, ...] = ()
    """Which candidate of each slot is the target's token, NONE_OF_THEM where none is."""

    def checked(self, width: int | Tree) -> tuple[int, Outcome | None]:
        """How many drafts stand if the first `width`, or a tree, are checked; and what became of the tree."""
        if isinstance(width, int):
            return min(self.num_right, width), None
        children, kept = width.children(), list[int]()
        for rank in self.ranks:
            child = children.get((kept[-1] if kept else -1, rank))
            if child is None:
                break
            kept.append(child)
        return len(kept), Outcome(width, kept)


def drafted(survival: Survival, luck: random.Random, count: int, says_sure: bool) -> Drafted:
    """A draw of so many drafts. A drafter that says how sure it is of a slot is right as often as it says, and the survival
    curve is what its rounds come to: its probabilities are Beta distributed around the curve's chances."""
    if not says_sure or not count:
        return Drafted(num_accepted(survival, luck.random(), count) if count else 0)
    sure, num_right, is_right, before = [], 0, True, 1.0
    for share in survival[:count]:
        chance = min(max(share / before if before else 0.0, 1e-4), 1 - 1e-4)
        probability = min(max(luck.betavariate(SURENESS * chance, SURENESS * (1 - chance)), 1e-6), 1 - 1e-6)
        is_right = luck.random() < probability and is_right
        num_right += is_right
        sure.append(math.log(probability))
        before = share
    return Drafted(num_right, sure)


def drafted_candidates(marginals: Marginals, luck: random.Random, count: int, num_candidates: int) -> Drafted:
    """A draw of so many slots with their likeliest tokens. A drafter is right as often as it says, whatever stands before."""
    weigh, named = marginals.drawn(luck), range(num_candidates)
    count = min(count, len(marginals.chances_KM))
    chances_KM = [weigh(slot, [0.0] * num_candidates) for slot in range(count)]
    ranks = tuple(_rank(chances, luck.random()) for chances in chances_KM)
    logprobs_KM = [[math.log(max(chance, 1e-9)) for chance in chances] for chances in chances_KM]
    candidates = Candidates([list(named[: len(chances)]) for chances in chances_KM], logprobs_KM)
    sure = [logprobs[0] for logprobs in logprobs_KM]
    return Drafted(sum(1 for _ in takewhile(lambda rank: rank == 0, ranks)), sure, candidates, ranks)


def _rank(chances: list[float], luck: float) -> int:
    for rank, chance in enumerate(chances):
        luck -= chance
        if luck < 0:
            return rank
    return NONE_OF_THEM
