"""Two runs of one suite beside each other, case by case: how far apart they are, and whether chance alone could do that.

    found = compare(before, after)        # after minus before
    found.difference, found.interval, found.chance, found.verdict

The interval is the 95% percentile bootstrap of the paired difference over cases (Efron and Tibshirani 1993, chapter 13).
`chance` is the two-sided probability of a difference as large if both were the same: a permutation test that flips the sign of
each case's difference (Fisher; for right-or-wrong scores it is McNemar's exact test). Verdicts use `chance` below `level`,
0.01: a gate that is asked twenty times must not cry once on average, as it would at 0.05.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import ConfigError, refuse
from paceline.loop.evals.config import GateConfig
from paceline.loop.evals.scores import Scores, parts_of, resampled

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["better", "worse", "no difference seen"]
LEVEL = 0.01
DRAWS = 9_999
EXACT = 14
"""Up to so many cases that differ, all ways of flipping signs are counted, not drawn."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`after` minus `before`, over the cases that both answered."""

    before: str
    after: str
    suite: str
    cases: int
    score_before: float
    score_after: float
    difference: float
    interval: tuple[float, float]
    """95%; of a single case everything."""
    chance: float
    """Of a difference at least as large if the two were the same."""
    gained: int
    """Cases that score higher after, and lower."""
    lost: int
    same_text: int
    """Cases whose answers are the same, letter by letter."""
    verdict: Verdict
    times_p50: float | None
    """Median seconds of an answer after over before: below 1 is faster."""
    price_ratio: float | None
    smallest: float
    """A difference of this size would be found nine times in ten, as far apart as cases lie here."""

    def as_line(self) -> dict[str, Any]:
        return asdict(self)


def compare(before: Scores, after: Scores, level: float = LEVEL, seed: int = 0) -> Comparison:
    """Raises ConfigError when they are of different suites."""
    import numpy as np

    ids = [case.id for case in before.cases]
    refuse(
        ConfigError,
        (
            before.digest != after.digest or ids != [case.id for case in after.cases],
            f"{before.name} and {after.name} answered different suites ({before.suite} {before.digest}, {after.suite} "
            f"{after.digest}): run both on the same one",
        ),
        (not 0 < level < 1, f"level must be above 0 and below 1, not {level}"),
    )
    one, two = (np.array([case.score for case in each.cases]) for each in (before, after))
    gains = two - one
    difference, chance = float(gains.mean()), sign_flips(gains, seed)
    verdict: Verdict = "no difference seen" if chance >= level else "better" if difference > 0 else "worse"
    seconds = [each.latency.p50 for each in (before, after)]
    prices = [each.price_per_1000 for each in (before, after)]
    return Comparison(
        before=before.name,
        after=after.name,
        suite=before.suite,
        cases=len(gains),
        score_before=float(one.mean()),
        score_after=float(two.mean()),
        difference=difference,
        interval=resampled(gains, seed) if len(gains) > 1 else (-1.0, 1.0),
        chance=chance,
        gained=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        same_text=sum(x.texts == y.texts for x, y in zip(before.cases, after.cases, strict=True)),
        verdict=verdict,
        times_p50=seconds[1] / seconds[0] if seconds[0] and seconds[1] else None,
        price_ratio=prices[1] / prices[0] if prices[0] and prices[1] else None,
        smallest=findable(len(gains), float(gains.std(ddof=1)) if len(gains) > 1 else math.nan, level),
    )


def sign_flips(gains: np.ndarray, seed: int = 0, draws: int = DRAWS) -> float:
    """Two-sided probability of a sum as far from 0 when each case's sign is a coin's. 1.0 where no case differs."""
    import numpy as np

    moved = np.abs(gains[gains != 0])
    if not len(moved):
        return 1.0
    seen = abs(float(gains.sum())) - 1e-9
    if len(moved) <= EXACT:
        ways = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        return float((np.abs((2 * ways - 1) @ moved) >= seen).mean())
    values, counts = np.unique(moved, return_counts=True)
    generator, hits = np.random.default_rng(seed), 0
    for number in parts_of(draws):
        heads = generator.binomial(counts, 0.5, (number, len(values)))  # of the cases of each value
        hits += int((np.abs((2 * heads - counts) @ values) >= seen).sum())
    return (hits + 1) / (draws + 1)


def findable(num_cases: int, deviation: float, level: float = LEVEL, power: float = 0.9) -> float:
    """The difference that a paired test of `level` finds with probability `power`: (z_(1-level/2) + z_power) * s / sqrt(n), the
    normal approximation of the paired test."""
    return (NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(power)) * deviation / math.sqrt(num_cases)


def cases_needed(loss: float, deviation: float, level: float = LEVEL, power: float = 0.9) -> int:
    """How many cases find a difference of `loss`, when paired differences of a case have this standard deviation."""
    return math.ceil((findable(1, deviation, level, power) / loss) ** 2)


class Gate(GateConfig):
    """What scores must hold for a new model to pass; its fields are those of `config.GateConfig`."""

    __slots__ = ()

    def refusals(self, scores: Scores, found: Comparison | None = None) -> list[str]:
        """Why it does not pass; empty when it does."""
        reasons = []
        if self.fail_below is not None:
            low = scores.interval[0]
            value = low if self.surely and low is not None else scores.mean
            word = "the low end of the score's interval" if self.surely else "the score"
            if value < self.fail_below:
                reasons.append(f"{word}, {value:.3f}, is below {self.fail_below:g}")
        if found is not None and found.verdict == "worse":
            reasons.append(f"{found.after} is worse than {found.before}: {found.difference:+.3f}, by chance {found.chance:.2g}")
        if found is not None and self.margin is not None and found.interval[0] < -self.margin:
            reasons.append(
                f"a loss of more than {self.margin:g} beside {found.before} is not ruled out: {found.difference:+.3f} "
                f"[{found.interval[0]:+.3f}, {found.interval[1]:+.3f}]"
            )
        if self.same_text and found is not None and found.same_text < found.cases:
            reasons.append(f"{found.cases - found.same_text} of {found.cases} answers differ from those of {found.before}")
        return reasons
