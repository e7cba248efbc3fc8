"""`paceline calculator`: write the page, open it, say where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json
from paceline.commands.terminal import say
from paceline.errors import ConfigError


@options
def calculator(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("calculator.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    this_machine: Annotated[bool, typer.Option("--this-machine", help="Also offer the machine at hand, measured.")] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write the calculator: predictions of `paceline simulate` with sliders and charts, in one HTML file.

    The file opens from disk, needs no server and no network, and can be hosted as it is. docs/calculator.md describes it.

    Example: paceline calculator --out calculator.html --open
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it, such as {out / 'calculator.html'}")
    import webbrowser

    from paceline import hardware
    from paceline.runlog import write_whole
    from paceline.simulate.calculator import data, page

    machine = hardware.this_machine() if this_machine else None
    write_whole(out, page(machine))
    tables = data(machine)
    models, machines = list(tables["models"]), list(tables["machines"])
    say(f"wrote {out}: {len(models)} models, {len(machines)} machines, {out.stat().st_size / 1e3:.0f} kB; open it in a browser")
    if open_it and not webbrowser.open(out.resolve().as_uri()):
        say("found no browser to open it with")
    return {"page": out, "num_bytes": out.stat().st_size, "models": models, "machines": machines}
