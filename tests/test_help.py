"""Help texts: grouped, quick to print, whole lines, and examples that are commands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from called import Call, call
from command_lines import parse, words_of
from typer.testing import CliRunner

from paceline.cli import app
from paceline.commands.catalogue import SECTIONS

__all__ = ["call"]
ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_help_imports_no_command_and_nothing_heavy() -> None:
    """Imports are what `--help` spends its time on; seconds would depend on the machine."""
    code = (
        "import sys; from typer.testing import CliRunner; from paceline.cli import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print(*sorted(m for m in sys.modules if m.startswith('paceline')));"
        "print(*({'torch', 'transformers', 'rich', 'numpy', 'yaml', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    ours, heavy = done.stdout.splitlines()
    names = ["paceline", "paceline.cli", "paceline.commands", "paceline.commands.catalogue", "paceline.errors"]
    assert ours.split() == names
    assert not heavy


def commands_of(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield " ".join((*words, name)), command
        if hasattr(command, "commands"):
            yield from commands_of(command, (*words, name))


def help_of(words: str) -> str:
    return CliRunner().invoke(app, [*words.split(), "--help"], prog_name="paceline", terminal_width=80).output


COMMANDS = dict(commands_of(typer.main.get_command(app)))


@pytest.mark.parametrize("words", ["", *(name for name, command in COMMANDS.items() if hasattr(command, "commands"))])
def test_each_command_is_one_whole_line_of_help(words: str) -> None:
    shown = help_of(words).splitlines()
    command: Any = COMMANDS.get(words) or typer.main.get_command(app)
    for entries in command.sections.values():
        for name, entry in entries.items():
            (line,) = (line for line in shown if line.split()[:1] == [name])
            assert line.endswith(f"  {entry.summary}") and len(line) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not hasattr(command, "commands")])
def test_help_begins_with_the_summary_and_its_examples_are_commands(name: str) -> None:
    *group, last = name.split()
    entries = COMMANDS[group[0]].sections if group else SECTIONS
    (summary,) = (part[last].summary for part in entries.values() if last in part)
    assert COMMANDS[name].help.split("\n\n")[0] == summary
    examples = help_of(name).split("\n  Examples:\n")[1].split("\n\n")[0].replace("\\\n", " ")
    lines = [line.strip() for line in examples.splitlines()]
    assert len(lines) >= 1 and all(line.startswith("paceline ") for line in lines)
    for line in lines:
        parse(words_of(line))


@pytest.mark.parametrize(
    "name", [name for name, command in COMMANDS.items() if any(each.required for each in command.params)]
)
def test_what_is_missing_is_shown_by_an_example(name: str, call: Call) -> None:
    """The first of the command's help, on the line of the error."""
    done = call(*name.split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    shown = re.fullmatch(r"error: Missing (?:argument|option) '\S+', as in (paceline .*) \(see --help\)\n", done.stderr)
    assert shown is not None, done.stderr
    assert shown[1].startswith(f"paceline {name} ")
    parse(words_of(shown[1]))


def test_the_example_of_what_is_missing_is_one_line(call: Call) -> None:
    """With the lines that go on behind a backslash."""
    example = "paceline adapt gate runs/mine/drafter --traces traces --cluster tickets --incumbent default"
    assert f"Missing argument 'drafter', as in {example} (see --help)" in call("adapt", "gate").stderr


@pytest.mark.slow
def test_many_options_stand_in_sections_with_what_everybody_needs_first() -> None:
    def headings(*words: str) -> list[str]:
        lines = CliRunner().invoke(app, [*words, "--help"]).output.splitlines()
        return [line.removesuffix(":") for line in lines if line and line[0].isupper() and line.endswith(":")]

    assert headings("train")[:3] == ["Model", "Prompts", "Options"] and {"Drafter", "Training"} < {*headings("train")}
    assert headings("generate")[:2] == ["Arguments", "Model"] and "Sampling" in headings("generate")
    assert headings("models") == ["Options"]
