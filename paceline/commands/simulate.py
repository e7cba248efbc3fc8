"""`paceline simulate`: predict, and print the table, the limits and the flags; or fit the roofline to measured steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json
from paceline.commands.terminal import say
from paceline.errors import ConfigError
from paceline.runlog import plain, write_whole
from paceline.simulate.config import CostsConfig, PredictConfig
from paceline.tables import Column, Table

if TYPE_CHECKING:
    from paceline.simulate.answer import Answer, Setup
    from paceline.simulate.calibrate import Fitted
    from paceline.simulate.speedup import Prediction

BAR_WIDTH = 32
LEAST_SHARE = 0.005
"""Smaller parts of a round's time are left out of the table."""
Calibrate = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="Fit the roofline to the step times of a bench steps run; repeatable."),
]
Flags = Annotated[bool, typer.Option("--flags", help="Also print the server flags: paceline, vLLM, SGLang.")]
Out = Annotated[Path | None, typer.Option(help="With --calibrate: folder of its files [default: that of the step times].")]
List = Annotated[bool, typer.Option("--list", help="List models and machines.")]


@options
def simulate(
    costs: CostsConfig,
    config: PredictConfig,
    calibrate: Calibrate = None,
    flags: Flags = False,
    out: Out = None,
    list_known: List = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Predict what speculation brings before anything is built: the best draft length, the speed-up, where the time goes.

    A round drafts g tokens and verifies g + 1 positions in one target pass; it yields N(g) tokens, more the more drafts stand:
    speed-up(g) = N(g) / (pass of g + 1 positions / plain pass + drafting / plain pass). A dense model at a small batch verifies
    drafts almost for nothing. A mixture of experts does not: at batches of 4 to 8 each draft brings new experts to read.
    Neither a GPU nor weights are needed; each prediction prints its limits. docs/simulate.md has the formulas.

    Example: paceline simulate --model DeepSeek-V4-Pro --hardware B200 --batch 1,8,32,128 --acceptance 0.89 --block 16

    Example: paceline simulate --model Qwen3-8B --hardware H100 --acceptance runs/bench-decode-1 --flags

    Example: paceline bench steps --out runs/steps && paceline simulate --calibrate runs/steps
    """
    if list_known:
        return _list_known(as_json)
    if calibrate:
        return _fit_and_report(costs, calibrate, out, as_json)
    from paceline.simulate.answer import predict_all

    answer = predict_all(costs, config)
    _show(answer, stderr=as_json)
    print_notes(answer.setup, stderr=as_json)
    for server, command in answer.flags.items() if flags else ():
        (say if as_json else print)(f"{server}:  {command}")
    return answer.as_json()


def _show(answer: Answer, *, stderr: bool) -> None:
    """A line for each batch; of a single one also the curve as bars, and what more acceptance would bring."""
    columns = [
        Column("batch", lambda each: each.batch),
        Column("best draft", lambda each: each.best_draft_length),
        Column("speed-up", lambda each: each.speedup, "{:.2f}x"),
        Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}"),
        Column("tokens/s", lambda each: each.tokens_per_s, "{:,.0f}"),
        Column("plain tokens/s", lambda each: each.plain_tokens_per_s, "{:,.0f}"),
        Column("where a round's time goes", _parts),
    ]
    Table(columns, answer.predictions, title=answer.setup.title).show(stderr=stderr)
    if len(answer.predictions) > 1:
        return
    found = answer.predictions[0]
    changes = [
        f"acceptance {100 * change.points:+3.0f} points: {change.speedup:.2f}x ({change.gain:+.1%}), "
        f"best draft {change.best_draft_length}"
        for change in found.sensitivity
    ]
    expected = [1.0, *answer.acceptance.survival(len(found.curve) - 1)]
    columns = [
        Column("draft", lambda point: point[0]),
        Column("tokens/round", lambda point: sum(expected[: point[0] + 1]), "{:.2f}"),
        Column("speed-up", lambda point: point[1], "{:.2f}x"),
        Column("", lambda point: _bar(found, *point)),
    ]
    Table(columns, found.curve, notes=changes).show(stderr=stderr)


def _parts(found: Prediction) -> str:
    return ", ".join(f"{part} {share:.0%}" for part, share in found.time_split.items() if share >= LEAST_SHARE)


def _bar(found: Prediction, length: int, speedup: float) -> str:
    bar = "█" * round(BAR_WIDTH * speedup / found.speedup)
    return bar + ("  best" if length == found.best_draft_length else "")


def print_notes(setup: Setup, *, stderr: bool) -> None:
    lines = [*(f"warning: {warning}" for warning in setup.warnings), "Limits:", *(f"- {sentence}" for sentence in setup.limits)]
    (say if stderr else print)("\n".join(lines))


def _list_known(as_json: bool) -> dict[str, Any]:
    from paceline.hardware import KNOWN_MACHINES
    from paceline.simulate import catalogue

    known, shapes = catalogue.entries(), catalogue.all_shapes()
    unavailable = {name: entry["unavailable"] for name, entry in known.items() if "unavailable" in entry}
    for name in () if as_json else known:
        shape = shapes.get(name)
        size = f"{shape.num_parameters / 1e9:.4g}B, {shape.num_active / 1e9:.3g}B active" if shape else unavailable[name]
        print(f"{name:22s} {size}")
    if not as_json:
        print("machines: " + ", ".join([*KNOWN_MACHINES, "this"]))
    return {"models": list(shapes), "unavailable": unavailable, "machines": list(KNOWN_MACHINES)}


def _fit_and_report(config: CostsConfig, paths: list[Path], out: Path | None, as_json: bool) -> dict[str, Any]:
    """Write calibration.json, calibration.md and calibration.svg beside the step times, or into `out`."""
    from paceline.bench.pages import render
    from paceline.simulate.calibrate import calibrate, measured_rounds, reached

    fitted = calibrate(config, paths)
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    bandwidth, arithmetic = reached(fitted.costs, measured_rounds(fitted.steps)[0].context)
    said = {"calibration": fitted.calibration, "report": fitted, "bandwidth": bandwidth, "arithmetic": arithmetic}
    file, text = folder / "calibration.json", render("calibration.md", **said)
    write_whole(file, json.dumps(plain(fitted.as_json()), indent=1) + "\n")
    write_whole(folder / "calibration.md", text)
    _draw_fit(folder / "calibration.svg", fitted)
    (say if as_json else print)(text)
    say(f"predict with it: paceline simulate --calibration {file}")
    return {"calibration": file, **fitted.as_json()}


def _draw_fit(file: Path, fitted: Fitted) -> None:
    """Measured rounds as points joined by lines, predicted ones dashed; a notice when matplotlib is missing."""
    from paceline.bench.pages import Series, curves
    from paceline.simulate.calibrate import measured_rounds

    rounds, series = measured_rounds(fitted.steps), []
    for color, batch in enumerate(sorted({each.batch for each in rounds})):
        own = sorted((each for each in rounds if each.batch == batch), key=lambda each: each.width)
        widths = [each.width for each in own]
        predicted = [1e3 * fitted.costs.round_s(batch, round(each.width) - 1, each.context) for each in own]
        series.append(Series(f"batch {batch:g}", widths, [1e3 * each.seconds for each in own], color))
        series.append(Series(f"predicted {batch:g}", widths, predicted, color, is_faint=True))
    try:
        _, drawn = curves("Rounds, measured and predicted", series, xlabel="positions of a row", ylabel="ms", ylim=(0, None))
    except ConfigError as error:
        say(f"no figure: {error}")
        return
    write_whole(file, drawn + "\n")
