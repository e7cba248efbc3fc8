"""Sources of round costs, in seconds: a toy model, a roofline (calibrated or not), or a table of measured times.

A round of B sequences that draft g tokens each takes `verify_s(B, g + 1, S) + draft_s(B, g, S) + host_s`. A calibrated
roofline was fitted to a machine by `calibrate.py`, whose file `paceline simulate --calibration FILE` reads:

    pass    = sum over parts of max(reading * read, computing * compute) + fixed + token * B*q + cached_token * B*S
    draft   = passes * (fixed + position * max(floor, positions of a pass)) + row * B

`read` and `compute` are the roofline's seconds of a part at the machine's full rates; a factor of 2 means half the
rate.

A table holds the step times of a machine, from `paceline bench steps` or any file of that form:

    {"verify": [[batch, positions, seconds], ...], "draft": [[batch, num_drafted, seconds], ...], "host_s": 0.0004,
     "prefill": [[tokens, seconds], ...]}

Times are interpolated linearly between measured points and never decrease with size: if a larger pass was faster,
another program had slowed the smaller one down. Beyond the widest point they are extrapolated from the last two; a
batch larger than any measured one counts as a wider pass with as many positions.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.hardware import Machine
from paceline.simulate.costs.roofline import Deployment, pass_seconds
from paceline.simulate.costs.shapes import ModelShape, Precisions, read_precisions
from paceline.simulate.files import check_amounts, is_amount, read_json, read_machine, record_of


@dataclass(frozen=True, slots=True)
class FractionDrafter:
    """Drafter cost as a share of the target's: a pass takes `fraction` of the seconds of a plain target pass (one
    position per sequence) at the same batch size."""

    fraction: float
    block: int | None = None
    """Number of drafts from one drafter pass (DFlash); None: one token per pass (MTP, EAGLE, a small model)."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float) -> float:
        """Returns the seconds of drafting `num_drafted` tokens for each of `batch` sequences. `plain_s`: seconds of a
        target pass over one position of each sequence."""
        return self.fraction * plain_s * _passes(num_drafted, self.block)


