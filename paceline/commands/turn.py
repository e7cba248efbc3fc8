"""`paceline turn`: runs one iteration of the flywheel, estimates its cost, or shows the cost/quality report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import options
from paceline.commands.shared import REFUSED, Json, TerminalProgress, finish, say
from paceline.errors import ConfigError


@options
def turn(
    config: Annotated[
        Path,
        typer.Option("--config", help="YAML file of the flywheel: the model, its answers, and the models to build."),
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print each stage's minutes, tokens, disk space and money, and stop. Writes nothing."
        ),
    ] = False,
    show_ledger: Annotated[
        bool, typer.Option("--ledger", help="Show cost and quality of all iterations so far, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the whole loop: evals, drafter, smaller model.

    From a model's recorded answers, builds evals, a drafter for the model, and a smaller model with its own drafter. A
    quality gate then decides whether the smaller model replaces the model in service.

    The same command resumes an interrupted iteration. After a finished one it starts the next iteration, with the model
    that is now in service. Exit status 0: the smaller model passed; 3: it was rejected, and the earlier model stays in
    service; 2: an error.

    Examples:
      paceline turn --config flywheel.yaml --dry-run
    """
    from paceline.loop.flywheel.config import read_config

    if dry_run and show_ledger:
        raise ConfigError("--dry-run and --ledger exclude each other: leave one out")
    flywheel, progress = read_config(config), TerminalProgress()
    if show_ledger:
        from paceline.loop.flywheel import ledger

        lines = ledger.read(flywheel.out)
        if lines and not as_json:
            ledger.table(lines).show(stderr=False)
        elif not lines:
            say(f"{flywheel.out} has no ledger yet: run paceline turn --config {config}")
        finish({"ledger": lines}, as_json)
    elif dry_run:
        from paceline.loop.flywheel.pricing import price

        costs = price(flywheel, progress=progress)
        progress.table(costs.table())
        finish(costs.as_json(), as_json)
    else:
        from paceline.loop.flywheel.run import turn as library

        result = library(flywheel, progress=progress)
        finish(asdict(result), as_json, 0 if result.passed else REFUSED)
