"""`paceline simulate --calibrate`: fit the roofline to measured steps, report its error on sizes left out, draw both."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.bench.plots import Series, curves
from paceline.commands.terminal import print_json, say
from paceline.errors import ConfigError
from paceline.runlog import plain, write_whole
from paceline.simulate.calibrate import Fitted, calibrate, measured_rounds, reached
from paceline.simulate.config import CostsConfig
from paceline.tables import Column, Table


def fit_and_report(config: CostsConfig, paths: list[Path], out: Path | None, as_json: bool) -> None:
    """Write calibration.json, calibration.md and calibration.svg beside the step times, or into `out`."""
    fitted = calibrate(config, paths)
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    file, text = folder / "calibration.json", report_of(fitted)
    write_whole(file, json.dumps(plain(fitted.as_json()), indent=1) + "\n")
    write_whole(folder / "calibration.md", text)
    _draw(folder / "calibration.svg", fitted)
    (say if as_json else print)(text)
    say(f"predict with it: paceline simulate --calibration {file}")
    if as_json:
        print_json({"calibration": file, **fitted.as_json()})


def report_of(fitted: Fitted) -> str:
    """For people: what was fitted, and how well it predicts."""
    calibration, report = fitted.calibration, fitted.report
    verify, draft = calibration.verify, calibration.draft
    bandwidth, arithmetic = reached(fitted.costs, measured_rounds(fitted.steps)[0].context)
    lines = [
        f"# Calibration of {calibration.model} on {calibration.machine.name if calibration.machine else 'a machine'}\n",
        f"Predicted tokens per second of {len(report.held_out)} held-out sizes: {report.mean_error:.1%} off on average, "
        f"{report.worst_error:.1%} at worst.\n",
        f"- a pass of one position reads at {bandwidth:.0%} of the machine's bandwidth, more positions are multiplied at "
        f"{arithmetic:.0%} of its rate, all overheads counted in",
        f"- factors on the roofline: reading {verify.reading:.3g}, computing {verify.computing:.3g}",
        f"- each pass {1e3 * verify.fixed_s:.3f} ms, each position {1e6 * verify.token_s:.1f} us, each cached token "
        f"{1e9 * verify.cached_token_s:.1f} ns; the host {1e3 * calibration.host_s:.3f} ms a round",
    ]
    if draft:
        lines.append(
            f"- drafter: each pass {1e3 * draft.fixed_s:.3f} ms, each position beyond {draft.floor:.1f} "
            f"{1e6 * draft.position_s:.1f} us, each row {1e6 * draft.row_s:.1f} us"
        )
    columns = [
        Column("batch", lambda point: point.batch, "{:g}"),
        Column("positions", lambda point: point.positions, "{:g}"),
        Column("measured, ms", lambda point: 1e3 * point.measured_s, "{:.2f}"),
        Column("predicted, ms", lambda point: 1e3 * point.predicted_s, "{:.2f}"),
        Column("error of tokens/s", lambda point: point.error, "{:+.1%}"),
    ]
    return "\n".join([*lines, "", Table(columns, report.held_out).markdown(), ""])


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
        drawn = curves("Rounds, measured and predicted", series, xlabel="positions of a row", ylabel="ms", ylim=(0, None))
    except ConfigError as error:
        say(f"no figure: {error}")
        return
    write_whole(file, drawn + "\n")