@dataclass(frozen=True, slots=True)
class ShapeDrafter:
    """Drafter cost from its own roofline. A pass takes max(2*P*B*D/R, b*P/BW) seconds, the longer of arithmetic and
    reading the weights. P: parameters of b bytes each; B: sequences; D: drafts per sequence and pass (`block`, or 1);
    R: FLOP/s; BW: bytes/s. A round takes as many passes as its drafts need."""

    dense: float
    """Parameters that every pass reads (P), including the head."""
    flops_per_s: float
    bytes_per_s: float
    num_bytes: float = 2.0
    """Bytes of one parameter (b)."""
    block: int | None = None
    """Number of drafts from one drafter pass; None: one token per pass."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float = 0.0) -> float:
        """Returns the seconds of drafting `num_drafted` tokens for each of `batch` sequences; `plain_s` is ignored."""
        computing = 2.0 * self.dense * batch * (self.block or 1) / self.flops_per_s
        return _passes(num_drafted, self.block) * max(computing, self.num_bytes * self.dense / self.bytes_per_s)


def _passes(num_drafted: int, block: int | None) -> int:
    """Returns the drafter passes of a round."""
    return num_drafted if block is None else math.ceil(num_drafted / block)


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Drafter cost fitted to measured times: seconds per pass, per position of a pass, and per batch row."""

    fixed_s: float = 0.0
    """Seconds of each drafter pass."""
    position_s: float = 0.0
    """Seconds of each position of a drafter pass; a pass has at least `floor` positions."""
    floor: float = 0.0
    """Minimum number of positions that a pass is charged for."""
    row_s: float = 0.0
    """Seconds that each batch row adds to the drafting of a round."""
    is_block: bool = True
    """True: one pass makes all drafts of a row; False: one pass for each draft."""
    max_draft: int = 0
    """Maximum drafts per round that were measured; 0 if unknown."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float = 0.0) -> float:
        """Returns the seconds of drafting `num_drafted` tokens for each of `batch` sequences; `plain_s` is ignored."""
        if num_drafted == 0:
            return 0.0
        passes, positions = (1, batch * (num_drafted + 1)) if self.is_block else (num_drafted, batch)
        return passes * (self.fixed_s + self.position_s * max(self.floor, positions)) + self.row_s * batch


@dataclass(frozen=True, slots=True)
class PassFit:
    """Target pass fitted to measured times: factors on the roofline's seconds of reading and arithmetic, and added
    seconds."""

    reading: float = 1.0
    """Factor on the seconds of reading at full bandwidth; its reciprocal is the share of bandwidth reached."""
    computing: float = 1.0
    """Factor on the seconds of arithmetic at full rate; its reciprocal is the share of this rate reached."""
    fixed_s: float = 0.0
    """Seconds of each pass, whatever its size."""
    token_s: float = 0.0
    """Seconds for each position of each row."""
    cached_token_s: float = 0.0
    """Seconds for each cached token of each row."""


DrafterCost = FractionDrafter | ShapeDrafter | DraftFit
NO_COST = FractionDrafter(0.0)


class StepCosts:
    """Base class of cost models: seconds of a round's parts. A subclass defines `split`, which returns the seconds of
    a target pass by part of the model. It also defines `draft_s` (drafting) and `host_s` (launches, scheduling,
    sampling), unless these take no time."""

    __slots__ = ()
    host_s: float = 0.0
    """Seconds of a round outside target and drafter: launches, scheduling, sampling."""
    prefill_adapts: bool = False
    """True if the measured engine uses shorter prefill chunks while other requests decode."""

    @property
    def max_draft(self) -> int | None:
        """Largest number of drafts per round whose times were measured; None for costs that are not a table of measured
        times, and for a table without drafts."""
        return None

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        """Returns the seconds of one target pass by part of the model, as {part's name: seconds}. Each of `batch`
        sequences has `positions` new and `context` cached tokens."""
        raise NotImplementedError

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return sum(self.split(batch, positions, context).values())

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Returns the seconds of drafting `num_drafted` tokens for each of `batch` sequences of `context` tokens."""
        return 0.0

    def round_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Returns the seconds of a round: `batch` sequences of `context` tokens draft `num_drafted` tokens each."""
        return self.verify_s(batch, num_drafted + 1, context) + self.draft_s(batch, num_drafted, context) + self.host_s

    def prefill_s(self, tokens: int, context: int) -> float:
        """Returns the seconds of a prefill chunk of `tokens` tokens. `context`: tokens in the cache after it."""
        return self.verify_s(1, tokens, context)


class ToyCosts(StepCosts):
    """Costs of the toy model: a target pass of any size takes 1, without a unit, and drafting takes no time. The
    speed-up then equals the tokens per round."""

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": 1.0}


@dataclass(frozen=True, slots=True)
class RooflineCosts(StepCosts):
    """Round costs of a model and a drafter, from the model's sizes and the machine's rates (roofline model)."""

    shape: ModelShape
    deployment: Deployment
    drafter: DrafterCost = NO_COST
    host_s: float = 0.0
    fit: PassFit | None = None
    """Factors fitted to measured times of the machine; None: its full rates."""

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        plain_s = self.verify_s(batch, 1, context) if isinstance(self.drafter, FractionDrafter) else 0.0
        return self.drafter.draft_s(num_drafted, batch, plain_s)

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        fit = self.fit
        if fit is None:
            return pass_seconds(self.shape, self.deployment, batch, positions, context)
        parts = pass_seconds(self.shape, self.deployment, batch, positions, context, fit.reading, fit.computing)
        parts["attention"] += fit.cached_token_s * batch * context
        return {**parts, "overhead": fit.fixed_s + fit.token_s * batch * positions}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Roofline parameters fitted to measured times, with the model and machine that were measured."""

    verify: PassFit
    draft: DraftFit | None
    """Fitted drafter cost; None if no drafter was measured."""
    host_s: float
    """Seconds of a round outside target and drafter."""
    model: str = ""
    drafter: str = ""
    machine: Machine | None = None
    precisions: Precisions | None = None
    expert_locality: float = 0.0
    """Expert locality (0: positions select experts independently; 1: they share them) in the measured passes."""

    def costs(self, shape: ModelShape, deployment: Deployment, drafter: DrafterCost = NO_COST) -> RooflineCosts:
        """Returns the round costs of a model on a machine, computed with the fitted parameters. They are an estimate if
        this is not the measured model and machine. `drafter`: drafter cost to use if no drafter was measured."""
        return RooflineCosts(shape, deployment, self.draft or drafter, self.host_s, self.verify)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "paceline calibration", **asdict(self)}


