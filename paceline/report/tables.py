"""Progress messages of long work, and one table for the terminal, Markdown reports and HTML reports.

    columns = [Column("drafter", lambda row: row.name), Column("tokens/s", lambda row: row.rate, "{:.1f}", "right")]
    table = Table(columns, results, title="Decoding", notes=["rate: median of 3 repetitions"])
    table.show()             # to stderr
    {{ table(results) }}     # in a template of `report/templates`, for report.md and report.html

A row is any object; each column reads its cell from it. Library calls report their progress to a `Progress`; the
commands' implementation writes to the terminal. Imports no PyTorch, and rich only when a table is shown.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.report.statistics import Interval, Spread

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MISSING = "-"
"""Text of a cell that has no value."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its name, and how to read and format its cells."""

    name: str
    cell: Callable[[Any], Any]
    """Function that returns the cell's value for a row; None is shown as a dash."""
    form: str = "{}"
    """Format string for `str.format`, such as "{:.1f} s"."""
    align: Literal["left", "right"] = "left"
    cut: str = ""
    """Separator: a narrow terminal drops it and the rest of the cell, as " [" drops the interval of "1.50 [1.40,
    1.60]"."""
    is_spare: bool = False
    """True if the column is dropped when the terminal is too narrow for all columns."""

    def text(self, record: Any) -> str:
        value = self.cell(record)
        return MISSING if value is None else self.form.format(value)


@dataclass(frozen=True, slots=True)
class Table:
    """A table for the terminal, Markdown or HTML. Each object in `rows` is shown as one row, whose cells `columns` read
    from it. `notes`: sentences below the table."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    notes: Sequence[str] = ()
    width: int = 160
    """Terminal width, in characters, from which no cell is cut at `Column.cut`."""

    def texts(self) -> list[list[str]]:
        """Return the cells of every row as text."""
        return [[column.text(record) for column in self.columns] for record in self.rows]

    def markdown(self) -> str:
        """Return the table in Markdown; its title becomes a heading of the second level."""
        rows = [[column.name for column in self.columns], *self.texts()]
        lines = ["| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |" for row in rows]
        rule = "| " + " | ".join("---:" if column.align == "right" else "---" for column in self.columns) + " |"
        heading = [f"## {self.title}"] if self.title else []
        return "\n\n".join([*heading, "\n".join([lines[0], rule, *lines[1:]]), *self.notes])

    def show(self, *, stderr: bool = True) -> None:
        """Print the table to stderr, or to stdout if `stderr` is False. On a narrow terminal, cells are shortened; in a
        file or pipe they are complete."""
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
        """Return (columns, cell texts of each row) for a terminal of `width` characters. A table that is wider is
        shortened in two steps: each cell is cut at its `Column.cut`; if that is not enough, columns with `is_spare` are
        left out."""
        columns, rows = list(self.columns), self.texts()
        if width >= self.width:
            return columns, rows
        pairs = [zip(columns, row, strict=True) for row in rows]
        rows = [[cell.partition(column.cut)[0] if column.cut else cell for column, cell in row] for row in pairs]
        if _needed(columns, rows) > width:
            places = [place for place, column in enumerate(columns) if not column.is_spare]
            columns, rows = [columns[place] for place in places], [[row[place] for place in places] for row in rows]
        return columns, rows

    def stacked(self, width: int) -> str:
        """Return each row as one line of `name: value` pairs, for a terminal that is too narrow for columns."""
        columns, rows = self.cells(width)
        pairs = [[(column.name, cell) for column, cell in zip(columns, row, strict=True) if cell] for row in rows]
        named = [", ".join(f"{name}: {cell}" if name else cell for name, cell in row) for row in pairs]
        return "\n".join([*([self.title] if self.title else []), *named])

    def rich(self, width: int) -> RichTable:
        """Return the rich table for a terminal of `width` characters."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, title=Text(self.title) if self.title else None, title_justify="left")
        columns, rows = self.cells(width)
        for column in columns:
            table.add_column(Text(column.name), justify=column.align)
        for cells in rows:
            table.add_row(*map(Text, cells))
        return table


def _needed(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Return the characters that the columns need next to each other; a heading may be broken between words."""
    widths = [max(map(len, column.name.split()), default=0) for column in columns]
    widths = [max(width, *(len(row[place]) for row in rows), 0) for place, width in enumerate(widths)]
    return sum(widths) + 2 * len(widths)


def block() -> str:
    """Return the block character that bars are drawn with; "#" if stdout's encoding does not have it (LANG=C)."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"


def ignore(*_: object) -> None:
    """Do nothing: a callback for callers that need no progress reports."""


class Advance(Protocol):
    """Type of a progress callback, called each time one more item is done."""

    def __call__(self, text: str, share: float | None = None, /) -> None:
        """`text`: the current item. `share`: completed share of all work (0 to 1), if it differs from the share of
        items."""


class Progress:
    """Base class for receivers of progress reports from library calls; ignores all reports. Its subclass
    `commands.shared.TerminalProgress` writes them to stderr."""

    def say(self, text: str) -> None:
        """Report one line of text."""

    def loaded(self, llm: Any) -> None:
        """Report that the model `llm` (an `engine.llm.LLM`) is loaded."""

    def bar(self, what: str, total: int) -> contextlib.AbstractContextManager[Advance]:
        """Return a context manager that shows a progress bar named `what`. It yields a callback, which the caller calls
        after each of `total` items."""
        return contextlib.nullcontext(ignore)

    def table(self, table: Table) -> None:
        """Report a finished table of results."""


SILENT = Progress()


def spread_column(
    name: str, of: Callable[[Any], Spread], scale: float, digits: int, shown: Sequence[str] = ("p50", "p90", "p99")
) -> Column:
    """Return a column that shows percentiles of a `Spread`, such as "p50 / p90 / p99"; a narrow terminal shows only the
    first. `of`: function that returns the Spread of a row. `shown`: fields of the Spread to show. `scale`: factor, such
    as 1000 for milliseconds. `digits`: decimals."""

    def cell(record: Any) -> str:
        values = [getattr(of(record), name) for name in shown]
        return " / ".join(MISSING if value is None else f"{scale * value:,.{digits}f}" for value in values)

    return Column(name, cell, cut=" / ")


def with_interval(value: float | None, interval: Interval | None, form: str = "{:.2f}", unit: str = "") -> str | None:
    """Format a value with its unit and interval, as in "1.50x [1.40, 1.60]"; None without a value. `form`: format
    string of each number."""
    if value is None:
        return None
    low, high = interval or (None, None)
    text = form.format(value) + unit
    return text if low is None or high is None else f"{text} [{form.format(low)}, {form.format(high)}]"


def printable(text: str) -> str:
    """Replace control characters and unpaired surrogates, which pages and plots cannot contain, by U+FFFD."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten nested settings to (name, value) pairs: {"bench": {"seed": 0}} gives [("bench.seed", 0)]."""
    pairs: list[tuple[str, Any]] = []
    for key, value in settings.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old value, new value) for each nested setting that differs. A missing value is None."""
    old, new = dict(flat(before)), dict(flat(now))
    return {name: (old.get(name), new.get(name)) for name in sorted(old | new) if old.get(name) != new.get(name)}
