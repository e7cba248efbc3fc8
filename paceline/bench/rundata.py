"""What a run folder holds, read back for its report: settings, command, training metrics, evaluation.

Training writes a line a step; now and then one holds "heldout" and "ood" too, or these come on a line of their own. The last
value of a step wins, for a resumed run repeats steps. A line cut short by a crash is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.bench.decode import Result
from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.simulate.files import read_json
from paceline.tables import printable

Line = dict[str, Any]
KINDS = {"heldout": "held out", "ood": "out of domain"}


@dataclass(frozen=True, slots=True)
class RunData:
    """A run, as far as it got."""

    path: Path
    config: Line = field(default_factory=dict)
    command: str = ""
    steps: list[Line] = field(default_factory=list)
    """Training metrics in the order of their steps, each step once."""
    checks: list[Line] = field(default_factory=list)
    """Held-out and out-of-domain metrics, the same way."""
    served: Line = field(default_factory=dict)
    """Held-out prompts answered in the real engine after training (heldout.json)."""
    evaluation: Line = field(default_factory=dict)

    @property
    def sets(self) -> dict[str, Line]:
        """Prompt set -> its figures, as `bench.evaluate.SetFigures.as_json` made them."""
        return self.evaluation.get("sets", {})

    def results(self) -> list[tuple[str, Result]]:
        """Every row of the evaluation with its prompt set."""
        known = {each.name for each in fields(Result)}
        return [
            (printable(name), Result(**{key: value for key, value in row.items() if key in known}))
            for name, figures in self.sets.items()
            for row in figures["results"]
        ]


def read_run(folder: Path) -> RunData:
    """Raises ConfigError when the folder has neither training metrics nor an evaluation, or when a file of it is damaged."""
    if not folder.is_dir():
        raise ConfigError(f"there is no run folder {folder}: check the path")
    lines, command = RunFolder(folder).metrics(), folder / "command.txt"
    run = RunData(
        path=folder,
        config=_object(folder / "config.json"),
        command=command.read_text(encoding="utf-8", errors="replace").strip() if command.exists() else "",
        steps=_by_step([line for line in lines if "loss" in line]),
        checks=_by_step([line for line in lines if any(isinstance(line.get(kind), dict) for kind in KINDS)]),
        served=_object(folder / "heldout.json"),
        evaluation=_object(folder / "evaluation.json"),
    )
    if not (run.steps or run.checks or run.sets):
        raise ConfigError(
            f"{folder} holds neither training metrics (metrics.jsonl) nor an evaluation (evaluation.json): "
            "give the folder of paceline train or paceline evaluate"
        )
    return run


def _by_step(lines: list[Line]) -> list[Line]:
    last = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    return [last[step] for step in sorted(last)]


def _object(path: Path) -> Line:
    remedy = "make it again, or move it away"
    value = read_json(path, remedy) if path.exists() else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object: {remedy}")
    return value


def numbers(lines: list[Line], *keys: str, over: str = "blocks") -> tuple[list[float], list[float]]:
    """The value under `over` (blocks trained on so far) and the one under `keys`, of the lines that have both."""
    pairs = [(line.get(over), _at(line, keys)) for line in lines]
    known = [(float(x), float(y)) for x, y in pairs if isinstance(x, int | float) and isinstance(y, int | float)]
    return [x for x, _ in known], [y for _, y in known]


def _at(line: Line, keys: tuple[str, ...]) -> Any:
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def thinned(x: list[float], y: list[float], most: int = 300) -> tuple[list[float], list[float]]:
    """At most `most` points, each the mean of neighbours: a long run's page stays small, and its noise too."""
    size = -(-len(x) // most)
    if size <= 1:
        return x, y
    groups = [slice(first, first + size) for first in range(0, len(x), size)]
    return [fmean(x[group]) for group in groups], [fmean(y[group]) for group in groups]
