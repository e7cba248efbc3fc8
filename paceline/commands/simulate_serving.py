"""`paceline simulate-serving`: predicts a server's latency and throughput under load."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json, say
from paceline.commands.simulate import print_notes
from paceline.report.statistics import LOAD_GAIN, Tone, tone_of
from paceline.report.tables import Column, Table, spread_column
from paceline.runs.folder import RunFolder, check_own
from paceline.simulate.config import CostsConfig, ServingConfig

if TYPE_CHECKING:
    from paceline.report.pages import Plot
    from paceline.simulate.answer import ServerAnswer
    from paceline.simulate.server.replay import Compared

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
    Column("range", lambda each: "{:,.0f} to {:,.0f}".format(*each.measured_tokens_per_s_range), align="right"),
    Column("simulated", lambda each: each.simulated_tokens_per_s, "{:,.1f}", "right"),
    Column("error", lambda each: each.throughput_error, "{:+.0%}", "right"),
    Column("range", lambda each: f"{min(each.errors):+.0%} to {max(each.errors):+.0%}", align="right"),
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
        CostsConfig, Without("expert_locality", "per_layer", "toy"), Changed(table=Opt("--steps", "--table"))
    ],
    config: Annotated[ServingConfig, Changed(policy=Opt(comma=True), against=Opt(metavar="RUN_FOLDER"))],
    out: Annotated[
        Path | None, typer.Option(help="Also write figures, a report and charts to this run folder.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Predict a server's latency and throughput under load.

    Prints the time to the first token, time between tokens, throughput and queue length by load and draft length. No
    model is loaded: simulated requests arrive at random times, are prefilled in chunks and decode together, as in the
    engine. Step times come from a table of measured steps or the roofline model, acceptance from --acceptance.

    Examples:
      paceline simulate-serving --steps runs/steps --rate 0.5,1,2 \\
        --acceptance survival:.77,.57,.42
      paceline simulate-serving --against runs/bench-serving-1
    """
    from paceline.simulate.answer import simulate_server
    from paceline.simulate.server.replay import FIRST_TOKEN_WITHIN, THROUGHPUT_WITHIN

    if out:
        check_own(out, "simulate-serving", config.against)
    answer = simulate_server(costs, config)
    _figures_table(answer).show(stderr=as_json)
    if config.against:
        say(
            f"{sum(load.has_throughput for load in answer.compared)} of {len(answer.compared)} loads within "
            f"{THROUGHPUT_WITHIN:.0%} of the measured throughput, {answer.num_within} of them also "
            f"{FIRST_TOKEN_WITHIN:.0%} of the median time to the first token; acceptance "
            f"{'as given' if config.acceptance else 'as in the run'}: "
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
    """Return a table with a row for each simulated load, or for each comparison with a measured load."""
    title = f"{answer.setup.title}, {answer.server.max_rows} rows"
    columns, rows = (COMPARED_COLUMNS, answer.compared) if answer.compared else (LOAD_COLUMNS, answer.loads)
    return Table(columns, rows, title=title, width=180)


def _tone(answer: ServerAnswer) -> Tone:
    if answer.compared:
        return "" if answer.num_within == len(answer.compared) else "cost"
    plain = {one.load: one.total.mean for one in answer.loads if one.policy == "off"}
    drafted = [(plain.get(one.load), one.total.mean) for one in answer.loads if one.policy != "off"]
    return tone_of([off / on for off, on in drafted if off and on], LOAD_GAIN)


def _write_report(run: RunFolder, answer: ServerAnswer) -> str | None:
    """Write report.md and report.html; returns a notice if the plots could not be drawn."""
    from paceline.report.pages import LOAD_PLOTS, LoadPlot, load_plots, render, write_load_report

    plots = (*LOAD_PLOTS, LoadPlot("Requests without a row", "mean", lambda each: each.mean_queue))
    by_load = [(one.rate, one.concurrency, one.policy, one) for one in answer.loads]
    return write_load_report(
        run,
        lambda: _compared_plots(answer.compared) if answer.compared else load_plots(plots, by_load),
        title=f"Simulated serving: {answer.setup.title}",
        verdict=render("simulated_verdict.txt", loads=answer.loads, compared=answer.compared).rstrip(),
        tone=_tone(answer),
        about="",
        note=render("simulated_note.txt").rstrip(),
        figures=_figures_table(answer),
        listed={"Limits": answer.setup.limits},
        settings=[],
    )


def _compared_plots(compared: list[Compared]) -> list[Plot]:
    """Draw simulated against measured values, with the diagonal."""
    from paceline.report.pages import Series, curves

    rates = [(load.measured_tokens_per_s, load.simulated_tokens_per_s) for load in compared]
    firsts = [(1e3 * load.measured_first_token_s, 1e3 * load.simulated_first_token_s) for load in compared]
    plots = []
    for title, unit, pairs in (("Output", "tokens/s", rates), ("Time to the first token, p50", "ms", firsts)):
        points, most = sorted(pairs), max(map(max, pairs))
        series = [
            Series("simulated", [x for x, _ in points], [y for _, y in points]),
            Series("as measured", [0.0, most], [0.0, most], 5, True),
        ]
        plots.append(curves(title, series, xlabel=f"measured {unit}", ylabel=f"simulated {unit}", ylim=(0, None)))
    return plots
