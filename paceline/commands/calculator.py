"""`paceline calculator`: writes the predictions of `simulate` as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.runs.folder import write_whole


@options
def calculator(
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("calculator.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    this_machine: Annotated[
        bool, typer.Option("--this-machine", help="Also measure and include this machine.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write the predictions as one interactive HTML page.

    The page shows the predictions of `paceline simulate` with sliders and charts. It is a single file that needs no
    server and no network. docs/explanation/prediction.md describes it.

    Examples:
      paceline calculator --out calculator.html --open
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it, such as {out / 'calculator.html'}")
    import webbrowser

    from paceline import hardware
    from paceline.simulate.calculator_page import data, page

    machine = hardware.this_machine() if this_machine else None
    write_whole(out, page(machine))
    tables = data(machine)
    models, machines = list(tables["models"]), list(tables["machines"])
    say(
        f"wrote {out}: {len(models)} models, {len(machines)} machines, {out.stat().st_size / 1e3:.0f} kB; open it in "
        "a browser"
    )
    if open_it and not webbrowser.open(out.resolve().as_uri()):
        say("found no browser to open it with")
    return {"page": out, "num_bytes": out.stat().st_size, "models": models, "machines": machines}
