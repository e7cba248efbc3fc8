"""`paceline simulate --calibrate`: fit the roofline to measured steps, tell its error on held-out sizes, draw both."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.commands.simulate import SimulateAsk, deployment_of, machine_named
from paceline.commands.terminal import print_json, say
from paceline.errors import ConfigError
from paceline.runlog import plain, write_whole
from paceline.simulate import catalogue
from paceline.simulate.calibrate import Report, Steps, check, fit, machine_of, measured_rounds, precisions_of, reached, steps_of
from paceline.simulate.calibrated import CalibratedCosts, Calibration
from paceline.simulate.hf_config import shape_of
from paceline.simulate.measured import read_steps
from paceline.simulate.roofline import Deployment
from paceline.simulate.shapes import ModelShape


def calibrate(ask: SimulateAsk, paths: list[Path]) -> None:
    """Write calibration.json, calibration.md and calibration.svg beside the step times, or into --out."""
    files = [read_steps(path) for path in paths]
    steps, shape = steps_of(files), _shape(ask, files[0])
    deployment = _deployment(ask, shape, files[0])
    report, calibration = check(steps, shape, deployment), fit(steps, shape, deployment)
    folder = ask.out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "calibration.json"
    write_whole(file, _dumped({**calibration.as_json(), "held_out": _errors(report)}))
    costs = CalibratedCosts(shape, deployment, calibration)
    text = report_of(calibration, report, reached(costs, measured_rounds(steps)[0].context))
    write_whole(folder / "calibration.md", text)
    _draw(folder / "calibration.svg", steps, costs)
    (say if ask.as_json else print)(text)
    say(f"predict with it: paceline simulate --calibration {file}")
    if ask.as_json:
        print_json({"calibration": file, **calibration.as_json(), "held_out": _errors(report)})


def _shape(ask: SimulateAsk, steps: dict[str, Any]) -> ModelShape:
    """--model, else the config that was measured, else the measured model's name."""
    if ask.model:
        return catalogue.find(ask.model)
    if isinstance(steps.get("config"), dict):
        return shape_of(steps["config"], str(steps.get("model", "")))
    if not steps.get("model"):
        raise ConfigError("the step times do not say which model they are of: give --model")
    return catalogue.find(str(steps["model"]))


def _deployment(ask: SimulateAsk, shape: ModelShape, steps: dict[str, Any]) -> Deployment:
    """Where the steps were measured, in the precisions that were measured."""
    measured = replace(shape, precisions=precisions_of(steps, shape.precisions))
    machine = machine_of(steps) if ask.hardware is None else None
    return deployment_of(ask, measured, machine or machine_named(ask.hardware or "this"))


def report_of(calibration: Calibration, report: Report, shares: tuple[float, float]) -> str:
    """For people: what was fitted, and how well it predicts."""
    verify, draft = calibration.verify, calibration.draft
    lines = [
        f"# Calibration of {calibration.model} on {calibration.machine.name if calibration.machine else 'a machine'}\n",
        f"Predicted tokens per second of {len(report.held_out)} held-out sizes: {report.mean_error:.1%} off on average, "
        f"{report.worst_error:.1%} at worst.\n",
        f"- a pass of one position reads at {shares[0]:.0%} of the machine's bandwidth, more positions are multiplied at "
        f"{shares[1]:.0%} of its rate, all overheads counted in",
        f"- factors on the roofline: reading {verify.reading:.3g}, computing {verify.computing:.3g}",
        f"- each pass {1e3 * verify.fixed_s:.3f} ms, each position {1e6 * verify.token_s:.1f} us, each cached token "
        f"{1e9 * verify.cached_token_s:.1f} ns; the host {1e3 * calibration.host_s:.3f} ms a round",
    ]
    if draft:
        lines.append(
            f"- drafter: each pass {1e3 * draft.fixed_s:.3f} ms, each position beyond {draft.floor:.1f} "
            f"{1e6 * draft.position_s:.1f} us, each row {1e6 * draft.row_s:.1f} us"
        )
    lines += ["\n| batch | positions | measured, ms | predicted, ms | error of tokens/s |", "|---|---|---|---|---|"]
    lines += [
        f"| {point.batch:g} | {point.positions:g} | {1e3 * point.measured_s:.2f} | {1e3 * point.predicted_s:.2f} | "
        f"{point.error:+.1%} |"
        for point in report.held_out
    ]
    return "\n".join([*lines, ""])


def _errors(report: Report) -> dict[str, Any]:
    points = [{**asdict(point), "error": point.error} for point in report.held_out]
    return {"mean_error": report.mean_error, "worst_error": report.worst_error, "points": points}


def _dumped(value: dict[str, Any]) -> str:
    return json.dumps(plain(value), indent=1) + "\n"


def _draw(file: Path, steps: Steps, costs: CalibratedCosts) -> None:
    """Measured rounds as points joined by lines, predicted ones dashed; a notice when matplotlib is missing."""
    from paceline.bench.plots import Series, curves

    series = []
    rounds = measured_rounds(steps)
    for color, batch in enumerate(sorted({each.batch for each in rounds})):
        own = sorted((each for each in rounds if each.batch == batch), key=lambda each: each.width)
        widths = [each.width for each in own]
        predicted = [
            costs.verify_s(batch, each.width, each.context)
            + costs.draft_s(batch, round(each.width) - 1, each.context)
            + costs.host_s
            for each in own
        ]
        series.append(Series(f"batch {batch:g}", widths, [1e3 * each.seconds for each in own], color))
        series.append(Series(f"predicted {batch:g}", widths, [1e3 * spent for spent in predicted], color, is_faint=True))
    try:
        drawn = curves("Rounds, measured and predicted", series, xlabel="positions of a row", ylabel="ms", ylim=(0, None))
    except ConfigError as error:
        say(f"no figure: {error}")
        return
    write_whole(file, drawn + "\n")
