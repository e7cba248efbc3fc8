"""A roofline that was fitted to a machine: the shares of bandwidth and arithmetic it reaches, and what it pays besides.

    pass    = sum over parts of max(reading * read, computing * compute) + fixed + token * B*q + cached_token * B*S
    draft   = passes * (fixed + position * max(floor, positions of a pass)) + row * B        round = pass + draft + host

`read` and `compute` are the roofline's seconds of a part at the machine's full rates; a factor of 2 means half the rate.
`calibrate.py` makes the file, `paceline simulate --calibration FILE` predicts with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs import draft_seconds
from paceline.simulate.drafter_cost import DrafterCost, FractionDrafter
from paceline.simulate.roofline import Deployment, Work, collective_seconds, works_of
from paceline.simulate.shapes import ModelShape, Precisions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PassFit:
    """A target pass."""

    reading: float = 1.0
    """Factor on the seconds of reading at full bandwidth; 1 / reading is the share of bandwidth reached."""
    computing: float = 1.0
    """Factor on the seconds of arithmetic at full rate; 1 / computing is the share reached."""
    fixed_s: float = 0.0
    """Each pass, whatever its size."""
    token_s: float = 0.0
    """Each position of each row."""
    cached_token_s: float = 0.0
    """Each token in the cache of each row."""

    def part_s(self, work: Work, deployment: Deployment) -> float:
        compute_s = work.flops / deployment.flops_per_s(work.number_format)
        return max(self.reading * work.num_bytes / deployment.bytes_per_s, self.computing * compute_s)


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Drafting of a round."""

    fixed_s: float = 0.0
    """Each drafter pass."""
    position_s: float = 0.0
    """Each position of a drafter pass beyond `floor`."""
    floor: float = 0.0
    """Positions below which a pass costs no less."""
    row_s: float = 0.0
    """Each row of a round."""
    is_block: bool = True
    """One pass for all drafts and the anchor; else one for each draft."""

    def seconds(self, batch: float, num_drafted: int) -> float:
        if num_drafted == 0:
            return 0.0
        passes, positions = (1, batch * (num_drafted + 1)) if self.is_block else (num_drafted, batch)
        return passes * (self.fixed_s + self.position_s * max(self.floor, positions)) + self.row_s * batch


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was fitted, to which measurements."""

    verify: PassFit
    draft: DraftFit | None
    """None when no drafter was measured."""
    host_s: float
    """Each round, outside target and drafter."""
    model: str = ""
    drafter: str = ""
    machine: Machine | None = None
    precisions: Precisions | None = None

    def as_json(self) -> dict[str, Any]:
        return {"kind": "paceline calibration", **asdict(self)}


@dataclass(frozen=True, slots=True)
class CalibratedCosts:
    """Step costs of a calibrated roofline, for the model and drafter it was fitted to, or for others as an estimate."""

    shape: ModelShape
    deployment: Deployment
    calibration: Calibration
    drafter: DrafterCost = field(default_factory=lambda: FractionDrafter(0.0))
    """In place of the calibration's drafter, when none was measured."""

    @property
    def host_s(self) -> float:
        return self.calibration.host_s

    def verify_s(self, batch: float, positions: float, context: float) -> float:
        return sum(self.split(batch, positions, context).values())

    def draft_s(self, batch: float, num_drafted: int, context: float) -> float:
        if self.calibration.draft:
            return self.calibration.draft.seconds(batch, num_drafted)
        return draft_seconds(self.drafter, batch, num_drafted, self.verify_s(batch, 1, context))

    def split(self, batch: float, positions: float, context: float) -> dict[str, float]:
        fit, tokens = self.calibration.verify, batch * positions
        parts = {"projections": 0.0, "experts": 0.0, "attention": fit.cached_token_s * batch * context}
        for work in works_of(self.shape, self.deployment, batch, positions, context):
            parts[work.part] += fit.part_s(work, self.deployment)
        overhead = fit.fixed_s + fit.token_s * tokens
        return {**parts, "collectives": collective_seconds(self.shape, self.deployment, tokens), "overhead": overhead}


def read_calibration(path: Path) -> Calibration:
    """A file of `Calibration.as_json`, or the folder with its calibration.json. Raises ConfigError."""
    file = path / "calibration.json" if path.is_dir() else path
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror or error}): paceline simulate --calibrate makes one") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}): make it again with paceline simulate --calibrate") from error
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
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not is_number:
        raise ConfigError(f"{file}: {name} must be a number of 0 or more, not {value!r}: make the calibration again")
    return float(value)
