"""The `simulate-serving` command. Options are read here; `commands/simulate_serving.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli_options import Json, Option, numbers


def simulate_serving(
    steps: Annotated[
        Path | None, Option("--steps", "--table", help="Measured step times: steps.json of bench steps, or its run folder.")
    ] = None,
    model: Annotated[str | None, Option("--model", help="Without --steps, as of simulate [default: smollm2-135m].")] = None,
    hardware: Annotated[str | None, Option(help="Without --steps, as of simulate; this measures the machine at hand.")] = None,
    gpus: Annotated[int, Option(help="Tensor parallel over so many of them.")] = 1,
    precision: Annotated[str | None, Option(help="As of simulate.")] = None,
    calibration: Annotated[Path | None, Option(help="A calibration.json of simulate --calibrate.")] = None,
    drafter_cost: Annotated[float | None, Option(help="A drafter pass, as a share of a plain target pass.")] = None,
    drafter_params: Annotated[float | None, Option(help="Parameters of the drafter: its own roofline, not a share.")] = None,
    block: Annotated[int | None, Option(help="Drafts of one drafter pass; without, a pass drafts one token.")] = None,
    max_draft: Annotated[
        int | None, Option(help="Most drafts of a round [default: what was measured or recorded, else 16].")
    ] = None,
    acceptance: Annotated[
        str | None,
        Option(help="As of simulate: 0.8, survival:.77,.57, a bench decode run [default: 0.8, or that of --against]."),
    ] = None,
    rate: Annotated[
        str | None,
        Option(help="Open loops: requests a second at random times [default: 0.3 to 1.2 of what plain decoding can finish]."),
    ] = None,
    concurrency: Annotated[str | None, Option(help="Closed loops: requests in flight, comma-separated.")] = None,
    requests: Annotated[int, Option(help="Requests of each load.")] = 400,
    prompt_tokens: Annotated[
        str, Option(help="Of each request: 256, 64-512 (equally likely), or lognormal:MEDIAN,SIGMA.")
    ] = "256",
    answer_tokens: Annotated[str, Option(help="Of each request, as --prompt-tokens.")] = "128",
    policy: Annotated[
        str, Option(help="Draft lengths compared: off, best (for the batch), adaptive (learned), or numbers.")
    ] = "off,best,adaptive",
    max_rows: Annotated[
        int | None, Option(help="Requests that decode together [default: 8, or as many as the server of --against had].")
    ] = None,
    prefill_chunk: Annotated[int, Option(help="Prompt tokens of a step at most; 0 prefills a prompt at once.")] = 256,
    request_overhead: Annotated[
        float, Option(help="Seconds of a request outside the engine, before its first token; 0.005 is our server on two cores.")
    ] = 0.005,
    seed: Annotated[int, Option(help="Of arrivals, lengths and acceptance.")] = 0,
    against: Annotated[
        Path | None, Option(metavar="RUN_FOLDER", help="Replay a bench serving run instead: simulated beside measured.")
    ] = None,
    out: Annotated[Path | None, Option(help="Also write figures, a report and charts into this run folder.")] = None,
    as_json: Json = False,
) -> None:
    """A server under load before there is one: first token, inter-token time, throughput and queue, by load and draft length.

    Requests come at random times, are prefilled in chunks and decode together, as the engine does it; a round takes what a
    table of measured steps or the roofline says, and drafts stand as the acceptance curve says. No model is loaded.

    Example: paceline simulate-serving --steps runs/steps --rate 0.5,1,2 --acceptance survival:.77,.57,.42

    Example: paceline simulate-serving --steps runs/steps --against runs/bench-serving-1
    """
    given = dict(locals())
    from paceline.commands.simulate_serving import ServingSimulation
    from paceline.commands.simulate_serving import simulate_serving as run

    run(ServingSimulation(**_read(given)))


def _read(given: dict[str, Any]) -> dict[str, Any]:
    words = [part.strip() for part in given["policy"].split(",") if part.strip()]
    loads = {name: numbers(f"--{name}", given[name] or "", whole=name == "concurrency") for name in ("rate", "concurrency")}
    return {
        **{name: value for name, value in given.items() if name not in ("rate", "concurrency", "policy", "prefill_chunk")},
        "rates": tuple(loads["rate"]),
        "concurrencies": tuple(int(value) for value in loads["concurrency"]),
        "policies": tuple(dict.fromkeys(words)),
        "prefill_chunk": given["prefill_chunk"] or None,
    }


def add_commands(app: typer.Typer) -> None:
    """Register the command of this module."""
    app.command("simulate-serving")(simulate_serving)
