"""How many tokens a simulated server drafts in a round: none, always the same, the best for the batch, or learned as it goes.

The best maximises goodput: expected tokens of the round over its seconds, `sum of E[tokens | g] / step_s(rows, g)`
(Finn, adaptive-speculation, 2026; `paceline/engine/draft_length.py` is the real server's). A policy sees what a server sees
before the round's tokens are known, and nothing else.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import ConfigError
from paceline.simulate.arrivals import Survival

PRIOR, PRIOR_WEIGHT = 0.75, 4.0
"""Chance that the first draft stands, of which nothing is known, and how many tries it counts for; behind the first place it is
the chance of the place before."""
KEEP, REST_KEEP = 0.98, 0.998
"""What is left of a place's tries after a round that tried it, and after one that did not."""
NAMES = "off, best, adaptive or a number of drafts"

StepSeconds = Callable[[int, int], float]
"""Rows, drafts of each -> seconds of a round."""


def check_survival(survival: Survival) -> None:
    """Raises ConfigError unless it falls from at most 1 to at least 0; a value that is no number does not."""
    if not all(sooner >= later for sooner, later in zip((1.0, *survival), (*survival, 0.0), strict=True)):
        raise ConfigError(f"survival must fall from at most 1 to at least 0, this does not: {list(survival)}")


def num_accepted(survival: Survival, luck: float, num_drafted: int) -> int:
    """Of a round's drafts those that stand; `luck` in [0, 1) decides, and more drafts never make fewer stand."""
    count = 0
    for share in survival[:num_drafted]:
        if luck >= share:
            break
        count += 1
    return count


class Policy(Protocol):
    """Chooses the number of drafts of every row of a round."""

    name: str

    def choose(self, num_rows: int) -> int: ...

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """What became of one row's drafts."""
        ...


@dataclass(slots=True)
class Fixed:
    """Always as many; 0 is plain decoding."""

    num_drafted: int
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or (str(self.num_drafted) if self.num_drafted else "off")

    def choose(self, num_rows: int) -> int:
        return self.num_drafted

    def record(self, num_drafted: int, num_accepted: int) -> None:
        pass


@dataclass(slots=True)
class Best:
    """The best number for the rows that run, the acceptance being known: what a table per batch size can reach."""

    survival: Survival
    step_s: StepSeconds
    most: int
    name: str = "best"
    _known: dict[int, int] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        if num_rows not in self._known:
            expected = list(itertools.accumulate((1.0, *self.survival)))
            self._known[num_rows] = best_length(expected, self.step_s, num_rows, self.most)
        return self._known[num_rows]

    def record(self, num_drafted: int, num_accepted: int) -> None:
        pass


@dataclass(slots=True)
class Adaptive:
    """The best number by a running average of each place's acceptance, after the real server's `--speculate auto`.

    Unlike there, every row drafts as many, a row's own luck is not kept apart, and the costs are known.
    """

    step_s: StepSeconds
    most: int
    name: str = "adaptive"
    _tried: list[float] = field(init=False)
    """Recent tries of each place, older ones counting less."""
    _stood: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._tried, self._stood = [0.0] * self.most, [0.0] * self.most

    def choose(self, num_rows: int) -> int:
        kept = itertools.accumulate((1.0, *self.chances()), operator.mul)
        return best_length(list(itertools.accumulate(kept)), self.step_s, num_rows, self.most)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(self.most):
            if place <= num_accepted and place < num_drafted:
                self._tried[place] = KEEP * self._tried[place] + 1.0
                self._stood[place] = KEEP * self._stood[place] + (place < num_accepted)
            elif place >= num_drafted:
                self._tried[place] *= REST_KEEP
                self._stood[place] *= REST_KEEP

    def chances(self) -> list[float]:
        """That a draft stands, given that those before it do, by place."""
        found, chance = [], PRIOR
        for tried, stood in zip(self._tried, self._stood, strict=True):
            chance = (PRIOR_WEIGHT * chance + stood) / (PRIOR_WEIGHT + tried)
            found.append(chance)
        return found


def best_length(expected: Sequence[float], step_s: StepSeconds, num_rows: int, most: int) -> int:
    """The number of drafts that brings most tokens a second, of which a round makes expected[g]; the smallest of equals."""
    return max(range(most + 1), key=lambda count: (expected[count] / step_s(num_rows, count), -count))


def make_policy(name: str, survival: Survival, step_s: StepSeconds, most: int) -> Policy:
    """A fresh policy, which has seen nothing yet: off, best, adaptive or a number of drafts. Raises ConfigError."""
    if name == "off":
        return Fixed(0)
    if name == "best":
        return Best(survival, step_s, most)
    if name == "adaptive":
        return Adaptive(step_s, most)
    if not (name.isascii() and name.isdecimal()):
        raise ConfigError(f"--policy {name!r} is not known: choose from {NAMES}")
    if int(name) > most:
        raise ConfigError(f"--policy {name} drafts more than the drafter can: at most {most}")
    return Fixed(int(name))
