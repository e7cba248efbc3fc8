"""Who decides what a simulated server drafts: the engine's own planners (`paceline/plan.py`), or the best that can be known.

off, a number of drafts and adaptive are `serve --speculate`'s off, N and auto. best knows acceptance and costs and takes the
number with the highest goodput for the rows that run, `sum of E[tokens | g] / step_s(rows, g)` (Finn, adaptive-speculation,
2026): what a table per batch size can reach.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.learned import PassCosts
from paceline.plan import AdaptivePlanner, FixedPlanner, Offer, Planner
from paceline.simulate.arrivals import Survival
from paceline.simulate.costs import StepCosts
from paceline.types import RowKind

NAMES = "off, best, adaptive or a number of drafts"

StepSeconds = Callable[[int, int], float]
"""Rows, drafts of each -> seconds of a round."""


def num_accepted(survival: Survival, luck: float, num_drafted: int) -> int:
    """Of a round's drafts those that stand; `luck` in [0, 1) decides, and more drafts never make fewer stand."""
    return sum(luck < share for share in survival[:num_drafted])


SOURCE = "drafter"
"""Whose drafts a simulated row checks."""
SURENESS = 1.5
"""Sum of both parameters of the Beta distribution of a drafter's probabilities: small when it is sure or knows that it is not.
Of the shipped drafter on 12 GSM8K questions: slots of a mean of 0.80 had a variance of 0.06."""
MEASURED = tuple(1 << power for power in range(11))
"""Positions of the passes whose time an adaptive planner is told, as an engine measures them at its start."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """One row's drafts of a round."""

    num_right: int
    """How many would stand if all were checked."""
    sure: list[float] | None = None
    """As DraftBlock.sure_B: the log-probability of the drafter's best token at each slot."""


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


@dataclass(slots=True)
class BestPlanner(FixedPlanner):
    """As many drafts for every row as bring the most tokens a second, acceptance and costs being known."""

    survival: Survival = ()
    step_s: StepSeconds = field(default=lambda rows, count: 1.0)
    _known: dict[int, int] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Drafts of each row in a round of so many rows; the smallest of equally good numbers."""
        if num_rows not in self._known:
            expected = list(itertools.accumulate((1.0, *self.survival)))
            gains = [tokens / self.step_s(num_rows, count) for count, tokens in enumerate(expected)]
            self._known[num_rows] = gains.index(max(gains))
        return self._known[num_rows]

    def _begin(self, num_rows: int) -> None:
        self.num_drafted = self.choose(num_rows)


class OffPlanner(AdaptivePlanner):
    """No drafts; chunks as the engine's planner has them."""

    def offer(self, source: str, kind: RowKind, most: int) -> Offer:
        return Offer(source, ())


def make_planner(
    name: str, survival: Survival, costs: StepCosts, context: float, most_chunk: int, *, adapts_chunks: bool = False
) -> Planner:
    """A fresh planner, which has seen nothing yet, for off, best, adaptive or a number of drafts. Raises ConfigError.

    `context`: tokens of a row on average, at which costs are told. `adapts_chunks`: as the engine's planner, where it is one.
    """
    if name == "off":
        return OffPlanner(PassCosts([(1, 1.0)]), most_chunk=most_chunk, adapts_chunks=adapts_chunks)
    passes = PassCosts([(size, costs.verify_s(1, size, context) + costs.host_s) for size in MEASURED])
    if name == "adaptive":
        return AdaptivePlanner(passes, most_chunk=most_chunk, adapts_chunks=adapts_chunks)
    if name == "best":
        return BestPlanner(0, most_chunk, survival=survival, step_s=lambda rows, count: costs.round_s(rows, count, context))
    if not (name.isascii() and name.isdecimal()):
        raise ConfigError(f"--policy {name!r} is not known: choose from {NAMES}")
    if int(name) > len(survival):
        raise ConfigError(f"--policy {name} drafts more than the drafter can: at most {len(survival)}")
    return FixedPlanner(int(name), most_chunk)
