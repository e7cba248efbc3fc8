"""The ledger of a flywheel: a line for each measured model with its figures, and for each refused one with the reason.

    {"turn": 1, "what": "student", "model": "runs/flywheel/turn-1/student/student.gguf", "state": "kept",
     "score": 0.99, ...}

The figures are those of `evals run` on the suite of the iteration (turn) of the flywheel.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, reraised
from paceline.report.tables import Column, Table, with_interval
from paceline.runs.folder import append_lines, checked_lines, plain

LEDGER = "ledger.jsonl"
Line = dict[str, Any]
KEYS = {"turn": int, "what": str, "state": str}
"""Required keys of every line, with their types."""


def append(out: Path, line: Line) -> None:
    """Appends a line to the ledger, the record of all measured and refused models of a flywheel. Adds the current time.
    The ledger is the file ledger.jsonl in the flywheel's folder `out`. Raises CacheError when the disk cannot be
    written."""
    timed = plain({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line})
    with reraised(CacheError, f"cannot write {out / LEDGER}", "free space, then run the same command", OSError):
        append_lines(out / LEDGER, [timed])


def read(out: Path) -> list[Line]:
    """Returns the lines of the ledger, oldest first. The ledger is the file ledger.jsonl in the flywheel's folder
    `out`; it records all measured and refused models. Raises ConfigError on a damaged line.

    A stage that was killed and resumed may have recorded the same measurement twice. Only the newer of the two lines is
    returned.
    """
    lines = dict[Any, Line]()
    for number, line in enumerate(checked_lines(out / LEDGER, KEYS)):
        lines[tuple(line[key] for key in KEYS) if line["state"] in ("measured", "kept") else number] = line
    return list(lines.values())


def table(lines: Sequence[Line]) -> Table:
    """Formats lines of the ledger (the record of measured and refused models) as a table. Its notes list the models'
    paths and the reasons of refusals."""
    columns = [
        Column("turn", lambda line: line["turn"], align="right"),
        Column("what", lambda line: line["what"]),
        Column("state", lambda line: line["state"]),
        Column("evals", lambda line: _score(line, "score", "interval"), align="right", cut=" ["),
        Column("p50", lambda line: line.get("p50_s"), "{:.3g} s", align="right"),
        Column("tokens/s", lambda line: line.get("tokens_per_s"), "{:.1f}", align="right"),
        Column("core-s per 1,000", lambda line: line.get("core_s_per_1000"), "{:,.0f}", align="right"),
        Column("price per 1,000", lambda line: line.get("price_per_1000"), "{:.4g}", align="right"),
        Column("core-hours", lambda line: line.get("core_s") and line["core_s"] / 3600, "{:.2f}", align="right"),
        Column("cost", lambda line: line.get("price"), "{:.4g}", align="right"),
    ]
    if any(line.get("first_score") is not None for line in lines):
        first = Column("first evals", lambda line: _score(line, "first_score", "first_interval"), align="right")
        columns.insert(4, first)
    models: dict[str, Line] = {}
    for line in lines:
        if line.get("model"):
            models.setdefault(line["model"], line)
    notes = [f"turn {line['turn']}, {line['what']}: {model}" for model, line in models.items()]
    notes += [
        f"turn {line['turn']}, {line['what']}, {line['state']}: {line['why']}" for line in lines if line.get("why")
    ]
    return Table(columns, lines, title="Ledger", notes=notes)


def _score(line: Line, name: str, interval: str) -> str | None:
    return with_interval(line.get(name), line.get(interval), "{:.3f}")