def read_calibration(path: Path) -> Calibration:
    """Reads a calibration.json, or a folder that contains one. Raises ConfigError if it cannot be read or is
    invalid."""
    file = path / "calibration.json" if path.is_dir() else path
    content = read_json(file, "paceline simulate --calibrate makes one")
    if not isinstance(content, dict) or content.get("kind") != "paceline calibration":
        raise ConfigError(f"{file} is no calibration: paceline simulate --calibrate RUN makes one")
    with reraised(ConfigError, f"{file} cannot be read", "make the calibration again", TypeError, ValueError):
        calibration = Calibration(
            verify=record_of(PassFit, content.get("verify")),
            draft=record_of(DraftFit, {"max_draft": 0} | content["draft"]) if content.get("draft") else None,
            host_s=content.get("host_s"),  # pyright: ignore[reportArgumentType]  (checked below)
            model=str(content.get("model", "")),
            drafter=str(content.get("drafter", "")),
            machine=read_machine(content["machine"]) if content.get("machine") else None,
            precisions=read_precisions(content["precisions"]) if content.get("precisions") else None,
            expert_locality=content.get("expert_locality", 0.0),
        )
        check_amounts(calibration)
    return calibration


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Measured seconds of steps by batch size and width (positions or drafts per row); some pairs may be missing."""

    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]
    """(batch, ((width, seconds), ...)) in ascending order; the seconds of a batch never decrease with the width."""

    @classmethod
    def of(cls, points: Sequence[Sequence[float]], what: str = "verify") -> TimeTable:
        """Builds a table from [batch, width, seconds] points; of equal sizes, the shortest time is used. Raises
        ConfigError for an invalid point, or without points; `what` names the measurement in the message."""
        best: dict[float, dict[float, float]] = {}
        for batch, width, seconds in cls.points(points, what):
            row = best.setdefault(batch, {})
            row[width] = min(row.get(width, math.inf), seconds)
        if not best:
            raise ConfigError(f"the table has no {what} times: give [[batch, positions, seconds], ...]")
        return cls(tuple((batch, _rising(sorted(row.items()))) for batch, row in sorted(best.items())))

    @staticmethod
    def points(points: Sequence[Sequence[float]], what: str) -> list[tuple[float, float, float]]:
        """Checks the points of a table and returns them as floats. Raises ConfigError for a point that is not [batch,
        width, seconds] above 0."""
        numbers = []
        for point in points:
            is_point = isinstance(point, list | tuple) and len(point) == 3
            if not is_point or not all(is_amount(each) and each > 0 for each in point):
                raise ConfigError(f"{what} time {point!r} is not [batch, positions, seconds] with numbers above 0")
            numbers.append((float(point[0]), float(point[1]), float(point[2])))
        return numbers

    def seconds(self, batch: float, width: float) -> float:
        """Returns the seconds for `batch` rows with `width` positions or drafts each: linear in both between measured
        sizes, extrapolated beyond the largest. A larger size never takes less time."""
        most, row = self.rows[-1]
        if batch > most:
            more = batch / most
            return self.seconds(most, width * more) if len(row) > 1 else self.seconds(most, width) * more
        values, highest = [], 0.0
        for known, row in self.rows:
            highest = max(highest, _line(row, width))
            values.append((known, highest))
        return _line(values, batch)

    @property
    def span(self) -> tuple[float, float, float, float]:
        """Range of the measured sizes: (smallest batch, largest batch, smallest width, largest width)."""
        widths = [width for _, row in self.rows for width, _ in row]
        return self.rows[0][0], self.rows[-1][0], min(widths), max(widths)


@dataclass(frozen=True, slots=True)
class MeasuredCosts(StepCosts):
    """Costs from measured step times of one machine, model and drafter. They do not depend on the context length."""

    verify: TimeTable
    draft: TimeTable | None
    """Seconds of drafting by (batch, drafts); None if no drafter was measured, then `drafter` gives the cost."""
    prefill: TimeTable
    """Seconds of a prefill chunk by its number of tokens, at batch 1."""
    host_s: float = 0.0
    context: float = 0.0
    """Tokens in each sequence's cache during the measurement; 0 if unknown."""
    title: str = ""
    """Description of model and machine for readers."""
    prefill_adapts: bool = False
    drafter: FractionDrafter = NO_COST

    @property
    def max_draft(self) -> int | None:
        _, _, _, widest = (self.draft or self.verify).span
        return int(widest) - (self.draft is None) or None

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.draft is None:
            return self.drafter.draft_s(num_drafted, batch, self.verify.seconds(batch, 1))
        return self.draft.seconds(batch, num_drafted) if num_drafted else 0.0

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": self.verify.seconds(batch, positions)}

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.prefill.seconds(1, tokens)


