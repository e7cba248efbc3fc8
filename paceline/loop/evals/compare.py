"""Paired comparison of two runs of one suite: difference, interval and significance.

    comparison = compare(before, after)        # after minus before
    comparison.difference, comparison.interval, comparison.chance, comparison.verdict

The interval is the 95% percentile bootstrap of the paired difference over cases (Efron and Tibshirani 1993, chapter
13; see `scores.resampled`). `chance` is the two-sided p-value of a permutation test that flips the sign of each case's
difference. For scores of 0 and 1 this is McNemar's exact test. A difference counts if `chance` is below 0.01: at 0.05 a
gate that runs twenty times would give one false alarm on average.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

from paceline.bounds import Share, check
from paceline.errors import ConfigError, refuse
from paceline.loop.evals.scores import Scores, parts_of, resampled

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["better", "worse", "no difference seen"]
LEVEL, POWER = 0.01, 0.9
"""Significance level, and probability with which a difference should be detected."""
DRAWS = 9_999
EXACT = 14
"""Up to this many cases with different scores, all sign flips are enumerated instead of sampled."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`: how the scores of the run `after` differ from those of the run `before` on the same suite.
    The fields `before` and `after` name the models or endpoints that answered."""

    before: str
    after: str
    suite: str
    cases: int
    score_before: float
    score_after: float
    difference: float
    interval: tuple[float, float]
    """95% interval of the difference; (-1, 1) for a single case."""
    chance: float
    """Two-sided p-value of the difference."""
    gained: int
    """Number of cases with a higher score in the run `after`."""
    lost: int
    """Number of cases with a lower score in the run `after`."""
    same_text: int
    """Number of cases with identical answer texts in both runs."""
    verdict: Verdict
    times_p50: float | None
    """Median seconds per answer of `after`, divided by those of `before`: below 1 is faster."""
    price_ratio: float | None
    """Price of 1,000 answers of `after`, divided by that of `before`; None if one of the two is unknown or 0."""
    smallest: float
    """Smallest difference of scores that the test detects with probability 0.9, given how much the cases vary."""

    def as_line(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """The difference with its 95% interval, as "+0.010 [-0.005, +0.025]"."""
        return f"{self.difference:+.3f} [{self.interval[0]:+.3f}, {self.interval[1]:+.3f}]"

    def loss_above(self, margin: float) -> str:
        """Checks that the score did not fall by more than `margin`. Returns "" if this is certain: the 95% interval of
        the score difference begins at -`margin` or above. Otherwise returns the reason why the gate fails."""
        if self.interval[0] >= -margin:
            return ""
        text = f"a loss of more than {margin:g} compared with {self.before} is not ruled out: {self}"
        return f"{text}; more cases narrow this"


def compare(before: Scores, after: Scores) -> Comparison:
    """Compares two runs of one suite by a permutation test on the score differences of single cases.

    The verdict is "better" or "worse" if the p-value is below 0.01 (LEVEL), else "no difference seen". Raises
    ConfigError when the runs are of different suites.
    """
    import numpy as np

    ids = [case.id for case in before.cases]
    if before.digest != after.digest or ids != [case.id for case in after.cases]:
        raise ConfigError(
            f"{before.name} and {after.name} answered different suites ({before.suite} {before.digest}, {after.suite} "
            f"{after.digest}): run both on the same one"
        )
    one, two = (np.array([case.score for case in each.cases]) for each in (before, after))
    gains = two - one
    difference, chance = float(gains.mean()), sign_flips(gains)
    verdict: Verdict = "no difference seen" if chance >= LEVEL else "better" if difference > 0 else "worse"
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
        interval=resampled(gains, -1.0) if len(gains) > 1 else (-1.0, 1.0),
        chance=chance,
        gained=int((gains > 0).sum()),
        lost=int((gains < 0).sum()),
        same_text=sum(x.texts == y.texts for x, y in zip(before.cases, after.cases, strict=True)),
        verdict=verdict,
        times_p50=seconds[1] / seconds[0] if seconds[0] and seconds[1] else None,
        price_ratio=prices[1] / prices[0] if prices[0] and prices[1] else None,
        smallest=findable(len(gains), float(gains.std(ddof=1)) if len(gains) > 1 else math.nan),
    )


def sign_flips(gains: np.ndarray, seed: int = 0, draws: int = DRAWS) -> float:
    """Returns the two-sided p-value of a permutation test of `gains`, one score difference per case; 1.0 if all are 0.

    Compares the sum of the differences with the sums under random signs. `draws`: how often all signs are drawn. If at
    most 14 (EXACT) differences are not 0, every combination of signs is used once instead.
    """
    import numpy as np

    moved = np.abs(gains[gains != 0])
    if not len(moved):
        return 1.0
    observed = abs(float(gains.sum())) - 1e-9
    if len(moved) <= EXACT:
        flips = (np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved))) & 1
        return float((np.abs((2 * flips - 1) @ moved) >= observed).mean())
    values, counts = np.unique(moved, return_counts=True)
    generator, hits = np.random.default_rng(seed), 0
    for number in parts_of(draws):
        heads = generator.binomial(counts, 0.5, (number, len(values)))  # positive signs among the cases of each value
        hits += int((np.abs((2 * heads - counts) @ values) >= observed).sum())
    return (hits + 1) / (draws + 1)


def findable(num_cases: int, deviation: float) -> float:
    """Returns the smallest difference of mean scores that a paired test detects with probability 0.9 (POWER).

    `deviation`: standard deviation s of the score differences of single cases. Normal approximation: (z_(1-LEVEL/2) +
    z_POWER) * s / sqrt(num_cases).
    """
    return (NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)) * deviation / math.sqrt(num_cases)


def cases_needed(loss: float, deviation: float) -> int:
    """Returns the number of cases that a paired test needs to detect a difference of mean scores of `loss` with
    probability 0.9 (POWER).

    `deviation`: standard deviation of the score differences of single cases.
    """
    return math.ceil((findable(1, deviation) / loss) ** 2)


@dataclass(frozen=True, slots=True)
class Gate:
    """Conditions that the scores of an eval must meet; by default, any scores pass. The fields are options of `paceline
    evals run` and `paceline evals compare`, which exit with status 3 if a condition is not met."""

    fail_below: Share | None = None
    """Minimum score."""
    surely: bool = False
    """Compare the low end of the score's 95% interval with the minimum, instead of the score. A single case gives no
    interval and is rejected."""
    no_worse_than: Path | None = None
    """Run folder of evals to compare with, case by case."""
    margin: Share | None = None
    """Maximum accepted loss against the other run, by the low end of the difference's 95% interval [default: only a
    significant loss fails]."""
    same_text: bool = False
    """Every answer must be identical to the other run's, as a lossless drafter guarantees."""

    def __post_init__(self) -> None:
        check(self)
        is_bare = self.surely and self.fail_below is None
        refuse(ConfigError, (is_bare, "--surely needs --fail-below: give a minimum score"))

    def refusals(self, scores: Scores, comparison: Comparison | None = None) -> list[str]:
        """Returns the reasons why the scores fail the gate; empty if they pass.

        `comparison`: result of comparing these scores with those of another run. Without it, only the minimum score is
        checked.
        """
        reasons = []
        if self.fail_below is not None:
            value = scores.interval[0] if self.surely else scores.mean
            word = "the low end of the score's interval" if self.surely else "the score"
            if value is None:
                reasons.append(f"{word} is unknown with a single case: add cases, or leave --surely out")
            elif value < self.fail_below:
                reasons.append(f"{word}, {value:.3f}, is below {self.fail_below:g}")
        if comparison is None:
            return reasons
        one, other, num_cases = comparison.after, comparison.before, comparison.cases
        if comparison.verdict == "worse":
            reasons.append(
                f"{one} is worse than {other}: {comparison.difference:+.3f}, by chance {comparison.chance:.2g}"
            )
        if self.margin is not None and (loss := comparison.loss_above(self.margin)):
            reasons.append(loss)
        if self.same_text and comparison.same_text < num_cases:
            reasons.append(f"{num_cases - comparison.same_text} of {num_cases} answers differ from those of {other}")
        return reasons
