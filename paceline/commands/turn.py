"""`paceline turn`: one turn of the flywheel, its price beforehand, and its ledger."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, TerminalProgress, say
from paceline.errors import ConfigError

REFUSED = 3
"""Exit status where a gate refuses, as of `paceline evals`."""


@options
def turn(
    config: Annotated[
        Path, typer.Option("--config", help="The flywheel: model, what it answered, and what is to be made of it.")
    ],
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the turn will take, by stage: minutes, tokens, disk, money. Write nothing."),
    ] = False,
    show_ledger: Annotated[bool, typer.Option("--ledger", help="Show what every turn so far brought, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Run the whole loop: evals, drafter, smaller model.

    What a model answered becomes evals, a drafter, a smaller model with a drafter of its own, and the next model to
    serve. The same command continues where it stopped; after a finished turn it starts the next from what serves
    then. Exit status 0: passed, 3: a gate refuses the student, and what served before still serves, 2: an error.

    Examples:
      paceline turn --config flywheel.yaml --dry-run
    """
    from paceline.loop.flywheel.config import read_config

    if dry_run and show_ledger:
        raise ConfigError("--dry-run and --ledger exclude each other: leave one out")
    asked, progress = read_config(config), TerminalProgress()
    if show_ledger:
        from paceline.loop.flywheel import ledger

        lines = ledger.read(asked.out)
        if lines and not as_json:
            ledger.table(lines).show(stderr=False)
        elif not lines:
            say(f"{asked.out} has no ledger yet: run paceline turn --config {config}")
        _end({"ledger": lines}, as_json)
    elif dry_run:
        from paceline.loop.flywheel import price

        found = price(asked, progress=progress)
        progress.table(found.table())
        _end(found.as_json(), as_json)
    else:
        from paceline.loop.flywheel import turn as library

        result = library(asked, progress=progress)
        _end(asdict(result), as_json, 0 if result.passed else REFUSED)


def _end(line: dict[str, Any], as_json: bool, status: int = 0) -> None:
    import json

    from paceline.runs.folder import plain

    if as_json:
        print(json.dumps(plain(line)), flush=True)
    if status:
        raise typer.Exit(status)
