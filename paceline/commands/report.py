"""`paceline report`: report.html of a run folder, from whatever the run has left there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json
from paceline.commands.terminal import say


@options
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder of train or evaluate.")],
    as_json: Json = False,
) -> dict[str, Any]:
    """One HTML page of a run: curves, figures, survival, texts; no network, no server.

    Example: paceline report runs/mine
    """
    from paceline.bench.html import page, read_run
    from paceline.runlog import write_whole

    run = read_run(folder)
    file = run.path / "report.html"
    write_whole(file, page(run))
    say(f"report: {file}")
    return {"report": file, "steps": len(run.steps), "checks": len(run.checks), "sets": list(run.sets)}
