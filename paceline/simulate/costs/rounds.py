"""Seconds of the parts of a round: of a toy, of a roofline, calibrated or not, or of a table of measured times.

A round of B sequences that draft g tokens each takes `verify_s(B, g + 1, S) + draft_s(B, g, S) + host_s`. A calibrated roofline
was fitted to a machine by `calibrate.py`, whose file `paceline simulate --calibration FILE` reads:

    pass    = sum over parts of max(reading * read, computing * compute) + fixed + token * B*q + cached_token * B*S
    draft   = passes * (fixed + position * max(floor, positions of a pass)) + row * B

`read` and `compute` are the roofline's seconds of a part at the machine's full rates; a factor of 2 means half the rate.

A table holds the step times of a machine, from `paceline bench steps` or any file of that form:

    {"verify": [[batch, positions, seconds], ...], "draft": [[batch, num_drafted, seconds], ...], "host_s": 0.0004,
     "prefill": [[tokens, seconds], ...]}

Between measured points times lie on straight lines, and they never fall when there is more to do: where a larger pass was
faster, another program had slowed the smaller one down. Beyond the widest point they go on as steeply as between the last two;
a batch larger than any measured counts as wider passes of as many positions.
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
from paceline.simulate.costs.shapes import ModelShape, Precisions
from paceline.simulate.files import check_amounts, is_amount, read_json, record_of


@dataclass(frozen=True, slots=True)
class FractionDrafter:
    """A drafter pass takes `fraction` of a plain target pass at the same batch."""

    fraction: float
    block: int | None = None
    """Drafts of one drafter pass (DFlash); None drafts one token a pass (MTP, EAGLE, a small model)."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float) -> float:
        """Seconds of drafting for `batch` sequences; `plain_s`: a target pass of one position for each of them."""
        return self.fraction * plain_s * _passes(num_drafted, self.block)


@dataclass(frozen=True, slots=True)
class ShapeDrafter:
    """A drafter's own roofline: each of its passes takes the larger of its arithmetic and its reading.

    t_mtp(g, B) = g * max(2*P*B/R, b*P/BW);   t_dflash(B) = max(2*P*B*D/R, b*P/BW) with D positions a block.
    """

    dense: float
    """Parameters that every pass reads, the head included."""
    flops_per_s: float
    bytes_per_s: float
    num_bytes: float = 2.0
    """Of one parameter."""
    block: int | None = None
    """Drafts of one drafter pass; None drafts one token a pass."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float = 0.0) -> float:
        """As FractionDrafter's; `plain_s` does not matter."""
        computing = 2.0 * self.dense * batch * (self.block or 1) / self.flops_per_s
        return _passes(num_drafted, self.block) * max(computing, self.num_bytes * self.dense / self.bytes_per_s)


def _passes(num_drafted: int, block: int | None) -> int:
    """Drafter passes of a round."""
    return num_drafted if block is None else math.ceil(num_drafted / block)


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Seconds of drafting that were fitted to measured ones (`calibrate.py`)."""

    fixed_s: float = 0.0
    """For each drafter pass."""
    position_s: float = 0.0
    """For each position of a drafter pass; of a pass of fewer positions than `floor`, for `floor` positions."""
    floor: float = 0.0
    """Positions below which a pass costs no less."""
    row_s: float = 0.0
    """For each row of the batch."""
    is_block: bool = True
    """True: one pass makes all drafts of a row; False: one pass for each draft."""

    def draft_s(self, num_drafted: int, batch: float, plain_s: float = 0.0) -> float:
        """As FractionDrafter's; `plain_s` does not matter."""
        if num_drafted == 0:
            return 0.0
        passes, positions = (1, batch * (num_drafted + 1)) if self.is_block else (num_drafted, batch)
        return passes * (self.fixed_s + self.position_s * max(self.floor, positions)) + self.row_s * batch


@dataclass(frozen=True, slots=True)
class PassFit:
    """Factors and overheads of a target pass that were fitted to measured ones (`calibrate.py`)."""

    reading: float = 1.0
    """Factor on the seconds of reading at full bandwidth; 1 / reading is the share of bandwidth reached."""
    computing: float = 1.0
    """Factor on the seconds of arithmetic at full rate; 1 / computing is the share reached."""
    fixed_s: float = 0.0
    """For each pass, whatever its size."""
    token_s: float = 0.0
    """For each position of each row."""
    cached_token_s: float = 0.0
    """For each token in the cache of each row."""


