"""What people read of `paceline bench serving`: the table, report.md and report.html."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.bench.markup import Section, document, flat, pair_table, plot_grid
from paceline.bench.markup import table as html_table
from paceline.bench.plots import Series, curves
from paceline.bench.report import markdown_table
from paceline.bench.serving import ServingBench, ServingResult
from paceline.bench.serving_figures import Percentiles
from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.tables import escaped

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "load",
    "speculate",
    "answers",
    "tokens/s",
    "speed-up",
    "first token ms",
    "inter-token ms",
    "inter-chunk ms",
    "whole s",
    "tokens/round",
    "identical",
    "reused",
)
WIDE = 190
"""Columns a terminal needs for all percentiles."""
NOTE = (
    "Times are p50 / p90 / p99 over the answers of all repetitions. first token and whole count from when a request was due; "
    "inter-token is each answer's mean time between tokens after the first, inter-chunk the time between two pieces as they "
    "came: a piece holds all tokens of a round. tokens/s: output tokens over wall time, median over repetitions. speed-up: "
    "mean time of an answer with speculation off over the one here. identical: texts equal to those with speculation off. "
    "reused: prompt tokens that the server found in its cache; much of it makes first tokens early."
)


def row(result: ServingResult) -> tuple[str, ...]:
    """The cells of one line, under COLUMNS."""
    failed = f", {result.num_failed} FAILED" if result.num_failed else ""
    return (
        str(result.load),
        result.speculate,
        f"{result.num_answers}{failed}",
        f"{result.tokens_per_s:.1f}",
        "-" if result.speedup is None else f"{result.speedup:.2f}x",
        _cell(result.first_token, 1000, 0),
        _cell(result.inter_token, 1000, 1),
        _cell(result.inter_chunk, 1000, 1),
        _cell(result.total, 1, 2),
        "-" if result.tokens_per_round is None else f"{result.tokens_per_round:.2f}",
        "-" if result.identical is None else f"{result.identical:.0%}",
        "-" if result.reused is None else f"{result.reused:.0%}",
    )


def _cell(times: Percentiles, scale: float, digits: int) -> str:
    values = (times.p50, times.p90, times.p99)
    return " / ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values)


def table(results: list[ServingResult], width: int) -> Table:
    """A rich table for the terminal; a narrow one shows medians only."""
    from rich import box
    from rich.table import Table

    made = Table(*COLUMNS, box=box.SIMPLE_HEAD)
    for result in results:
        made.add_row(*(cell if width >= WIDE else cell.partition(" / ")[0] for cell in row(result)))
    return made


def failure_lines(results: list[ServingResult]) -> list[str]:
    """Why requests failed, and how often."""
    return [
        f"{result.load}, speculate {result.speculate}: {count}x {reason}"
        for result in results
        for reason, count in result.failures.items()
    ]


def about(bench: ServingBench, results: list[ServingResult]) -> str:
    """What was sent, and what the client itself took."""
    busiest = max(result.client_cpu for result in results)
    late = max((result.late.p99 or 0.0 for result in results), default=0.0)
    return (
        f"Up to {bench.config.max_tokens} tokens an answer at temperature {bench.config.temperature:g}, "
        f"{bench.config.repeat} repetitions. This client took at most {busiest:.0%} of a core; 99% of its requests went out "
        f"within {1000 * late:.1f} ms of their time."
    )


def markdown(bench: ServingBench, model: str, results: list[ServingResult]) -> str:
    """report.md."""
    failures = "\n".join(f"- {line}" for line in failure_lines(results)) or "None."
    parts = [
        f"# Serving under load: {model}",
        about(bench, results),
        NOTE,
        markdown_table(COLUMNS, [row(result) for result in results]),
        "## Failures\n\n" + failures,
    ]
    return "\n\n".join(parts) + "\n"


def page(bench: ServingBench, model: str, results: list[ServingResult], config: dict[str, Any]) -> str:
    """report.html. Raises ConfigError when matplotlib is missing."""
    failures = "".join(f"<p>{escaped(line)}</p>" for line in failure_lines(results))
    figures = f'<p class="note">{escaped(NOTE)}</p>' + html_table(COLUMNS, [row(result) for result in results])
    sections = [
        Section("Under load", f"<p>{escaped(about(bench, results))}</p>" + plot_grid(_plots(results))),
        Section("Figures", figures),
        Section("Failures", failures),
        Section("Settings", pair_table(flat(config))),
    ]
    return document(f"Serving under load: {model}", sections)


def _plots(results: list[ServingResult]) -> list[tuple[str, str]]:
    """Closed loops by concurrency, open loops by rate."""
    made: list[tuple[str, str]] = []
    closed = [result for result in results if result.load.concurrency]
    opened = [result for result in results if result.load.rate]
    for shown, xlabel in ((closed, "requests in flight"), (opened, "requests per second")):
        for title, ylabel, lines in _QUANTITIES:
            series = [each for name, pick, faint in lines for each in _series(shown, name, pick, faint)]
            full = f"{title}, by {xlabel}"
            made.append((full, curves(full, series, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))))
    return made


Pick = Callable[[ServingResult], float | None]
_QUANTITIES: tuple[tuple[str, str, tuple[tuple[str, Pick, bool], ...]], ...] = (
    ("Output", "tokens/s", (("", lambda each: each.tokens_per_s, False),)),
    (
        "Time to the first token",
        "ms",
        ((" p50", lambda each: _ms(each.first_token.p50), False), (" p99", lambda each: _ms(each.first_token.p99), True)),
    ),
    (
        "Time between tokens",
        "ms",
        ((" p50", lambda each: _ms(each.inter_token.p50), False), (" p99", lambda each: _ms(each.inter_token.p99), True)),
    ),
    (
        "Time of an answer",
        "s",
        ((" p50", lambda each: each.total.p50, False), (" p99", lambda each: each.total.p99, True)),
    ),
)


def _series(results: list[ServingResult], name: str, pick: Pick, is_faint: bool) -> list[Series]:
    made = []
    for color, contender in enumerate(dict.fromkeys(result.speculate for result in results)):
        own = [result for result in results if result.speculate == contender]
        own.sort(key=lambda result: result.load.concurrency or result.load.rate or 0.0)
        places = [(result.load.concurrency or result.load.rate or 0.0, pick(result)) for result in own]
        points = [(x, y) for x, y in places if y is not None]
        made.append(Series(contender + name, [x for x, _ in points], [y for _, y in points], color, is_faint))
    return made


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def write_run(run: RunFolder, bench: ServingBench, model: str, line: dict[str, Any], config: dict[str, Any]) -> str | None:
    """report.md, report.html and results.json; returns a notice when the page had to be left out."""
    results: list[ServingResult] = line["results"]
    run.report(markdown(bench, model, results))
    run.write_json("results.json", line)
    try:
        run.write("report.html", page(bench, model, results, config))
    except ConfigError as error:
        return f"no report.html: {error}"
    return None
