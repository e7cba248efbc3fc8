"""Predicts the acceptance length that a training brings, with an interval, from the user's own run or published
trainings.

    published(3_000)                                # from the trainings of advice.json
    own_run(Path("runs/mine"), "Qwen3-8B").at(3_000)  # from a training of this target, measured on its own prompts

Published: least squares of log(acceptance length - 1) on log(answers) over the trainings in `advice.json`, with an
intercept for each kind of traffic, and the prediction interval of a new workload; each workload counts once. Own run:
its measured acceptance length, and for other numbers of answers the growth that published workloads had.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.simulate.costs.catalogue import served_name
from paceline.simulate.files import read_json
from paceline.train.run_file import TRAINED

log = logging.getLogger("paceline.train")
LEVEL = 0.9
"""Coverage of all intervals: nine of ten new workloads lie inside."""
KINDS = ("mixed", "application")
"""Kinds of traffic."""
RUNS = Path("runs")
"""Folder in which `paceline train` writes its runs by default."""
TIMES_MORE = 2.0
"""Growth is measured on workloads with trainings that differ at least by this factor in their answers."""


@dataclass(frozen=True, slots=True)
class Training:
    """One published training of a drafter: its target, the number of answers it learned from, and the acceptance length
    that it reached."""

    workload: str
    """Name of the prompts' data set or application."""
    traffic: str
    """Type of the workload: "mixed", or "application" (requests of one application, with its own prompt or schema)."""
    target: str
    answers: int
    """Different prompts learned from."""
    tokens_per_round: float
    """Acceptance length on prompts that it had not seen."""
    source: str

    @property
    def gain(self) -> float:
        """Natural logarithm of the mean number of accepted drafts per round, which is the acceptance length - 1.
        Predictions are fitted to it."""
        return math.log(self.tokens_per_round - 1.0)


@dataclass(frozen=True, slots=True)
class Expected:
    """An expected acceptance length in tokens per round, with the ends of its 90% interval (`LEVEL`)."""

    tokens_per_round: float
    low: float
    high: float
    is_beyond: bool = False
    """True if no training with as many answers was measured."""

    def at_most(self, most: float) -> Expected:
        """Returns a copy in which no value exceeds `most` tokens per round, for example the drafter's block size."""
        return Expected(min(self.tokens_per_round, most), min(self.low, most), min(self.high, most), self.is_beyond)


def _read() -> tuple[tuple[Training, ...], float]:
    """Returns the published trainings, and the standard deviation of log(later gain / gain on held-out prompts)."""
    content = json.loads(Path(__file__).with_name("advice.json").read_text(encoding="utf-8"))
    moved = [math.log((row["later"] - 1) / (row["heldout"] - 1)) for row in content["heldout"]]
    return tuple(Training(**row) for row in content["trainings"]), math.sqrt(statistics.fmean(x * x for x in moved))


TRAININGS, HELDOUT_DEVIATION = _read()


def published(answers: float, traffic: str | None = None) -> Expected:
    """Predicts the acceptance length of a drafter trained on this many answers, from published trainings. `traffic`:
    type of the workload, "mixed" or "application" (requests of one application); None if unknown. For an unknown type,
    the expected number of accepted drafts is the geometric mean over both types, and the interval includes both."""
    kinds = (traffic,) if traffic else KINDS
    level = 1 - (1 - LEVEL) * len(kinds)  # of a mixture, hardly more than one kind lies beyond each end
    each = [_of_kind(answers, kind, level) for kind in kinds]
    gain = math.prod(one.tokens_per_round - 1.0 for one in each) ** (1 / len(each))
    low, high = min(one.low for one in each), max(one.high for one in each)
    return Expected(1.0 + gain, low, high, all(one.is_beyond for one in each))


def _of_kind(answers: float, traffic: str, level: float) -> Expected:
    rows, others = ([row for row in TRAININGS if (row.traffic == traffic) == is_own] for is_own in (True, False))
    fewest, most = min(row.answers for row in rows), max(row.answers for row in rows)
    middle, half = _predicted([_Group.of(rows), _Group.of(others)], math.log(min(max(answers, fewest), most)), level)
    share = min(answers / fewest, 1.0)  # fewer were not measured: in proportion
    low, center = (1.0 + share * math.exp(value) for value in (middle - half, middle))
    return Expected(center, low, 1.0 + math.exp(middle + half), answers > most)


def _predicted(groups: Sequence[_Group], at: float, level: float) -> tuple[float, float]:
    """Returns the prediction for the first group at log(answers) = `at`, and half the width of its interval. Groups
    have their own intercepts, but a common slope and variance."""
    slope = max(sum(one.covariance for one in groups) / sum(one.spread for one in groups), 0.0)
    freedom = sum(one.num_workloads for one in groups) - 1 - len(groups)
    variance = sum(one.errors(slope) for one in groups) / freedom
    away, spread = at - groups[0].x, sum(one.spread for one in groups)
    deviation = math.sqrt(variance * (1 + 1 / groups[0].num_workloads + away**2 / spread))
    return groups[0].y + slope * away, student(freedom, level) * deviation


@dataclass(frozen=True, slots=True)
class _Group:
    """Weighted sums over trainings of one kind: x is log(answers), y the logarithm of the accepted drafts."""

    num_workloads: int
    x: float
    y: float
    spread: float
    covariance: float
    variance: float

    @classmethod
    def of(cls, rows: Sequence[Training]) -> _Group:
        """Trainings of one workload are not independent: together they have the weight 1."""
        times = Counter(map(_workload, rows))
        weights = [1 / times[_workload(row)] for row in rows]
        xs, ys = [math.log(row.answers) for row in rows], [row.gain for row in rows]
        x, y = statistics.fmean(xs, weights), statistics.fmean(ys, weights)
        products = [
            (w * (a - x) ** 2, w * (a - x) * (b - y), w * (b - y) ** 2) for w, a, b in zip(weights, xs, ys, strict=True)
        ]
        return cls(len(times), x, y, *map(sum, zip(*products, strict=True)))

    def errors(self, slope: float) -> float:
        """Returns the sum of squared residuals."""
        return self.variance - 2 * slope * self.covariance + slope**2 * self.spread


def student(freedom: int, level: float = LEVEL) -> float:
    """Returns the value t for which Student's t distribution with `freedom` degrees of freedom lies between -t and t
    with probability `level` (by Hill's expansion; 1% off at 3 degrees of freedom)."""
    z = statistics.NormalDist().inv_cdf(0.5 + level / 2)
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / max(freedom, 1) ** power for power, term in enumerate(terms, start=1))


def growth() -> tuple[float, float, float]:
    """Returns how strongly more answers increase acceptance: the (least, median, largest) exponent of the workloads in
    published trainings. With exponent e, accepted drafts per round grow as (number of answers) ** e. Workloads without
    clearly different numbers of answers are left out."""
    exponents = []
    for _, group in groupby(sorted(TRAININGS, key=_workload), _workload):
        rows = sorted(group, key=lambda row: row.answers)
        times = math.log(rows[-1].answers / rows[0].answers)
        if times >= math.log(TIMES_MORE):
            exponents.append(max((rows[-1].gain - rows[0].gain) / times, 0.0))
    return min(exponents), statistics.median(exponents), max(exponents)


