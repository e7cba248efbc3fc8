"""`paceline report`: report.html of a run folder, from whatever the run has left there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.shared import Json
from paceline.commands.terminal import print_json, say


def report(
    folder: Annotated[Path, typer.Argument(help="Run folder of train or evaluate.")],
    as_json: Json = False,
) -> dict[str, Any]:
    """One HTML page of a run: curves, figures, survival, texts; no network, no server.

    Example: paceline report runs/mine
    """
    from paceline.bench.html import page
    from paceline.bench.rundata import read_run
    from paceline.runlog import plain, write_whole

    run = read_run(folder)
    file = run.path / "report.html"
    write_whole(file, page(run))
    say(f"report: {file}")
    line = plain({"report": file, "steps": len(run.steps), "checks": len(run.checks), "sets": list(run.sets)})
    if as_json:
        print_json(line)
    return line
