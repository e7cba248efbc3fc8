"""A roofline that was fitted to a machine: which share of its bandwidth and arithmetic passes reach, and their overheads.

    pass    = sum over parts of max(reading * read, computing * compute) + fixed + token * B*q + cached_token * B*S
    draft   = passes * (fixed + position * max(floor, positions of a pass)) + row * B        round = pass + draft + host

`read` and `compute` are the roofline's seconds of a part at the machine's full rates; a factor of 2 means half the rate.
`calibrate.py` makes the file, `paceline simulate --calibration FILE` predicts with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs import NO_COST, StepCosts
from paceline.simulate.drafter_cost import DrafterCost
from paceline.simulate.files import is_amount, read_json
from paceline.simulate.roofline import Deployment, pass_seconds
from paceline.simulate.shapes import ModelShape, Precisions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassFit:
    """Factors and overheads of a target pass."""

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


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Seconds of a round's drafting."""

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

    def seconds(self, batch: float, num_drafted: int) -> float:
        if num_drafted == 0:
            return 0.0
        passes, positions = (1, batch * (num_drafted + 1)) if self.is_block else (num_drafted, batch)
        return passes * (self.fixed_s + self.position_s * max(self.floor, positions)) + self.row_s * batch


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

    def as_json(self) -> dict[str, Any]:
        return {"kind": "paceline calibration", **asdict(self)}


@dataclass(frozen=True, slots=True)
class CalibratedCosts(StepCosts):
    """Step costs of a calibrated roofline, for the model and drafter it was fitted to, or for others as an estimate."""

    shape: ModelShape
    deployment: Deployment
    calibration: Calibration
    drafter: DrafterCost = NO_COST
    """For calibrations without a measured drafter."""

    @property
    def host_s(self) -> float:
        return self.calibration.host_s

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.calibration.draft:
            return self.calibration.draft.seconds(batch, num_drafted)
        return self.drafter.draft_s(num_drafted, batch, self.verify_s(batch, 1, context))

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        fit = self.calibration.verify
        parts = pass_seconds(self.shape, self.deployment, batch, positions, context, fit.reading, fit.computing)
        parts["attention"] += fit.cached_token_s * batch * context
        return {**parts, "overhead": fit.fixed_s + fit.token_s * batch * positions}


def read_calibration(path: Path) -> Calibration:
    """A file of `Calibration.as_json`, or the folder with its calibration.json. Raises ConfigError."""
    file = path / "calibration.json" if path.is_dir() else path
    told = read_json(file, "paceline simulate --calibrate makes one")
    if not isinstance(told, dict) or told.get("kind") != "paceline calibration":
        raise ConfigError(f"{file} is no calibration: paceline simulate --calibrate RUN makes one")
    draft = _fit_of(DraftFit, told["draft"], file) if told.get("draft") else None
    verify, host_s = _fit_of(PassFit, told.get("verify"), file), _number(told.get("host_s"), "host_s", file)
    try:
        machine = Machine(**told["machine"]) if told.get("machine") else None
        precisions = Precisions(**told["precisions"]) if told.get("precisions") else None
    except TypeError as error:
        raise ConfigError(f"{file} cannot be read ({error}): make the calibration again") from error
    return Calibration(verify, draft, host_s, str(told.get("model", "")), str(told.get("drafter", "")), machine, precisions)


def _fit_of(kind: type[T], told: Any, file: Path) -> T:
    values = told if isinstance(told, dict) else {}
    names = [each.name for each in fields(kind)]  # pyright: ignore[reportArgumentType]
    return kind(**{name: told[name] if name == "is_block" else _number(values.get(name), name, file) for name in names})


def _number(value: Any, name: str, file: Path) -> float:
    if not is_amount(value):
        raise ConfigError(f"{file}: {name} must be a number of 0 or more, not {value!r}: make the calibration again")
    return float(value)
