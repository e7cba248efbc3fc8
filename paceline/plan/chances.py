"""Chances that drafts are accepted, by source, place and confidence, as a planner (`planner.py`) learns them.

No PyTorch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.trees import Outcome

PRIORS = {"greedy": 0.75, "sampled": 0.5, "seeded": 0.5, "lossy": 0.75, "lossy sampled": 0.5}
"""Chance that the first draft of a row of each kind stands, of which nothing is known."""
_PRIOR_WEIGHT = 4.0
"""Tries that the prior of a place counts for; behind the first place the prior is the chance of the place before."""
_KEEP = 0.98
"""Share of a place's tries that is kept after each round: the latest 50 count."""
_SURE_EDGES = tuple(math.log(share) for share in (0.05, 0.12, 0.22, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.985))
"""Bounds of the classes of how sure a drafter is: log-probability of its best token."""
_SIBLING_WEIGHT = 4.0  # of what a drafter itself says of tokens that are not its likeliest, in tokens
_WATCH_KEEP, _SURPRISE, _DOUBT = 0.9, 4.0, 0.2
"""The latest 10 rounds are watched; when they are _SURPRISE standard deviations off, _DOUBT of older tries is kept."""
_CLASS_WEIGHT, _CELL_WEIGHT, _SURE_KEEP = 4.0, 12.0, 0.995
"""Weights of a place's average in a class of confidence, and of the class at one place; share of old tries kept."""


@dataclass(slots=True)
class Ratio:
    """Ratio of two sums, older parts counting less: drafts accepted over drafts tried, tokens over seconds."""

    over: float = 0.0
    under: float = 0.0

    def add(self, over: float, under: float, keep: float) -> None:
        self.over, self.under = keep * self.over + over, keep * self.under + under

    def near(self, prior: float, weight: float) -> float:
        """Returns the ratio as if `prior` had been seen before, with this weight."""
        return (weight * prior + self.over) / (weight + self.under)


class Chances:
    """Chances that the drafts of one source stand, each given that those before it do."""

    def __init__(self, num_places: int, prior: float) -> None:
        self._prior = prior
        self._tallies = [Ratio() for _ in range(num_places)]
        self.places = [prior] * num_places
        """By place in the draft, whatever the drafter thought of it."""
        self._classes: dict[int, Ratio] = {}
        self._cells: dict[tuple[int, int], Ratio] = {}
        self._sibling_truth, self._siblings = Ratio(), 1.0  # those that stood over those expected to
        self._off = self._variance = 0.0
        """Drafts that stood in recent rounds beyond those that were expected to, and the variance of that."""

    def reach(self, num_places: int) -> None:
        """Add places up to this number; until something is known of them they are as good as the last one before."""
        more = num_places - len(self.places)
        self._tallies += [Ratio() for _ in range(more)]
        self.places += self.places[-1:] * more

    def of(self, sure: Sequence[float]) -> list[float]:
        """By place, given the log-probability of the drafter's best token at each."""
        return [self._chance(place, bisect_left(_SURE_EDGES, each)) for place, each in enumerate(sure)]

    def _chance(self, place: int, kind: int) -> float:
        of_class = self._classes.get(kind)
        chance = of_class.near(self.places[place], _CLASS_WEIGHT) if of_class else self.places[place]
        cell = self._cells.get((place, kind))
        return cell.near(chance, _CELL_WEIGHT) if cell else chance

    def of_candidates(self, place: int, logprobs: Sequence[float]) -> list[float]:
        """By rank, given the log-probabilities of a drafter's likeliest tokens at a place; they do not rise."""
        chances = [self._chance(place, bisect_left(_SURE_EDGES, logprobs[0]))]
        left = 1.0 - chances[0]
        for logprob in logprobs[1:]:
            chances.append(max(min(math.exp(logprob) * self._siblings, chances[-1], left), 0.0))
            left -= chances[-1]
        return chances

    def record_tree(self, outcome: Outcome, sure: Sequence[float] | None) -> None:
        """Counts one row's tree of a round, as `record` does a chain."""
        self.record(len(outcome.tree.spine), outcome.spine_kept, sure)
        siblings = outcome.siblings()
        expected = sum(math.exp(logprob) for logprob, _ in siblings)
        self._sibling_truth.add(sum(stood for _, stood in siblings), expected, _SURE_KEEP)
        self._siblings = self._sibling_truth.near(1.0, _SIBLING_WEIGHT)

    def record(self, num_checked: int, num_kept: int, sure: Sequence[float] | None = None) -> None:
        """One row's drafts of a round: the first `num_checked` were checked, the first `num_kept` stood.

        A slot that was drafted but not checked counts as what its sureness promised: what is checked is what was
        likely to stand, and would make the place look better than it is.
        """
        chances = self.of(sure[: len(self.places)]) if sure is not None else []
        self._watch((chances or self.places)[:num_checked], num_kept)
        reached = min(num_kept + 1, num_checked, len(self.places))
        for tally in self._tallies[reached:]:
            tally.add(0.0, 0.0, _KEEP)  # a place that is no longer reached becomes as good as the one before it
        for place in range(reached):
            stood = float(place < num_kept)
            self._tallies[place].add(stood, 1.0, _KEEP)
            if place < len(chances) and sure is not None:
                kind = bisect_left(_SURE_EDGES, sure[place])
                self._classes.setdefault(kind, Ratio()).add(stood, 1.0, _SURE_KEEP)
                self._cells.setdefault((place, kind), Ratio()).add(stood, 1.0, _SURE_KEEP)
        if num_kept == num_checked:
            for place in range(num_checked, len(chances)):
                self._tallies[place].add(chances[place], 1.0, 1.0)
        chance = self._prior
        for place, tally in enumerate(self._tallies):
            chance = self.places[place] = tally.near(chance, _PRIOR_WEIGHT)

    def _watch(self, chances: Sequence[float], num_kept: int) -> None:
        """Forget faster when rounds come out as they hardly could: another text, or another drafter's weights."""
        gain, expected, squares = 1.0, 0.0, 0.0
        for place, chance in enumerate(chances):
            gain *= chance
            expected += gain
            squares += (2 * place + 1) * gain
        self._off = _WATCH_KEEP * self._off + num_kept - expected
        self._variance = _WATCH_KEEP**2 * self._variance + squares - expected**2
        if abs(self._off) > _SURPRISE * math.sqrt(self._variance + 1.0):
            for tally in (*self._tallies, *self._classes.values(), *self._cells.values()):
                tally.add(0.0, 0.0, _DOUBT)
            self._off = self._variance = 0.0


@dataclass(slots=True)
class Truth(Ratio):
    """Calibration of the chances that a source states itself: drafts accepted over drafts expected to be."""

    over: float = 4.0
    under: float = 4.0

    def right(self, chances: tuple[float, ...]) -> tuple[float, ...]:
        factor = self.near(1.0, 4.0)
        return tuple(min(chance * factor, 0.99) for chance in chances)
