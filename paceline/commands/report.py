"""`paceline report`: report.html of a run folder, from whatever the run has left there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.html import page
from paceline.bench.rundata import read_run
from paceline.commands.terminal import print_json, say
from paceline.runlog import plain, write_whole


def report(folder: str | Path, as_json: bool = False) -> dict[str, Any]:
    """Write FOLDER/report.html; returns its path as "report".

    Raises ConfigError when there is nothing to report or matplotlib is missing, CacheError when the page cannot be written.
    """
    run = read_run(Path(folder))
    file = run.path / "report.html"
    write_whole(file, page(run))
    say(f"report: {file}")
    line = plain({"report": file, "steps": len(run.steps), "checks": len(run.checks), "sets": list(run.sets)})
    if as_json:
        print_json(line)
    return line