DrafterCost = FractionDrafter | ShapeDrafter | DraftFit
NO_COST = FractionDrafter(0.0)


class StepCosts:
    """Seconds of a round's parts. A source of costs gives `split`, and `draft_s` and `host_s` unless they are 0."""

    __slots__ = ()
    host_s: float = 0.0
    """Of a round outside target and drafter."""
    prefill_adapts: bool = False
    """Whether the engine that was measured shortens the chunks of a prompt beside running requests."""

    @property
    def max_draft(self) -> int | None:
        """Most drafts of a round that were measured; None when only plain passes were, or nothing."""
        return None

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        """Seconds of one target pass by part: `positions` of each sequence, `context` tokens in the cache of each."""
        raise NotImplementedError

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return sum(self.split(batch, positions, context).values())

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Seconds of drafting so many tokens for each sequence."""
        return 0.0

    def round_s(self, batch: float, num_drafted: int, context: float) -> float:
        """Seconds of a round in which every sequence drafts `num_drafted` tokens."""
        return self.verify_s(batch, num_drafted + 1, context) + self.draft_s(batch, num_drafted, context) + self.host_s

    def prefill_s(self, tokens: int, context: int) -> float:
        """Seconds of a chunk of one prompt, `context` tokens being in the cache after it."""
        return self.verify_s(1, tokens, context)


class ToyCosts(StepCosts):
    """Drafting and verifying cost nothing: the speed-up is the number of tokens per round."""

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        return {"target": 1.0}


@dataclass(frozen=True, slots=True)
class RooflineCosts(StepCosts):
    """`roofline.pass_seconds` of a target, and a drafter beside it."""

    shape: ModelShape
    deployment: Deployment
    drafter: DrafterCost = NO_COST
    host_s: float = 0.0
    fit: PassFit | None = None
    """As the machine was measured to reach; None: its full rates."""

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
    """The fitted numbers, and the model and machine that were measured."""

    verify: PassFit
    draft: DraftFit | None
    """None when no drafter was measured."""
    host_s: float
    """Seconds of a round outside target and drafter."""
    model: str = ""
    drafter: str = ""
    machine: Machine | None = None
    precisions: Precisions | None = None
    expert_locality: float = 0.0
    """How much the positions of a sequence shared their experts in the passes it was fitted to."""

    def costs(self, shape: ModelShape, deployment: Deployment, drafter: DrafterCost = NO_COST) -> RooflineCosts:
        """For the model it was fitted to, or for others as an estimate; `drafter` where none was measured."""
        return RooflineCosts(shape, deployment, self.draft or drafter, self.host_s, self.verify)

    def as_json(self) -> dict[str, Any]:
        return {"kind": "paceline calibration", **asdict(self)}


def read_calibration(path: Path) -> Calibration:
    """A file of `Calibration.as_json`, or the folder with its calibration.json. Raises ConfigError."""
    file = path / "calibration.json" if path.is_dir() else path
    told = read_json(file, "paceline simulate --calibrate makes one")
    if not isinstance(told, dict) or told.get("kind") != "paceline calibration":
        raise ConfigError(f"{file} is no calibration: paceline simulate --calibrate RUN makes one")
    with reraised(ConfigError, f"{file} cannot be read", "make the calibration again", TypeError, ValueError):
        found = Calibration(
            verify=record_of(PassFit, told.get("verify")),
            draft=record_of(DraftFit, told["draft"]) if told.get("draft") else None,
            host_s=told.get("host_s"),  # pyright: ignore[reportArgumentType]  (checked below)
            model=str(told.get("model", "")),
            drafter=str(told.get("drafter", "")),
            machine=Machine(**told["machine"]) if told.get("machine") else None,
            precisions=Precisions(**told["precisions"]) if told.get("precisions") else None,
            expert_locality=told.get("expert_locality", 0.0),
        )
        check_amounts(found)
    return found


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Seconds over (batch, width), known on a grid that need not be full."""

    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]
    """(batch, ((width, seconds), ...)): both ascending, seconds not falling along a row."""

    @classmethod
    def of(cls, points: Sequence[Sequence[float]], what: str = "verify") -> TimeTable:
        """Raises ConfigError for points that are no [batch, width, seconds]."""
        best: dict[float, dict[float, float]] = {}
        for batch, width, seconds in cls.points(points, what):
            row = best.setdefault(batch, {})
            row[width] = min(row.get(width, math.inf), seconds)
        if not best:
            raise ConfigError(f"the table has no {what} times: give [[batch, positions, seconds], ...]")
        return cls(tuple((batch, _rising(sorted(row.items()))) for batch, row in sorted(best.items())))

    @staticmethod
    def points(points: Sequence[Sequence[float]], what: str) -> list[tuple[float, float, float]]:
        """As numbers. Raises ConfigError as `of`."""
        found = []
        for point in points:
            is_point = isinstance(point, list | tuple) and len(point) == 3
            if not is_point or not all(is_amount(each) and each > 0 for each in point):
                raise ConfigError(f"{what} time {point!r} is not [batch, positions, seconds] with numbers above 0")
            found.append((float(point[0]), float(point[1]), float(point[2])))
        return found

    def seconds(self, batch: float, width: float) -> float:
        """Linear in both; more never takes less."""
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
        """Smallest and largest batch, smallest and largest width."""
        widths = [width for _, row in self.rows for width, _ in row]
        return self.rows[0][0], self.rows[-1][0], min(widths), max(widths)


