"""What people read of `paceline bench serving`: the table, report.md and report.html."""

from __future__ import annotations

from typing import Any

from paceline.bench.pages import write_load_report
from paceline.bench.plots import LoadPlot, load_plots
from paceline.bench.serving import ServingBench, ServingResult
from paceline.errors import ConfigError
from paceline.progress import Progress
from paceline.runlog import RunFolder
from paceline.tables import Column, Table, flat, spread_column

NOTE = (
    "Times are p50 / p90 / p99 over the answers of all repetitions. first token and whole count from when a request was due; "
    "inter-token is each answer's mean time between tokens after the first, inter-chunk the time between two pieces as they "
    "came: a piece holds all tokens of a round. tokens/s: output tokens over wall time, median over repetitions. speed-up: "
    "mean time of an answer with speculation off over the one here. identical: texts equal to those with speculation off. "
    "reused: prompt tokens that the server found in its cache; much of it makes first tokens early."
)


COLUMNS = (
    Column("load", lambda each: each.load),
    Column("speculate", lambda each: each.speculate),
    Column("answers", lambda each: f"{each.num_answers}" + (f", {each.num_failed} FAILED" if each.num_failed else "")),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:.1f}", "right"),
    Column("speed-up", lambda each: each.speedup, "{:.2f}x", "right"),
    spread_column("first token ms", lambda each: each.first_token, 1000, 0),
    spread_column("inter-token ms", lambda each: each.inter_token, 1000, 1),
    spread_column("inter-chunk ms", lambda each: each.inter_chunk, 1000, 1),
    spread_column("whole s", lambda each: each.total, 1, 2),
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


PLOTS = (
    LoadPlot("Output", "tokens/s", lambda each: each.tokens_per_s),
    LoadPlot("Time to the first token", "ms", lambda each: each.first_token),
    LoadPlot("Time between tokens", "ms", lambda each: each.inter_token),
    LoadPlot("Time of an answer", "s", lambda each: each.total),
)


def report(
    run: RunFolder, bench: ServingBench, line: dict[str, Any], settings: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """report.md, report.html and results.json; returns what they hold. Raises ConfigError when every request failed."""
    results = bench.results()
    line = {"results": results, **line}
    run.results(line)
    by_load = [(each.load.rate, each.load.concurrency, each.speculate, each) for each in results]
    notice = write_load_report(
        run,
        lambda: load_plots(PLOTS, by_load),
        title=f"Serving under load: {line['model']}",
        about=about(bench, results),
        note=NOTE,
        figures=table(results),
        listed={"Failures": failure_lines(results)},
        settings=flat(settings),
    )
    progress.table(table(results))
    progress.say(about(bench, results))
    for failure in failure_lines(results):
        progress.say(f"FAILED: {failure}")
    if notice:
        progress.say(notice)
    progress.say(f"report, figures and raw answers: {run.path}")
    if all(result.num_failed == result.num_answers for result in results):
        raise ConfigError(f"every request failed, first with: {next(iter(results[0].failures))}")
    return {**line, "run": run.path}
