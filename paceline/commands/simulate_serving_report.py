"""What people read of `paceline simulate-serving`: the tables, report.md, and report.html with charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from paceline.bench.markup import Section, document, plot_grid
from paceline.bench.plots import LoadPlot, Series, curves, load_plots
from paceline.errors import ConfigError
from paceline.runlog import RunFolder
from paceline.simulate.load import LoadFigures, Spread
from paceline.simulate.replay import Compared
from paceline.tables import Column, Table, escaped

NOTE = (
    "Times are mean / p50 / p99. first token and answer count from the request's arrival; inter-token is each answer's mean "
    "time between tokens after the first. in use: share of the time in which the server worked. rows: decoding together. "
    "queue: requests without a row, mean / most. saturated: more comes than it can finish; times depend on how long that lasts."
)


def _times(name: str, of: Callable[[LoadFigures], Spread], scale: float, digits: int) -> Column:
    def text(each: LoadFigures) -> str:
        values = (of(each).mean, of(each).p50, of(each).p99)
        return " / ".join("-" if value is None else f"{scale * value:,.{digits}f}" for value in values)

    return Column(name, text)


LOAD_COLUMNS = (
    Column("load", lambda each: each.load),
    Column("drafts", lambda each: each.policy),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:,.1f}", "right"),
    _times("first token ms", lambda each: each.first_token, 1000, 0),
    _times("inter-token ms", lambda each: each.inter_token, 1000, 2),
    _times("answer s", lambda each: each.total, 1, 2),
    Column("in use", lambda each: each.utilisation, "{:.0%}", "right"),
    Column("rows", lambda each: each.mean_rows, "{:.1f}", "right"),
    Column("queue", lambda each: f"{each.mean_queue:.1f} / {each.max_queue}"),
    Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}", "right"),
    Column("drafted", lambda each: each.drafted_per_round, "{:.1f}", "right"),
    Column("", lambda each: f"saturated: can do {each.capacity_per_s:.3g} per second" if each.is_saturated else ""),
)
COMPARED_COLUMNS = (
    Column("load", lambda each: each.load),
    Column("speculate", lambda each: each.speculate),
    Column("as", lambda each: each.policy),
    Column("answers", lambda each: each.num_requests, align="right"),
    Column("tokens/s measured", lambda each: each.measured_tokens_per_s, "{:,.1f}", "right"),
    Column("simulated", lambda each: each.simulated_tokens_per_s, "{:,.1f}", "right"),
    Column("error", lambda each: each.throughput_error, "{:+.0%}", "right"),
    Column("first token ms measured", lambda each: 1000 * each.measured_first_token_s, "{:,.0f}", "right"),
    Column("simulated", lambda each: 1000 * each.simulated_first_token_s, "{:,.0f}", "right"),
    Column("error", lambda each: each.first_token_error, "{:+.0%}", "right"),
    Column("tokens/round measured", lambda each: each.measured_tokens_per_round, "{:.2f}", "right"),
    Column("simulated", lambda each: each.simulated_tokens_per_round, "{:.2f}", "right"),
    Column("", lambda each: "" if each.is_within else "outside"),
)


def loads_table(found: Sequence[LoadFigures] | Sequence[Compared], title: str = "") -> Table:
    """A line for each load simulated, or for each compared with a measurement."""
    is_loads = bool(found) and isinstance(found[0], LoadFigures)
    return Table(LOAD_COLUMNS if is_loads else COMPARED_COLUMNS, found, title=title, width=170)


def compared_rows(found: list[Compared]) -> list[dict[str, Any]]:
    """With the errors, for JSON."""
    errors = ("throughput_error", "first_token_error", "is_within")
    return [asdict(each) | {name: getattr(each, name) for name in errors} for each in found]


def write_report(
    run: RunFolder, title: str, found: Sequence[LoadFigures] | Sequence[Compared], limits: list[str]
) -> str | None:
    """report.md and report.html; returns a notice when the page had to be left out."""
    loads = [each for each in found if isinstance(each, LoadFigures)]
    compared = [each for each in found if isinstance(each, Compared)]
    shown = loads_table(found)
    listed = "\n".join(f"- {sentence}" for sentence in limits)
    run.report(f"# Simulated serving: {title}\n\n{NOTE}\n\n{shown.markdown()}\n\n## Limits\n\n{listed}\n")
    try:
        plots = _load_plots(loads) if loads else _compared_plots(compared)
    except ConfigError as error:
        return f"no report.html: {error}"
    figures = f'<p class="note">{escaped(NOTE)}</p>' + shown.html()
    notes = "".join(f"<p>{escaped(sentence)}</p>" for sentence in limits)
    sections = [Section("Under load", plot_grid(plots)), Section("Figures", figures), Section("Limits", notes)]
    run.write("report.html", document(f"Simulated serving: {title}", sections))
    return None


PLOTS = (
    LoadPlot("Output", "tokens/s", {"": lambda each: each.tokens_per_s}),
    LoadPlot.of_times("Time to the first token", "ms", lambda each: each.first_token),
    LoadPlot.of_times("Time between tokens", "ms", lambda each: each.inter_token),
    LoadPlot("Requests without a row", "mean", {"": lambda each: each.mean_queue}),
)


def _load_plots(found: list[LoadFigures]) -> list[tuple[str, str]]:
    opened = [(each.rate, each.policy, each) for each in found if each.rate is not None]
    closed = [(float(each.concurrency), each.policy, each) for each in found if each.concurrency is not None]
    return load_plots(PLOTS, opened, "requests per second") + load_plots(PLOTS, closed, "requests in flight")


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