@dataclass(frozen=True, slots=True)
class MeasuredCosts(StepCosts):
    """A machine's measured steps for one model and drafter, whatever the context."""

    verify: TimeTable
    draft: TimeTable | None
    """None when no drafter was measured: then `drafter` says what it costs."""
    prefill: TimeTable
    """A chunk of one prompt, by its tokens."""
    host_s: float = 0.0
    context: float = 0.0
    """Tokens in the cache of each sequence while it was measured; 0 when not told."""
    title: str = ""
    """Model and machine, for people."""
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
    """A steps.json, the folder it is in, or a file of the form above. Raises ConfigError."""
    return table_of(read_steps(path), str(path))


def read_steps(path: Path) -> dict[str, Any]:
    """The JSON object of a table. Raises ConfigError when there is none."""
    file = path / "steps.json" if path.is_dir() else path
    steps = read_json(file, "paceline bench steps --out FOLDER makes one")
    if isinstance(steps, list):
        steps = {"verify": steps}
    if not isinstance(steps, dict) or not isinstance(steps.get("verify"), list):
        raise ConfigError(f'{file} holds no step times: give {{"verify": [[batch, positions, seconds], ...]}}')
    return steps


def table_of(steps: dict[str, Any], title: str = "") -> MeasuredCosts:
    """Raises ConfigError for values that are no times."""
    draft = steps.get("draft") or []
    host_s, context = steps.get("host_s", 0.0), steps.get("context", 0)
    if not (is_amount(host_s) and is_amount(context)):
        raise ConfigError("host_s and context of the table must be numbers of 0 or more")
    machine = steps.get("machine")
    told = (steps.get("model"), machine.get("name") if isinstance(machine, dict) else machine)
    verify = TimeTable.of(steps["verify"])
    return MeasuredCosts(
        verify=verify,
        draft=TimeTable.of(draft, "draft") if draft else None,
        prefill=TimeTable.of(_prefill(steps), "prefill"),
        host_s=float(host_s),
        context=float(context),
        title=" on ".join(name for name in told if isinstance(name, str)) or title,
        prefill_adapts=steps.get("prefill_adapts") is True,
    )


def _prefill(steps: dict[str, Any]) -> list[list[float]]:
    """[1, tokens, seconds] of chunks: as measured, else from target passes, whose time depends on their tokens alone.

    A straight line through the larger half of the passes goes on beyond them: the last two alone may have any slope.
    """
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
    """From the right: a smaller pass never takes more than a larger one."""
    widths, times = zip(*reversed(points), strict=True)
    return tuple(zip(widths, itertools.accumulate(times, min), strict=True))[::-1]


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Straight lines through the points; flat before the first, as steep as the last two after the last."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_left([place for place, _ in points], at), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    return before + (after - before) * (at - low) / (high - low)
