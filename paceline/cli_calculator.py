"""The `calculator` command. Options are read here; `commands/calculator.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli_options import Json, Option

Out = Annotated[Path, Option(help="Where to write the page.")]
Open = Annotated[bool, Option("--open", help="Open it in a browser.")]
ThisMachine = Annotated[bool, Option("--this-machine", help="Also offer the machine at hand, measured.")]


def calculator(
    out: Out = Path("calculator.html"),
    open_it: Open = False,
    this_machine: ThisMachine = False,
    as_json: Json = False,
) -> None:
    """Write the calculator: predictions of `paceline simulate` with sliders and charts, in one HTML file.

    The file opens from disk, needs no server and no network, and can be hosted as it is. docs/calculator.md describes it.

    Example: paceline calculator --out calculator.html --open
    """
    from paceline.commands.calculator import calculator as run

    run(out, open_it, this_machine, as_json)


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command()(calculator)
