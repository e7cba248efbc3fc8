"""What long work shows: how far it is, and one table for the terminal, for Markdown and for the pages of reports.

    columns = [Column("drafter", lambda each: each.name), Column("tokens/s", lambda each: each.rate, "{:.1f}", align="right")]
    table = Table(columns, results, title="Decoding", notes=["rate: median of 3 repetitions"])
    table.show()            # to stderr
    {{ table(made) }}       # in a template of `report/templates`, for report.md and report.html

A row is any record; each column knows how to read its cell from one. Library calls tell how far they are to a `Progress`;
that of the commands writes to the terminal. No torch here, and rich only when a table is shown.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.report.statistics import Spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MISSING = "-"
"""What a cell without a value shows."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    name: str
    """The heading."""
    cell: Callable[[Any], Any]
    """The value of a row's record; None is shown as a dash."""
    form: str = "{}"
    """How a value becomes text, as of `str.format`: "{:.1f} s"."""
    align: Literal["left", "right"] = "left"
    cut: str = ""
    """A narrow terminal leaves out everything from this text on: " [" leaves out the interval of "1.50 [1.40, 1.60]"."""
    is_spare: bool = False
    """Left out where the terminal has no place for all columns."""

    def text(self, record: Any) -> str:
        value = self.cell(record)
        return MISSING if value is None else self.form.format(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Records, a line each, under columns; `notes` are sentences that stand below."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    notes: Sequence[str] = ()
    width: int = 160
    """Letters a terminal needs for whole cells; a narrower one shows them as `Column.cut` says."""

    def texts(self) -> list[list[str]]:
        """Every row's cells as text."""
        return [[column.text(record) for column in self.columns] for record in self.rows]

    def show(self, *, stderr: bool = True) -> None:
        """Print to the terminal; where there is none, with whole cells."""
        from rich.console import Console

        console = Console(stderr=stderr)
        if not console.is_terminal:
            console.width = self.width
        is_wide = not console.is_terminal or _needed(*self.cells(console.width)) <= console.width
        if is_wide:
            console.print(self.rich(console.width))
        else:
            console.print(self.stacked(console.width), markup=False, highlight=False)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def cells(self, width: int) -> tuple[list[Column], list[list[str]]]:
        """The columns and cells that a terminal of so many letters shows."""
        columns, rows = list(self.columns), self.texts()
        if width >= self.width:
            return columns, rows
        pairs = [zip(columns, row, strict=True) for row in rows]
        rows = [[cell.partition(each.cut)[0] if each.cut else cell for each, cell in row] for row in pairs]
        if _needed(columns, rows) > width:
            kept = [place for place, each in enumerate(columns) if not each.is_spare]
            columns, rows = [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
        return columns, rows

    def stacked(self, width: int) -> str:
        """Every row as lines of `name: value`, where columns have no place beside one another."""
        columns, rows = self.cells(width)
        pairs = [[(each.name, cell) for each, cell in zip(columns, row, strict=True) if cell] for row in rows]
        named = [", ".join(f"{name}: {cell}" if name else cell for name, cell in row) for row in pairs]
        return "\n".join([*([self.title] if self.title else []), *named])

    def rich(self, width: int) -> RichTable:
        """For a terminal of so many letters."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(box=box.SIMPLE_HEAD, title=Text(self.title) if self.title else None, title_justify="left")
        columns, rows = self.cells(width)
        for column in columns:
            made.add_column(Text(column.name), justify=column.align)
        for cells in rows:
            made.add_row(*map(Text, cells))
        return made


def _needed(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Letters that the columns need beside one another; a heading may be broken between its words."""
    widths = [max(map(len, each.name.split()), default=0) for each in columns]
    widths = [max(width, *(len(row[place]) for row in rows), 0) for place, width in enumerate(widths)]
    return sum(widths) + 2 * len(widths)


def block() -> str:
    """A filled cell of a bar: "#" where the terminal's letters have no block (LANG=C)."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"


def ignore(*_: object) -> None:
    """For whoever is told of progress and does not want to know."""


class Advance(Protocol):
    """One more item is done."""

    def __call__(self, text: str, share: float | None = None, /) -> None:
        """`text`: what is under way. `share`: how much of the whole is done, where the number of items does not say it."""


class Progress:
    """Shows nothing. `commands.shared.TerminalProgress` writes each of these to stderr."""

    def say(self, text: str) -> None:
        """One line of news."""

    def loaded(self, llm: Any) -> None:
        """The model, an `engine.llm.LLM`, is loaded."""

    def bar(self, what: str, total: int) -> contextlib.AbstractContextManager[Advance]:
        """Within, the function given is called once for each of `total` items."""
        return contextlib.nullcontext(ignore)

    def table(self, table: Table) -> None:
        """Called with each finished table of figures; shows nothing here."""


SILENT = Progress()


def spread_column(
    name: str, of: Callable[[Any], Spread], scale: float, digits: int, shown: Sequence[str] = ("p50", "p90", "p99")
) -> Column:
    """Mean and percentiles of seconds, in another unit; a narrow terminal shows the first only."""

    def cell(record: Any) -> str:
        values = [getattr(of(record), each) for each in shown]
        return " / ".join(MISSING if value is None else f"{scale * value:,.{digits}f}" for value in values)

    return Column(name, cell, cut=" / ")


def printable(text: str) -> str:
    """Control characters and halves of characters, which neither a page nor a plot can hold, become U+FFFD."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """{"bench": {"seed": 0}} -> [("bench.seed", 0)]"""
    found: list[tuple[str, Any]] = []
    for key, value in settings.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (old value, new value) of each setting that is not the same in both; None where there is none."""
    old, new = dict(flat(before)), dict(flat(now))
    return {name: (old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name)}
