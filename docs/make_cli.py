"""Write docs/cli.md from the commands' own --help: `python docs/make_cli.py`. A test checks that the file is current."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from paceline.commands.catalogue import SECTIONS

TARGET = Path(__file__).parent / "cli.md"


def command_words() -> Iterator[tuple[str, ...]]:
    """`paceline` itself, then every command and group, in the order of `paceline --help`."""
    yield ()
    for name, entry in (each for entries in SECTIONS.values() for each in entries.items()):
        yield (name,)
        yield from ((name, member) for member in entry.members or {})


def render() -> str:
    """The whole page."""
    parts = ["# The command line\n\nMade by `python docs/make_cli.py` from `--help`; do not edit."]
    os.environ["COLUMNS"] = "100"
    runner = CliRunner()
    for words in command_words():
        shown = runner.invoke(app, [*words, "--help"], prog_name="paceline", terminal_width=100).output
        parts.append(f"## {' '.join(('paceline', *words))}\n\n```text\n{shown.strip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
