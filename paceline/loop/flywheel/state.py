"""State of a flywheel on disk: the served model, and settings and finished stages of each iteration (turn).

runs/flywheel/serving.json            the served model and its command; written when a turn has passed
runs/flywheel/ledger.jsonl            a line for each measured or refused model (ledger.py)
runs/flywheel/lineage.json            all trained drafters, in the format of `paceline adapt`
runs/flywheel/turn-1/turn.json        settings, and the result of each finished stage
runs/flywheel/turn-2/traces/          recorded answers of the model that turn 1 made
runs/flywheel/turn-1/store/ evals/ drafter/ student/ student-drafter/
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, reraised
from paceline.loop.flywheel.config import FREE, FlywheelConfig
from paceline.runs.folder import plain, write_whole
from paceline.train.learn.checkpoint import check_same

SERVING, STATE, TRACES = "serving.json", "turn.json", "traces"
NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class Serving:
    """The model that is served now, with its drafter."""

    model: str
    drafter: str = NO_DRAFTER
    turn: int = 0
    """Number of the last iteration (turn) that passed; 0 before."""
    first_model: str = ""
    """The model that the flywheel started with, teacher of the first iteration (turn)."""
    command: str = ""
    """Command that serves the model and stores its answers for the next iteration (turn)."""


def serving_of(config: FlywheelConfig) -> Serving:
    """Reads the served model from serving.json; without this file, before the first turn has passed, returns the model
    in `config`.

    Raises ConfigError on a damaged file, and if the flywheel in this folder was started with another model.
    """
    file = config.out / SERVING
    if not file.is_file():
        return Serving(config.model, first_model=config.model)
    with reraised(ConfigError, f"{file} is damaged", "restore it", OSError, ValueError, TypeError):
        serving = Serving(**json.loads(file.read_text(encoding="utf-8")))
    if serving.first_model != config.model:
        raise ConfigError(
            f"{config.out} is the flywheel of {serving.first_model}, not of {config.model}: choose another out, or "
            "name that model (later turns find their own)"
        )
    return serving


def write_serving(config: FlywheelConfig, serving: Serving) -> None:
    """Replaces serving.json, which names the served model, atomically. Raises CacheError when the disk cannot be
    written."""
    write_whole(config.out / SERVING, json.dumps(asdict(serving), indent=1) + "\n")


@dataclass(slots=True)
class TurnState:
    """Settings, stage results and times of one iteration (turn) of the flywheel, as stored in its turn.json."""

    folder: Path
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings with which the iteration (turn) was started and which must not change during it."""
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Results of the finished stages, by name."""
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    """Wall-clock and CPU seconds by stage, over all resumed parts; killed parts are not counted."""

    @classmethod
    def read(cls, folder: Path) -> TurnState:
        """Reads turn.json; returns an empty state without this file. Raises ConfigError on a damaged file."""
        file = folder / STATE
        if not file.is_file():
            return cls(folder)
        with reraised(
            ConfigError, f"{file} is damaged", f"restore it, or {anew(folder)}", OSError, ValueError, TypeError
        ):
            return cls(folder, **json.loads(file.read_text(encoding="utf-8")))

    def write(self) -> None:
        """Writes turn.json, the state of this iteration (turn). Raises CacheError when the disk cannot be written."""
        content = {name: getattr(self, name) for name in ("asked", "stages", "spent")}
        write_whole(self.folder / STATE, json.dumps(plain(content), indent=1) + "\n")

    def check(self, config: FlywheelConfig) -> None:
        """Checks that an iteration (turn) continues with the settings with which it was started. Raises ConfigError if
        they differ from `config`. Stores the settings of a new iteration in `asked`."""
        now = fixed_of(config)
        if self.asked:
            check_same(self.folder, self.asked, now, f", or {anew(self.folder)}")
        self.asked = now

    def add_spent(self, stage: str, wall_s: float, core_s: float) -> None:
        before = self.spent.get(stage, {"wall_s": 0.0, "core_s": 0.0})
        self.spent[stage] = {"wall_s": before["wall_s"] + wall_s, "core_s": before["core_s"] + core_s}


def anew(folder: Path) -> str:
    """Returns advice for the user, for an error message: which files in the iteration's (turn's) folder to delete to
    begin the iteration anew. Two subfolders must be kept: the store, because it lists deleted rows, and the traces,
    because they cannot be recorded again."""
    return f"delete all in {folder} except store and traces to begin the turn anew"


def fixed_of(config: FlywheelConfig) -> dict[str, Any]:
    """Returns the settings that must not change while an iteration (turn) is in progress, as a JSON object."""
    teaching = replace(config.teaching, **dict.fromkeys(("minutes", "max_steps", "epochs", "micro_batch")))
    settings = plain(asdict(replace(config, teaching=teaching)))
    del settings["teaching"]["checkpoint_minutes"]
    return {name: value for name, value in settings.items() if name not in (*FREE, "out")}


def turn_folder(config: FlywheelConfig, number: int) -> Path:
    return config.out / f"turn-{number}"


def traces_of(config: FlywheelConfig, number: int) -> Path:
    """Returns the folder with the recorded answers that iteration (turn) `number` starts from. They are recorded while
    the student of the previous iteration is served. The first iteration does not use this folder: its answers are named
    in flywheel.yaml."""
    return turn_folder(config, number) / TRACES
