"""How far long work is: library calls tell it to a `Progress`; that of the commands writes to the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.tables import Table


def ignore(*_: object) -> None:
    """For whoever is told of progress and does not want to know."""


class Progress:
    """Shows nothing. `commands.terminal.TerminalProgress` writes each of these to stderr."""

    def say(self, text: str) -> None:
        """One line of news."""

    def loaded(self, llm: Any) -> None:
        """The model, an `engine.llm.LLM`, is loaded."""

    def bar(self, what: str, total: int) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Within, the function given is called once for each of `total` items, with what is under way."""
        return contextlib.nullcontext(lambda text: None)

    def table(self, table: Table) -> None:
        """Figures are ready."""


SILENT = Progress()