def _workload(row: Training) -> tuple[str, str]:
    return row.target, row.workload


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A finished training by the user: its folder, number of answers and measured acceptance length. The method `at`
    predicts from it what a training on another number of answers reaches."""

    folder: Path
    answers: int
    """Different prompts that it learned from."""
    measured: Expected
    what: str
    """Description of the prompts of the measurement."""

    def at(self, answers: float) -> Expected:
        """Predicts the acceptance length of a training on this many answers of the same traffic."""
        least, median, most = growth()
        times = answers / self.answers
        slow, fast = (least, most) if times >= 1 else (most, least)
        gains = (self.measured.low, slow), (self.measured.tokens_per_round, median), (self.measured.high, fast)
        low, center, high = (1.0 + (tokens - 1.0) * times**exponent for tokens, exponent in gains)
        return Expected(center, low, high, times > 1)


def find_run(run: str | None, target: str) -> OwnRun | None:
    """Returns a training that the user ran for the model `target`, with its measured acceptance length, to base
    predictions on. `run` is one of:
    - a run's folder: raises ConfigError if it has no result for this target;
    - "none": returns None;
    - None: returns the newest run in runs/ with a result for this target, or None. Damaged runs are skipped and
      logged."""
    if run == "none":
        return None
    if run is not None:
        given = own_run(Path(run), target)
        if given is None:
            other = str(_content(Path(run) / "plan.json").get("target", target))
            if served_name(other) != served_name(target):
                raise ConfigError(f"--run {run} is a training of another target ({other}): give one of {target}")
            raise ConfigError(
                f"--run {run} has no acceptance length of {target}: give the folder of a training of it, after "
                f"paceline evaluate {run}/drafter --out {run}"
            )
        return given
    folders = sorted(RUNS.glob("*/plan.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in folders:
        try:
            if own := own_run(file.parent, target):
                return own
        except (ConfigError, OSError) as error:
            log.warning("left out of the search for a training of %s: %s", target, error)
    return None


def own_run(folder: Path, target: str) -> OwnRun | None:
    """Returns the result of the training in `folder`; None if it trained for another target or its acceptance length
    was not measured. Raises ConfigError for damaged files."""
    plan = _content(folder / "plan.json")
    if served_name(str(plan.get("target"))) != served_name(target):
        return None
    evaluation, heldout = _content(folder / "evaluation.json"), _content(folder / "heldout.json")
    trained, damaged = _content(folder / TRAINED), (KeyError, TypeError, ValueError, AttributeError)
    with reraised(ConfigError, f"{folder} is damaged", "choose another --run", *damaged):
        answers = trained.get("prompts") or (plan.get("expected") or {}).get("answers")
        measured = _evaluated(evaluation) or _served(heldout)
        if measured is None or not answers:
            return None
        expected, what = measured
        return OwnRun(folder, int(answers), expected, what) if expected.tokens_per_round > 1 else None


def _content(file: Path) -> dict[str, Any]:
    content = read_json(file, "choose another --run") if file.is_file() else {}
    return content if isinstance(content, dict) else {}


def _evaluated(evaluation: dict[str, Any]) -> tuple[Expected, str] | None:
    """Returns the greedy acceptance length of the smallest batch in evaluation.json: the mean over its prompt sets, and
    the hull of their intervals."""
    rows = [
        row
        for row in evaluation.get("results") or ()
        if row["drafter"] != "none" and row["temperature"] == 0 and row["tokens_per_round"]
    ]
    rows = [row for row in rows if row["batch"] == min(row["batch"] for row in rows)]
    if not rows:
        return None
    ends = [end for row in rows for end in row["tokens_per_round_interval"] if end is not None]
    values = [row["tokens_per_round"] for row in rows]
    expected = Expected(statistics.fmean(values), min(ends + values), max(ends + values))
    return expected, f"paceline evaluate, {', '.join(str(row['prompts']) for row in rows)}"


def _served(heldout: dict[str, Any]) -> tuple[Expected, str] | None:
    """Returns the acceptance length in heldout.json, with the deviation that such figures had from later ones."""
    if not heldout.get("tokens_per_round"):
        return None
    gain = heldout["tokens_per_round"] - 1.0
    times = math.exp(statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2) * HELDOUT_DEVIATION)
    expected = Expected(1.0 + gain, 1.0 + gain / times, 1.0 + gain * times)
    return expected, f"its {heldout.get('num_prompts', '')} held-out prompts"
