"""`paceline simulate-serving`: simulate the loads or replay a run, print, write the run folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json
from paceline.commands.simulate import print_notes
from paceline.commands.terminal import say
from paceline.simulate.config import CostsConfig, ServingConfig


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
    from paceline.commands.simulate_serving_report import figures_table, write_report
    from paceline.runlog import RunFolder
    from paceline.simulate.answer import simulate_server
    from paceline.simulate.replay import FIRST_TOKEN_WITHIN, THROUGHPUT_WITHIN

    answer = simulate_server(costs, config)
    figures_table(answer).show(stderr=as_json)
    if config.against:
        say(
            f"{answer.num_within} of {len(answer.compared)} within {THROUGHPUT_WITHIN:.0%} of the measured throughput and "
            f"{FIRST_TOKEN_WITHIN:.0%} of the median time to the first token; drafts stood as "
            f"{'told' if config.acceptance else 'the run recorded'}: "
            + (", ".join(f"{share:.2f}" for share in answer.survival) or "nothing was drafted")
        )
    print_notes(answer.setup.warnings, answer.limits, stderr=as_json)
    line = answer.as_json(config)
    if out:
        run = RunFolder.create("simulate-serving", asdict(costs) | asdict(config), out)
        run.write_json("results.json", line)
        if notice := write_report(run, answer):
            say(notice)
        say(f"report and figures: {run.path}")
        line["run"] = run.path
    return line
