"""The public face stays as it is in tests/public_face.txt: names of the package, commands, their arguments and options.

    python tests/test_face_snapshot.py     # writes the file anew, after a change that is meant

A name that is missing breaks somebody's script; a new one is a promise, and is read in the diff of that file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

import paceline
from paceline.cli import app

SNAPSHOT = Path(__file__).with_name("public_face.txt")


def lines_of(command: Any, words: str) -> list[str]:
    """One line for each command: its words, its arguments, and its options in all spellings."""
    if hasattr(command, "commands"):
        return [line for name, each in sorted(command.commands.items()) for line in lines_of(each, f"{words} {name}")]
    names = [each.name.upper() for each in command.params if each.param_type_name == "argument"]
    spellings = [[*each.opts, *each.secondary_opts] for each in command.params if each.param_type_name == "option"]
    return [" ".join([words, *names, *sorted("/".join(each) for each in spellings)])]


def public_face() -> str:
    names = [f"from paceline import {name}" for name in sorted(paceline.__all__)]
    fields = [f"SamplingParams.{name}" for name in sorted(paceline.SamplingParams.__dataclass_fields__)]
    return "\n".join([*names, *fields, *lines_of(typer.main.get_command(app), "paceline"), ""])


def test_the_public_face_is_as_recorded() -> None:
    assert public_face() == SNAPSHOT.read_text(encoding="utf-8"), f"if this is meant: python {Path(__file__).name}"


if __name__ == "__main__":
    SNAPSHOT.write_text(public_face(), encoding="utf-8")
