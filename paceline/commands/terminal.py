"""Lines, bars and progress on stderr, and the one JSON object on stdout."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.progress import Progress
from paceline.runlog import plain

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.tables import Table


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_json(line: dict[str, Any]) -> None:
    print(json.dumps(plain(line)), flush=True)


def introduce(llm: LLM) -> str:
    """What "auto" and "default" came to, and the memory taken."""
    from paceline.bench.pages import render
    from paceline.model.backends import form_of

    return render("loaded.txt", llm=llm, form=form_of(llm.target)).rstrip()


class TerminalProgress(Progress):
    """Writes to stderr what a library call tells of its progress."""

    def say(self, text: str) -> None:
        say(text)

    def loaded(self, llm: LLM) -> None:
        say(introduce(llm))

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda text: bar.update(task, advance=1, description=text)

    def table(self, table: Table) -> None:
        table.show()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the given function true: an answer ends between two rounds. A second one raises."""
    pressed = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
