"""`paceline simulate --calibrate`: fit the roofline to measured steps, report its error on sizes left out, draw both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.bench.pages import render
from paceline.bench.plots import Series, curves
from paceline.commands.terminal import say
from paceline.errors import ConfigError
from paceline.runlog import plain, write_whole
from paceline.simulate.calibrate import Fitted, calibrate, measured_rounds, reached
from paceline.simulate.config import CostsConfig


def fit_and_report(config: CostsConfig, paths: list[Path], out: Path | None, as_json: bool) -> dict[str, Any]:
    """Write calibration.json, calibration.md and calibration.svg beside the step times, or into `out`."""
    fitted = calibrate(config, paths)
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    bandwidth, arithmetic = reached(fitted.costs, measured_rounds(fitted.steps)[0].context)
    said = {"calibration": fitted.calibration, "report": fitted, "bandwidth": bandwidth, "arithmetic": arithmetic}
    file, text = folder / "calibration.json", render("calibration.md", **said)
    write_whole(file, json.dumps(plain(fitted.as_json()), indent=1) + "\n")
    write_whole(folder / "calibration.md", text)
    _draw(folder / "calibration.svg", fitted)
    (say if as_json else print)(text)
    say(f"predict with it: paceline simulate --calibration {file}")
    return {"calibration": file, **fitted.as_json()}


def _draw(file: Path, fitted: Fitted) -> None:
    """Measured rounds as points joined by lines, predicted ones dashed; a notice when matplotlib is missing."""
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
