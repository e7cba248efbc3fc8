"""The table of commands in the project's design: each takes --json, with the keys that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app

DESIGN = Path(__file__).parents[2] / "shared" / "design.md"
COMMANDS = {
    "simulate": ["--model", "Qwen3-8B", "--hardware", "H100", "--acceptance", "0.8"],
}
"""Commands that are quick to run, with their words."""


def leaves(command: Any, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command by its words, such as "drafters list"."""
    groups = getattr(command, "commands", None)
    if groups is None:
        return {" ".join(words): command}
    return {name: each for word, own in groups.items() for name, each in leaves(own, (*words, word)).items()}


ALL = leaves(typer.main.get_command(app))


def rows() -> list[tuple[list[str], set[str]]]:
    """(commands, keys) of each row of the table; the keys stand before a colon, and those in braces are of inner
    objects."""
    entries = []
    for row in re.findall(r"^\| `paceline .*\|$", DESIGN.read_text(encoding="utf-8"), re.MULTILINE):
        *_, cell = (each.strip() for each in re.split(r" \| ", row.strip("|")))
        match = re.search(r"`paceline (\w+)((?: \w+(?:\|\w+)*)?)", row)
        assert match is not None, row
        names = [f"{match[1]} {name}".strip() for name in match[2].strip().split("|")]
        names = [name for name in names if name in ALL] or [name for name in ALL if name.split()[0] == match[1]]
        flat = re.sub(r"\([^)]*\)|\[[^\]]*\]|\{[^}]*\}", "", cell)
        entries.append((names, {key for key in re.findall(r"\b[a-z_]+\b(?=[,:;]|$)", flat) if cell != "-"}))
    return entries


needs_table = pytest.mark.skipif(not DESIGN.is_file(), reason="the design is not beside this checkout")


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_takes_json(name: str) -> None:
    assert any("--json" in each.opts for each in ALL[name].params), name


@needs_table
def test_the_table_names_commands_that_there_are() -> None:
    table = rows()
    assert len(table) >= 12 and all(names for names, _ in table)


@needs_table
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_line_has_the_keys_of_the_table(name: str) -> None:
    done = CliRunner().invoke(app, [name, *COMMANDS[name], "--json"], catch_exceptions=False)
    line = json.loads(done.stdout.splitlines()[-1])
    keys = next((keys for names, keys in rows() if name in names), set[str]())
    assert (keys - {"as", "their", "reports"}) <= line.keys(), keys - line.keys()
    assert name != "simulate" or {"best_draft_length", "speedup", "curve"} <= keys
