"""Where a flywheel stands, on disk: which turn, which of its stages are finished, what serves, and what was tried.

runs/flywheel/serving.json            what serves, and how to start it: written last, when a turn has passed
runs/flywheel/ledger.jsonl            a line for each model that was measured, and each that was refused (ledger.py)
runs/flywheel/lineage.json            the drafters, as of `paceline adapt`
runs/flywheel/turn-1/turn.json        settings, and what each finished stage came to
runs/flywheel/turn-1/traces/          from turn 2 on: what the student of the turn before answered
runs/flywheel/turn-1/store/ evals/ drafter/ student/ student-drafter/
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.loop.flywheel.config import FREE, FlywheelConfig
from paceline.report.tables import differences, ignore
from paceline.runs.folder import plain, write_whole
from paceline.train.run_file import drop_removed

SERVING, STATE, TRACES = "serving.json", "turn.json", "traces"
NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class Serving:
    """What answers: a model with its drafter."""

    model: str
    drafter: str = NO_DRAFTER
    turn: int = 0
    """The last turn that passed."""
    first_model: str = ""
    """That the flywheel began with."""
    command: str = ""
    """That serves it, and keeps what it answers for the next turn."""


def serving_of(config: FlywheelConfig) -> Serving:
    """What serves now: of serving.json, else the model that the flywheel begins with. Raises ConfigError on a damaged file, and
    where the folder began with another model."""
    file = config.out / SERVING
    if not file.is_file():
        return Serving(config.model, first_model=config.model)
    with reraised(ConfigError, f"{file} is damaged", "restore it", OSError, ValueError, TypeError):
        found = Serving(**json.loads(file.read_text(encoding="utf-8")))
    if found.first_model != config.model:
        raise ConfigError(
            f"{config.out} is the flywheel of {found.first_model}, not of {config.model}: choose another out, or name that "
            "model (later turns find their own)"
        )
    return found


def write_serving(config: FlywheelConfig, serving: Serving) -> None:
    """The swap: whole or not at all. Raises CacheError."""
    write_whole(config.out / SERVING, json.dumps(asdict(serving), indent=1) + "\n")


@dataclass(slots=True)
class TurnState:
    """One turn's turn.json."""

    folder: Path
    asked: dict[str, Any] = field(default_factory=dict)
    """The settings that it was begun with, but for those that may change."""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Finished ones, by name, with what they came to."""
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by the clock and of processors, by stage, over all its parts that ended in order."""

    @classmethod
    def read(cls, folder: Path) -> TurnState:
        """An empty one where the turn has not begun. Raises ConfigError on a damaged file."""
        file = folder / STATE
        if not file.is_file():
            return cls(folder)
        with reraised(
            ConfigError, f"{file} is damaged", "restore it, or delete the turn's folder", OSError, ValueError, TypeError
        ):
            return cls(folder, **json.loads(file.read_text(encoding="utf-8")))

    def write(self) -> None:
        """Raises CacheError."""
        told = {name: getattr(self, name) for name in ("asked", "stages", "spent")}
        write_whole(self.folder / STATE, json.dumps(plain(told), indent=1) + "\n")

    def check(self, config: FlywheelConfig, notice: Callable[[str], None] = ignore) -> None:
        """Raises ConfigError naming what differs from the settings that the turn was begun with; `notice` gets a note on
        those that only earlier versions had."""
        now = fixed_of(config)
        if isinstance(loop := self.asked.get("drafter", {}).get("loop"), dict):
            drop_removed(self.folder / STATE, loop, notice)
        found = differences(self.asked, now) if self.asked else {}
        if found:
            listed = "; ".join(f"{name}: {old!r} there, {new!r} now" for name, (old, new) in found.items())
            raise ConfigError(
                f"{self.folder} was begun with other settings ({listed}): use the same, or delete that folder to "
                "begin the turn anew"
            )
        self.asked = now

    def add_spent(self, stage: str, wall_s: float, core_s: float) -> None:
        before = self.spent.get(stage, {"wall_s": 0.0, "core_s": 0.0})
        self.spent[stage] = {"wall_s": before["wall_s"] + wall_s, "core_s": before["core_s"] + core_s}


def fixed_of(config: FlywheelConfig) -> dict[str, Any]:
    """The settings that may not change while a turn is under way."""
    teaching = replace(config.teaching, **dict.fromkeys(("minutes", "max_steps", "epochs", "micro_batch")))
    told = plain(asdict(replace(config, teaching=teaching)))
    del told["teaching"]["checkpoint_minutes"]
    return {name: value for name, value in told.items() if name not in (*FREE, "out")}


def turn_folder(config: FlywheelConfig, number: int) -> Path:
    return config.out / f"turn-{number}"


def traces_of(config: FlywheelConfig, number: int) -> Path:
    """Where what serves keeps its answers for a turn."""
    return turn_folder(config, number) / TRACES