def read_table(path: Path) -> MeasuredCosts:
    """Reads a steps.json of `paceline bench steps`, or its folder: {"verify": [[batch, positions, seconds], ...],
    "draft": [[batch, num_drafted, seconds], ...], "host_s": 0.0004, ...}. Raises ConfigError if it cannot be read or a
    time is invalid."""
    return table_of(read_steps(path), str(path))


def read_steps(path: Path) -> dict[str, Any]:
    """Returns the content of a steps.json or its folder. Raises ConfigError if it is unreadable or lacks "verify"."""
    file = path / "steps.json" if path.is_dir() else path
    steps = read_json(file, "paceline bench steps --out FOLDER makes one")
    if isinstance(steps, list):
        steps = {"verify": steps}
    if not isinstance(steps, dict) or not isinstance(steps.get("verify"), list):
        raise ConfigError(f'{file} holds no step times: give {{"verify": [[batch, positions, seconds], ...]}}')
    return steps


def table_of(steps: dict[str, Any], title: str = "") -> MeasuredCosts:
    """Builds costs from `steps`, the content of a steps.json. `title`: name of the costs, if `steps` names neither
    model nor machine. Raises ConfigError for invalid times."""
    draft = steps.get("draft") or []
    host_s, context = steps.get("host_s", 0.0), steps.get("context", 0)
    if not (is_amount(host_s) and is_amount(context)):
        raise ConfigError("host_s and context of the table must be numbers of 0 or more")
    machine = steps.get("machine")
    names = (steps.get("model"), machine.get("name") if isinstance(machine, dict) else machine)
    verify = TimeTable.of(steps["verify"])
    return MeasuredCosts(
        verify=verify,
        draft=TimeTable.of(draft, "draft") if draft else None,
        prefill=TimeTable.of(_prefill(steps), "prefill"),
        host_s=float(host_s),
        context=float(context),
        title=" on ".join(name for name in names if isinstance(name, str)) or title,
        prefill_adapts=steps.get("prefill_adapts") is True,
    )


def _prefill(steps: dict[str, Any]) -> list[list[float]]:
    """Returns [1, tokens, seconds] of chunks: as measured, or else from target passes by their number of tokens. Beyond
    the passes it follows a regression line of their larger half: the slope between the last two alone is unreliable."""
    measured = steps.get("prefill") or []
    if not isinstance(measured, list):
        raise ConfigError("prefill of the table must be [[tokens, seconds], ...]")
    if measured:
        return [[1, *point] if isinstance(point, list) else [] for point in measured]
    points = sorted((batch * positions, seconds) for batch, positions, seconds in steps["verify"])
    larger = [point for point in points if point[0] >= points[-1][0] / 2]
    if larger[0][0] < larger[-1][0]:
        sizes, times = zip(*larger, strict=True)
        slope = max(statistics.linear_regression(sizes, times).slope, 0.0)
        middle, mean_s = statistics.fmean(sizes), statistics.fmean(times)
        fitted = [(size, mean_s + slope * (size - middle)) for size in (sizes[-1], 2 * sizes[-1])]
        points = [point for point in points if point[0] < sizes[-1]] + fitted
    return [[1, tokens, seconds] for tokens, seconds in points]


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Makes times non-decreasing, from the right: a smaller pass never takes longer than a larger one."""
    widths, times = zip(*reversed(points), strict=True)
    return tuple(zip(widths, itertools.accumulate(times, min), strict=True))[::-1]


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates linearly; constant before the first point, and with the slope of the last two after the last."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left([place for place, _ in points], at), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    return before + (after - before) * (at - low) / (high - low)
