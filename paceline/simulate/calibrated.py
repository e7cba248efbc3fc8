"""A roofline that was fitted to a machine: which share of its bandwidth and arithmetic passes reach, and their overheads.

    pass    = sum over parts of max(reading * read, computing * compute) + fixed + token * B*q + cached_token * B*S
    draft   = passes * (fixed + position * max(floor, positions of a pass)) + row * B        round = pass + draft + host

`read` and `compute` are the roofline's seconds of a part at the machine's full rates; a factor of 2 means half the rate.
`calibrate.py` makes the file, `paceline simulate --calibration FILE` predicts with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.hardware import Machine
from paceline.simulate.costs import NO_COST, DrafterCost, DraftFit, PassFit, RooflineCosts
from paceline.simulate.files import check_amounts, read_json, record_of
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import ModelShape, Precisions


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
    try:
        found = Calibration(
            verify=record_of(PassFit, told.get("verify")),
            draft=record_of(DraftFit, told["draft"]) if told.get("draft") else None,
            host_s=told.get("host_s"),  # pyright: ignore[reportArgumentType]  (checked below)
            model=str(told.get("model", "")),
            drafter=str(told.get("drafter", "")),
            machine=Machine(**told["machine"]) if told.get("machine") else None,
            precisions=Precisions(**told["precisions"]) if told.get("precisions") else None,
        )
        check_amounts(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}): make the calibration again") from error
    return found
