"""Command lines of ours, read and not run: of documents and of what is rendered."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from paceline.cli import app


def parse(words: list[str]) -> dict[str, Any]:
    """The values of a command's options, by parameter. Raises the usage error that the command would raise."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="paceline")
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
    return command.make_context(name, list(words)).params


def section(page: Path, heading: str) -> str:
    """The text of a Markdown page under this heading, up to the next one of any level."""
    parts = re.split(r"^##+ (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def shell_lines(text: str) -> list[str]:
    """Command lines of all fenced blocks of shell in a text: continued ones whole, without comments. A here document
    stays with its command."""
    lines = list[str]()
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        end = ""
        for line in block.splitlines():
            if end or (lines and lines[-1].endswith("\\")):
                lines[-1] += "\n" + line
                end = "" if line == end else end
            else:
                here = re.search(r"<<'(\w+)'$", line)
                end = here[1] if here else ""
                lines.append(re.sub(r"\s+# [^'\"]*$", "", line))
    return [line for line in lines if line.strip()]


def in_blocks(file: Path) -> Iterator[str]:
    """Lines of shell of a Markdown page that call paceline: continued ones whole, without comments."""
    fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for block in fenced:
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\S+=\S+ )*(\S*/)?paceline ", line):
                yield line


def words_of(line: str) -> list[str]:
    """Arguments of paceline in such a line: up to a pipe, a semicolon, or a program that follows."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words = list(lexer)
    begin = next(place for place, word in enumerate(words) if word.rsplit("/", 1)[-1] == "paceline") + 1
    end = next(
        (place for place, word in enumerate(words) if word and set(word) <= set("|;&<>") and place >= begin), len(words)
    )
    return words[begin:end]
