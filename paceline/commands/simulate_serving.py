"""`paceline simulate-serving`: simulate the loads or replay a run; the table, and in a run folder report.md and report.html."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json
from paceline.commands.simulate import print_notes
from paceline.commands.terminal import say
from paceline.runlog import RunFolder
from paceline.simulate.config import CostsConfig, ServingConfig
from paceline.tables import Column, Table, spread_column

if TYPE_CHECKING:
    from paceline.bench.pages import Plot
    from paceline.simulate.answer import ServerAnswer
    from paceline.simulate.replay import Compared

NOTE = (
    "Times are p50 / p99 / mean. first token and answer count from the request's arrival; inter-token is each answer's mean "
    "time between tokens after the first. in use: share of the time in which the server worked. rows: decoding together. "
    "queue: requests without a row, mean / most. saturated: more comes than it can finish; times depend on how long that lasts."
)


SHOWN = ("p50", "p99", "mean")
LOAD_COLUMNS = (
    Column("load", lambda each: each.load),
    Column("drafts", lambda each: each.policy),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:,.1f}", "right"),
    spread_column("first token ms", lambda each: each.first_token, 1000, 0, SHOWN),
    spread_column("inter-token ms", lambda each: each.inter_token, 1000, 2, SHOWN),
    spread_column("answer s", lambda each: each.total, 1, 2, SHOWN),
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


@options
def simulate_serving(
    costs: Annotated[
        CostsConfig,
        Without("expert_locality", "per_layer", "toy"),
        Changed(table=Opt("--steps", "--table")),
    ],
    config: Annotated[ServingConfig, Changed(policy=Opt(comma=True), against=Opt(metavar="RUN_FOLDER"))],
    out: Annotated[Path | None, typer.Option(help="Also write figures, a report and charts into this run folder.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """A server under load before there is one: first token, inter-token time, throughput and queue, by load and draft length.

    Requests come at random times, are prefilled in chunks and decode together, as the engine does it; a round takes what a
    table of measured steps or the roofline says, and drafts stand as the acceptance curve says. No model is loaded.

    Example: paceline simulate-serving --steps runs/steps --rate 0.5,1,2 --acceptance survival:.77,.57,.42

    Example: paceline simulate-serving --steps runs/steps --against runs/bench-serving-1
    """
    from paceline.simulate.answer import simulate_server
    from paceline.simulate.replay import FIRST_TOKEN_WITHIN, THROUGHPUT_WITHIN

    answer = simulate_server(costs, config)
    _figures_table(answer).show(stderr=as_json)
    if config.against:
        say(
            f"{answer.num_within} of {len(answer.compared)} within {THROUGHPUT_WITHIN:.0%} of the measured throughput and "
            f"{FIRST_TOKEN_WITHIN:.0%} of the median time to the first token; drafts stood as "
            f"{'told' if config.acceptance else 'the run recorded'}: "
            + (", ".join(f"{share:.2f}" for share in answer.survival) or "nothing was drafted")
        )
    print_notes(answer.setup, stderr=as_json)
    line = answer.as_json(config)
    if out:
        run = RunFolder.create("simulate-serving", asdict(costs) | asdict(config), out)
        run.write_json("results.json", line)
        if notice := _write_report(run, answer):
            say(notice)
        say(f"report and figures: {run.path}")
        line["run"] = run.path
    return line


def _figures_table(answer: ServerAnswer) -> Table:
    """A line for each simulated load, or for each that was compared with a measurement."""
    title = f"{answer.setup.title}, {answer.server.max_rows} rows"
    columns, rows = (COMPARED_COLUMNS, answer.compared) if answer.compared else (LOAD_COLUMNS, answer.loads)
    return Table(columns, rows, title=title, width=180)


def _write_report(run: RunFolder, answer: ServerAnswer) -> str | None:
    """report.md and report.html; returns a notice when the page had to be left out."""
    from paceline.bench.pages import LOAD_PLOTS, LoadPlot, load_plots, write_load_report

    plots = (*LOAD_PLOTS, LoadPlot("Requests without a row", "mean", lambda each: each.mean_queue))
    by_load = [(each.rate, each.concurrency, each.policy, each) for each in answer.loads]
    return write_load_report(
        run,
        lambda: _compared_plots(answer.compared) if answer.compared else load_plots(plots, by_load),
        title=f"Simulated serving: {answer.setup.title}",
        about="",
        note=NOTE,
        figures=_figures_table(answer),
        listed={"Limits": answer.setup.limits},
        settings=[],
    )


def _compared_plots(found: list[Compared]) -> list[Plot]:
    """Simulated over measured, with the line where they are the same."""
    from paceline.bench.pages import Series, curves

    rates = [(each.measured_tokens_per_s, each.simulated_tokens_per_s) for each in found]
    firsts = [(1e3 * each.measured_first_token_s, 1e3 * each.simulated_first_token_s) for each in found]
    made = []
    for title, unit, pairs in (("Output", "tokens/s", rates), ("Time to the first token, p50", "ms", firsts)):
        points, most = sorted(pairs), max(map(max, pairs))
        series = [
            Series("simulated", [x for x, _ in points], [y for _, y in points]),
            Series("as measured", [0.0, most], [0.0, most], 5, True),
        ]
        made.append(curves(title, series, xlabel=f"measured {unit}", ylabel=f"simulated {unit}", ylim=(0, None)))
    return made
