"""Draws the outcome of a simulated row's drafts: from a survival curve, or, for trees, from marginals."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import takewhile

from paceline.plan.marginals import CONCENTRATION, Marginals
from paceline.plan.trees import NONE_OF_THEM, Candidates, Outcome, Tree

Survival = tuple[float, ...]
"""Survival curve: entry i is the share of rounds whose first i + 1 drafts would all be accepted; 0 beyond the end."""


def num_accepted(survival: Survival, luck: float, num_drafted: int) -> int:
    """Returns how many of a round's `num_drafted` drafts are accepted. `survival`: shares of rounds whose first 1, 2,
    ... drafts are accepted. `luck`: random number in [0, 1); with the same number, more drafts never give fewer
    accepted ones."""
    return sum(luck < share for share in survival[:num_drafted])


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of one batch row in a simulated round, and which of them are accepted if they are verified."""

    num_right: int
    """Number of drafts that would be accepted if all were verified in a chain."""
    confidence: list[float] | None = None
    """Log-probability that the drafter gives its top token at each draft position; None if it reports none."""
    candidates: Candidates | None = None
    """Candidates for a tree at each draft position; each token id is replaced by its rank."""
    ranks: tuple[int, ...] = ()
    """Rank of the target's token among the candidates of each draft position; NONE_OF_THEM if it is not a candidate."""

    def checked(self, width: int | Tree) -> tuple[int, Outcome | None]:
        """Verifies drafts of this row, as a chain or as a tree. `width`: number of drafts in the chain, or the draft
        tree. Returns (number of accepted drafts, outcome). The outcome is the tree with the indices of its accepted
        nodes, or None for a chain."""
        if isinstance(width, int):
            return min(self.num_right, width), None
        children, accepted = width.children(), list[int]()
        for rank in self.ranks:
            child = children.get((accepted[-1] if accepted else -1, rank))
            if child is None:
                break
            accepted.append(child)
        return len(accepted), Outcome(width, accepted)


def drafted(survival: Survival, luck: random.Random, count: int, has_confidence: bool) -> Drafted:
    """Draws how many of the `count` drafts of one row are accepted. `survival`: shares of rounds whose first 1, 2, ...
    drafts are accepted. `luck`: random generator. `has_confidence`: True for a drafter that reports its confidence.

    With confidence, a random acceptance probability is drawn for each draft. The draft is accepted with this
    probability, and the drafter reports its logarithm as confidence. The probabilities are Beta distributed around the
    chances in `survival`, so that rounds follow this curve on average."""
    if not has_confidence or not count:
        return Drafted(num_accepted(survival, luck.random(), count) if count else 0)
    confidence, num_right, is_right, before = list[float](), 0, True, 1.0
    for share in survival[:count]:
        chance = min(max(share / before if before else 0.0, 1e-4), 1 - 1e-4)
        probability = min(max(luck.betavariate(CONCENTRATION * chance, CONCENTRATION * (1 - chance)), 1e-6), 1 - 1e-6)
        is_right = luck.random() < probability and is_right
        num_right += is_right
        confidence.append(math.log(probability))
        before = share
    return Drafted(num_right, confidence)


def drafted_candidates(marginals: Marginals, luck: random.Random, count: int, num_candidates: int) -> Drafted:
    """Draws `num_candidates` candidates for each of `count` draft positions of one row (at most the positions in
    `marginals`), for a draft tree. Also draws which of them the target generates. `luck`: random generator.

    Each candidate gets a probability, and is the target's token with this probability. The probabilities vary randomly
    around the measured chances in `marginals` (by position and candidate rank)."""
    weigh, named = marginals.drawn(luck), range(num_candidates)
    count = min(count, len(marginals.chances_KM))
    chances_KM = [weigh(slot, [0.0] * num_candidates) for slot in range(count)]
    ranks = tuple(_rank(chances, luck.random()) for chances in chances_KM)
    logprobs_KM = [[math.log(max(chance, 1e-9)) for chance in chances] for chances in chances_KM]
    candidates = Candidates([list(named[: len(chances)]) for chances in chances_KM], logprobs_KM)
    confidence = [logprobs[0] for logprobs in logprobs_KM]
    return Drafted(sum(1 for _ in takewhile(lambda rank: rank == 0, ranks)), confidence, candidates, ranks)


def _rank(chances: list[float], luck: float) -> int:
    for rank, chance in enumerate(chances):
        luck -= chance
        if luck < 0:
            return rank
    return NONE_OF_THEM
