"""What people read of `paceline bench serving`: the table, report.md and report.html."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.bench.evaluation_file import flat
from paceline.bench.markup import Section, document, pair_table, plot_grid
from paceline.bench.plots import LoadPlot, load_plots
from paceline.bench.serving import ServingBench, ServingResult
from paceline.errors import ConfigError
from paceline.figures import Spread
from paceline.runlog import RunFolder
from paceline.tables import Column, Table, escaped

NOTE = (
    "Times are p50 / p90 / p99 over the answers of all repetitions. first token and whole count from when a request was due; "
    "inter-token is each answer's mean time between tokens after the first, inter-chunk the time between two pieces as they "
    "came: a piece holds all tokens of a round. tokens/s: output tokens over wall time, median over repetitions. speed-up: "
    "mean time of an answer with speculation off over the one here. identical: texts equal to those with speculation off. "
    "reused: prompt tokens that the server found in its cache; much of it makes first tokens early."
)


def _times(name: str, of: Callable[[ServingResult], Spread], scale: float, digits: int) -> Column:
    """A narrow terminal shows the median only."""

    def text(result: ServingResult) -> str:
        values = (of(result).p50, of(result).p90, of(result).p99)
        return " / ".join("-" if value is None else f"{scale * value:.{digits}f}" for value in values)

    return Column(name, text, cut=" / ")


COLUMNS = (
    Column("load", lambda each: each.load),
    Column("speculate", lambda each: each.speculate),
    Column("answers", lambda each: f"{each.num_answers}" + (f", {each.num_failed} FAILED" if each.num_failed else "")),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:.1f}", "right"),
    Column("speed-up", lambda each: each.speedup, "{:.2f}x", "right"),
    _times("first token ms", lambda each: each.first_token, 1000, 0),
    _times("inter-token ms", lambda each: each.inter_token, 1000, 1),
    _times("inter-chunk ms", lambda each: each.inter_chunk, 1000, 1),
    _times("whole s", lambda each: each.total, 1, 2),
    Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}", "right"),
    Column("identical", lambda each: each.identical, "{:.0%}", "right"),
    Column("reused", lambda each: each.reused, "{:.0%}", "right"),
)


def table(results: list[ServingResult]) -> Table:
    """A line for each load and contender."""
    return Table(COLUMNS, results, width=190)


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
    head = [f"# Serving under load: {model}", about(bench, results), NOTE]
    return "\n\n".join([*head, table(results).markdown(), "## Failures", failures]) + "\n"


def page(bench: ServingBench, model: str, results: list[ServingResult], config: dict[str, Any]) -> str:
    """report.html. Raises ConfigError when matplotlib is missing."""
    closed = [(float(each.load.concurrency), each.speculate, each) for each in results if each.load.concurrency]
    opened = [(each.load.rate, each.speculate, each) for each in results if each.load.rate]
    plots = load_plots(PLOTS, closed, "requests in flight") + load_plots(PLOTS, opened, "requests per second")
    sections = [
        Section("Under load", f"<p>{escaped(about(bench, results))}</p>" + plot_grid(plots)),
        Section("Figures", f'<p class="note">{escaped(NOTE)}</p>' + table(results).html()),
        Section("Failures", "".join(f"<p>{escaped(line)}</p>" for line in failure_lines(results))),
        Section("Settings", pair_table(flat(config))),
    ]
    return document(f"Serving under load: {model}", sections)


PLOTS = (
    LoadPlot("Output", "tokens/s", {"": lambda each: each.tokens_per_s}),
    LoadPlot.of_times("Time to the first token", "ms", lambda each: each.first_token),
    LoadPlot.of_times("Time between tokens", "ms", lambda each: each.inter_token),
    LoadPlot.of_times("Time of an answer", "s", lambda each: each.total),
)


def write_run(run: RunFolder, bench: ServingBench, model: str, line: dict[str, Any], config: dict[str, Any]) -> str | None:
    """report.md, report.html and results.json; returns a notice when the page had to be left out."""
    results: list[ServingResult] = line["results"]
    run.report(markdown(bench, model, results))
    run.results(line)
    try:
        run.write("report.html", page(bench, model, results, config))
    except ConfigError as error:
        return f"no report.html: {error}"
    return None
