"""Write docs/reference/cli.md from the commands' own --help: `python docs/make_cli.py`. A test checks that it is
current."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from paceline.cli import app
from paceline.commands.catalogue import SECTIONS

TARGET = Path(__file__).parent / "reference" / "cli.md"

INTRODUCTION = """# The command line

Every command with its options, as `--help` prints them; made by `python docs/make_cli.py`, do not edit.

```sh
paceline --help                          # all commands, by section
paceline generate --help                 # one command
paceline --version
```"""


def command_words() -> Iterator[tuple[str, ...]]:
    """`paceline` itself, then every command and group, in the order of `paceline --help`."""
    yield ()
    for name, entry in (each for entries in SECTIONS.values() for each in entries.items()):
        yield (name,)
        yield from ((name, member) for member in entry.members or {})


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    os.environ["COLUMNS"] = "100"
    runner = CliRunner()
    for words in command_words():
        shown = runner.invoke(app, [*words, "--help"], prog_name="paceline", terminal_width=100).output
        parts.append(f"## {' '.join(('paceline', *words))}\n\n```text\n{shown.strip()}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
