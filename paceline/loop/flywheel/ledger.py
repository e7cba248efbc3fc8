"""The ledger of a flywheel: a line for each model that was measured, with what it brought, and for each that was refused, why.

    {"turn": 1, "what": "student", "model": "runs/flywheel/turn-1/student/student.gguf", "state": "kept", "score": 0.99, ...}

`append` adds a line, `read` takes them back, `table` shows them. Figures are those of `evals run`, on the suite of the turn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, ConfigError, reraised
from paceline.report.tables import Column, Table
from paceline.runs.folder import append_lines, plain

LEDGER = "ledger.jsonl"
Line = dict[str, Any]
KEYS = {"turn": int, "what": str, "state": str}
"""In every line, and their types."""


def append(out: Path, line: Line) -> Line:
    """Add a line, with the time. Raises CacheError when the disk refuses."""
    told = plain({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line})
    with reraised(CacheError, f"cannot write {out / LEDGER}", "free space, then run the same command", OSError):
        append_lines(out / LEDGER, [told])
    return told


def read(out: Path) -> list[Line]:
    """Oldest first. A stage that was killed behind its line writes it again: of lines of one turn, name and state the last one
    counts, in the place of the first; refusals all stay. Raises ConfigError on a damaged line."""
    file, found = out / LEDGER, dict[Any, Line]()
    remedy = "restore it from a copy, or delete the line that is damaged"
    with reraised(ConfigError, f"{file} is damaged", remedy, OSError, ValueError, RecursionError):
        for number, text in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []):
            line = json.loads(text)
            if not isinstance(line, dict) or not all(type(line.get(key)) is kind for key, kind in KEYS.items()):
                raise ValueError(f"{text[:80]} is no line of it")
            found[tuple(line[key] for key in KEYS) if line["state"] in ("measured", "kept") else number] = line
    return list(found.values())


def table(lines: Sequence[Line]) -> Table:
    """For people: a row a line; which models these are and why something was refused stands below."""
    has_first = any(line.get("first_score") is not None for line in lines)
    columns = [
        Column("turn", lambda line: line["turn"], align="right"),
        Column("what", lambda line: line["what"]),
        Column("state", lambda line: line["state"]),
        Column("evals", lambda line: _score(line, "score", "interval"), align="right", cut=" ["),
        *([Column("first evals", lambda line: _score(line, "first_score", "first_interval"), align="right")] * has_first),
        Column("p50", lambda line: line.get("p50_s"), "{:.3g} s", align="right"),
        Column("tokens/s", lambda line: line.get("tokens_per_s"), "{:.1f}", align="right"),
        Column("core-s per 1,000", lambda line: line.get("core_s_per_1000"), "{:,.0f}", align="right"),
        Column("price per 1,000", lambda line: line.get("price_per_1000"), "{:.4g}", align="right"),
        Column("core-hours", lambda line: _hours(line), "{:.2f}", align="right"),
        Column("cost", lambda line: line.get("price"), "{:.4g}", align="right"),
    ]
    models: dict[str, Line] = {}
    for line in lines:
        if line.get("model"):
            models.setdefault(line["model"], line)
    notes = [f"turn {line['turn']}, {line['what']}: {model}" for model, line in models.items()]
    notes += [f"turn {line['turn']}, {line['what']}, {line['state']}: {line['why']}" for line in lines if line.get("why")]
    return Table(columns, lines, title="Ledger", notes=notes)


def _hours(line: Line) -> float | None:
    """Of making all of a turn."""
    return None if line.get("core_s") is None else line["core_s"] / 3600


def _score(line: Line, name: str, interval: str) -> str | None:
    value, (low, high) = line.get(name), line.get(interval) or (None, None)
    if value is None:
        return None
    return f"{value:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")
