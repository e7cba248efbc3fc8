"""What people read of `paceline simulate-serving`: the tables, report.md, and report.html with charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.bench.markup import Section, document, plot_grid
from paceline.bench.markup import table as html_table
from paceline.bench.plots import Series, curves
from paceline.bench.report import markdown_table
from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.simulate.load import LoadFigures, Spread
from paceline.simulate.replay import Compared
from paceline.tables import escaped

WIDE = 170
LOAD_COLUMNS = (
    "load",
    "drafts",
    "tokens/s",
    "first token ms",
    "inter-token ms",
    "answer s",
    "in use",
    "rows",
    "queue",
    "tokens/round",
    "drafted",
    "",
)
COMPARED_COLUMNS = (
    "load",
    "speculate",
    "as",
    "answers",
    "tokens/s measured",
    "simulated",
    "error",
    "first token ms measured",
    "simulated",
    "error",
    "tokens/round measured",
    "simulated",
    "",
)
TIMES = ("first token ms", "inter-token ms", "answer s")
NOTE = (
    "Times are mean / p50 / p99. first token and answer count from the request's arrival; inter-token is each answer's mean "
    "time between tokens after the first. in use: share of the time in which the server worked. rows: decoding together. "
    "queue: requests without a row, mean / most. saturated: more comes than it can finish; times depend on how long that lasts."
)


def load_row(each: LoadFigures) -> tuple[str, ...]:
    """Under LOAD_COLUMNS."""
    return (
        each.load,
        each.policy,
        f"{each.tokens_per_s:,.1f}",
        _cell(each.first_token, 1000, 0),
        _cell(each.inter_token, 1000, 2),
        _cell(each.total, 1, 2),
        f"{each.utilisation:.0%}",
        f"{each.mean_rows:.1f}",
        f"{each.mean_queue:.1f} / {each.max_queue}",
        f"{each.tokens_per_round:.2f}",
        f"{each.drafted_per_round:.1f}",
        f"saturated: can do {each.capacity_per_s:.3g} per second" if each.is_saturated else "",
    )


def compared_row(each: Compared) -> tuple[str, ...]:
    """Under COMPARED_COLUMNS."""
    return (
        each.load,
        each.speculate,
        each.policy,
        str(each.num_requests),
        f"{each.measured_tokens_per_s:,.1f}",
        f"{each.simulated_tokens_per_s:,.1f}",
        f"{each.throughput_error:+.0%}",
        f"{1000 * each.measured_first_token_s:,.0f}",
        f"{1000 * each.simulated_first_token_s:,.0f}",
        f"{each.first_token_error:+.0%}",
        f"{each.measured_tokens_per_round:.2f}",
        f"{each.simulated_tokens_per_round:.2f}",
        "" if each.is_within else "outside",
    )


def compared_rows(found: list[Compared]) -> list[dict[str, Any]]:
    """With the errors, for JSON."""
    errors = ("throughput_error", "first_token_error", "is_within")
    return [asdict(each) | {name: getattr(each, name) for name in errors} for each in found]


def _cell(times: Spread, scale: float, digits: int) -> str:
    values = (times.mean, times.p50, times.p99)
    return " / ".join("-" if value is None else f"{scale * value:,.{digits}f}" for value in values)


def print_loads(title: str, found: list[LoadFigures], to_stderr: bool) -> None:
    """Of times the median and p99."""
    columns = [f"{name} p50 / p99" if name in TIMES else name for name in LOAD_COLUMNS]
    short = [
        tuple(
            cell.partition(" / ")[2] if name in TIMES else cell for name, cell in zip(LOAD_COLUMNS, load_row(each), strict=True)
        )
        for each in found
    ]
    _print(title, columns, short, to_stderr)


def print_compared(title: str, found: list[Compared], to_stderr: bool) -> None:
    _print(title, COMPARED_COLUMNS, [compared_row(each) for each in found], to_stderr)


def _print(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], to_stderr: bool) -> None:
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = WIDE
    table = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_report(
    run: RunFolder, title: str, found: Sequence[LoadFigures] | Sequence[Compared], limits: list[str]
) -> str | None:
    """report.md and report.html; returns a notice when the page had to be left out."""
    loads = [each for each in found if isinstance(each, LoadFigures)]
    compared = [each for each in found if isinstance(each, Compared)]
    columns = LOAD_COLUMNS if loads else COMPARED_COLUMNS
    rows = [load_row(each) for each in loads] or [compared_row(each) for each in compared]
    listed = "\n".join(f"- {sentence}" for sentence in limits)
    run.report(f"# Simulated serving: {title}\n\n{NOTE}\n\n{markdown_table(columns, rows)}\n\n## Limits\n\n{listed}\n")
    try:
        plots = _load_plots(loads) if loads else _compared_plots(compared)
    except ConfigError as error:
        return f"no report.html: {error}"
    figures = f'<p class="note">{escaped(NOTE)}</p>' + html_table(columns, rows)
    notes = "".join(f"<p>{escaped(sentence)}</p>" for sentence in limits)
    sections = [Section("Under load", plot_grid(plots)), Section("Figures", figures), Section("Limits", notes)]
    run.write("report.html", document(f"Simulated serving: {title}", sections))
    return None


Pick = Callable[[LoadFigures], float | None]
_QUANTITIES: tuple[tuple[str, str, tuple[tuple[str, Pick, bool], ...]], ...] = (
    ("Output", "tokens/s", (("", lambda each: each.tokens_per_s, False),)),
    (
        "Time to the first token",
        "ms",
        ((" p50", lambda each: _ms(each.first_token.p50), False), (" p99", lambda each: _ms(each.first_token.p99), True)),
    ),
    ("Time between tokens", "ms", ((" p50", lambda each: _ms(each.inter_token.p50), False),)),
    ("Requests without a row", "mean", (("", lambda each: each.mean_queue, False),)),
)


def _load_plots(found: list[LoadFigures]) -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for xlabel, of in (("requests per second", lambda each: each.rate), ("requests in flight", lambda each: each.concurrency)):
        shown = [each for each in found if of(each) is not None]
        for title, ylabel, lines in _QUANTITIES:
            series = [
                Series(policy + name, *_points([each for each in shown if each.policy == policy], of, pick), color, is_faint)
                for name, pick, is_faint in lines
                for color, policy in enumerate(dict.fromkeys(each.policy for each in shown))
            ]
            full = f"{title}, by {xlabel}"
            made.append((full, curves(full, series, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))))
    return made


def _points(found: list[LoadFigures], of: Callable[[LoadFigures], float | None], pick: Pick) -> tuple[list[float], list[float]]:
    pairs = sorted((x, y) for each in found if (x := of(each)) is not None and (y := pick(each)) is not None)
    return [x for x, _ in pairs], [y for _, y in pairs]


def _compared_plots(found: list[Compared]) -> list[tuple[str, str]]:
    """Simulated over measured, with the line where they are the same."""
    made = []
    for title, unit, scale, pairs in (
        ("Output", "tokens/s", 1.0, [(each.measured_tokens_per_s, each.simulated_tokens_per_s) for each in found]),
        (
            "Time to the first token, p50",
            "ms",
            1e3,
            [(each.measured_first_token_s, each.simulated_first_token_s) for each in found],
        ),
    ):
        points = sorted((scale * x, scale * y) for x, y in pairs)
        most = max(max(pair) for pair in points)
        series = [
            Series("simulated", [x for x, _ in points], [y for _, y in points]),
            Series("as measured", [0.0, most], [0.0, most], 5, True),
        ]
        made.append((title, curves(title, series, xlabel=f"measured {unit}", ylabel=f"simulated {unit}", ylim=(0, None))))
    return made


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds
