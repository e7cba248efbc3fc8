"""`paceline calculator`: write the page, open it, say where it is."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from paceline.commands.terminal import print_json, say
from paceline.errors import ConfigError
from paceline.hardware import this_machine
from paceline.runlog import write_whole
from paceline.simulate.calculator import data, page


def calculator(out: Path, open_it: bool = False, measure: bool = False, as_json: bool = False) -> None:
    """`measure`: also offer the machine at hand. Raises ConfigError for a folder, CacheError for what cannot be written."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it, such as {out / 'calculator.html'}")
    machine = this_machine() if measure else None
    write_whole(out, page(machine))
    tables = data(machine)
    models, machines = list(tables["models"]), list(tables["machines"])
    say(f"wrote {out}: {len(models)} models, {len(machines)} machines, {out.stat().st_size / 1e3:.0f} kB; open it in a browser")
    if open_it and not webbrowser.open(out.resolve().as_uri()):
        say("found no browser to open it with")
    if as_json:
        print_json({"page": out, "num_bytes": out.stat().st_size, "models": models, "machines": machines})
