"""`paceline simulate`: predicts the speed-up of speculation, and fits predictions to measured step times."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import options
from paceline.commands.shared import Json, say
from paceline.errors import ConfigError
from paceline.report.tables import Column, Table, block, spread_column
from paceline.runs.folder import plain, write_whole
from paceline.simulate.config import CostsConfig, PredictConfig, PriceConfig

if TYPE_CHECKING:
    from paceline.simulate.answer import Answer, Setup
    from paceline.simulate.costs.calibrate import Fitted
    from paceline.simulate.speedup import Prediction

BAR_WIDTH = 32
LEAST_SHARE = 0.005
"""Parts of a round's time below this share are not shown."""
PRICE_COLUMNS = (
    Column("rows", lambda each: each.rows, align="right"),
    Column("", lambda each: each.name),
    Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}", "right"),
    Column("requests/s", lambda each: each.requests_per_s, "{:,.3g}", "right"),
    Column("tokens/s", lambda each: each.tokens_per_s, "{:,.0f}", "right"),
    Column("$ per 1,000 answers", lambda each: each.per_thousand, "{:,.3f}", "right"),
    spread_column("first token ms", lambda each: each.first_token, 1000, 0),
    spread_column("inter-token ms", lambda each: each.inter_token, 1000, 2),
    spread_column("answer s", lambda each: each.total, 1, 2),
)


@options
def simulate(
    costs: CostsConfig,
    config: PredictConfig,
    price: PriceConfig,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="Fit the roofline model to the step times of a bench steps run; repeatable."
        ),
    ] = None,
    flags: Annotated[
        bool, typer.Option("--flags", help="Also print flags for paceline, vLLM and SGLang servers.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --calibrate: output folder [default: that of the step times].")
    ] = None,
    list_known: Annotated[bool, typer.Option("--list", help="List models and machines.")] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Predict the speed-up of speculation before training.

    Prints the best draft length, the speed-up, and the seconds of each part of a round. A round drafts g tokens,
    verifies g + 1 positions in one target pass and yields N(g) tokens on average; speed-up(g) = N(g) * (seconds of a
    plain pass) / (seconds of the verification pass and of drafting). A dense model verifies a small batch's drafts at
    almost no cost. A mixture of experts does not: at batch sizes of 4 to 8 each draft activates more experts, whose
    weights must be read. Needs no GPU and no weights. Formulas: docs/explanation/prediction.md.

    Examples:
      paceline simulate --model DeepSeek-V4-Pro --hardware B200 \\
        --batch 1,8,32,128 --acceptance 0.89 --block 16
      paceline simulate --model Qwen3-8B --hardware H100 \\
        --acceptance runs/bench-decode-1 --flags
      paceline simulate --model Qwen3-8B --hardware H100 --block 7 --tree 8,32
      paceline simulate --model Qwen3.5-27B --hardware B200 \\
        --plain-rate 75 --acceptance 0.8
      paceline simulate --model Qwen3-8B --hardware H100 --batch 8,32 \\
        --price-per-hour 2.5 --slo p90-total=2s
      paceline bench steps --out runs/steps
      paceline simulate --calibrate runs/steps
    """
    if list_known:
        return _list_known(as_json)
    is_prediction = flags or (config, price) != (PredictConfig(), PriceConfig())
    if out is not None and not calibrate:
        raise ConfigError("--out is written by --calibrate: add that, or leave --out out")
    if bool(calibrate) and is_prediction:
        raise ConfigError("--calibrate fits costs alone: predict after it, with --calibration")
    if calibrate:
        return _fit_and_report(costs, calibrate, out, as_json)
    from paceline.simulate.answer import predict_all
    from paceline.simulate.server.price import parse_slo

    parse_slo(price.slo)
    answer = predict_all(costs, config)
    _show(answer, stderr=as_json)
    if answer.trees:
        _show_trees(answer, stderr=as_json)
    line = answer.as_json()
    if price.is_asked:
        line["price"] = _price(answer, config, price, stderr=as_json)
    print_notes(answer.setup, stderr=as_json)
    for server, command in answer.flags.items() if flags else ():
        (say if as_json else print)(f"{server}:  {command}")
    return line


def _price(answer: Answer, config: PredictConfig, price: PriceConfig, *, stderr: bool) -> dict[str, Any]:
    """Print the costs at each batch size, without and with drafts, and the value of one more token per round."""
    from paceline.simulate.server.price import priced

    prices = priced(answer.setup.costs, answer.acceptance, config, price)
    Table(PRICE_COLUMNS, prices.rows, title=prices.title, notes=prices.sentences, width=140).show(stderr=stderr)
    return asdict(prices)


def _show(answer: Answer, *, stderr: bool) -> None:
    """Print a row for each batch size; for a single one also speed-up by draft length and the effect of more
    acceptance."""
    columns = [
        Column("batch", lambda each: each.batch),
        Column("best draft", lambda each: each.best_draft_length),
        Column("speed-up", lambda each: each.speedup, "{:.2f}x"),
        Column("tokens/round", lambda each: each.tokens_per_round, "{:.2f}"),
        Column("tokens/s", lambda each: each.tokens_per_s, "{:,.0f}"),
        Column("plain tokens/s", lambda each: each.plain_tokens_per_s, "{:,.0f}"),
        Column("where a round's time goes", _parts, is_spare=True),
    ]
    Table(columns, answer.predictions, title=answer.setup.title, notes=_overhead_notes(answer)).show(stderr=stderr)
    if len(answer.predictions) > 1:
        return
    (prediction,) = answer.predictions
    changes = [
        f"acceptance {100 * change.points:+3.0f} points: {change.speedup:.2f}x ({change.gain:+.1%}), "
        f"best draft {change.best_draft_length}"
        for change in prediction.sensitivity
    ]
    expected = [1.0, *answer.acceptance.survival(len(prediction.curve) - 1)]
    columns = [
        Column("draft", lambda point: point[0]),
        Column("tokens/round", lambda point: sum(expected[: point[0] + 1]), "{:.2f}"),
        Column("speed-up", lambda point: point[1], "{:.2f}x"),
        Column("", lambda point: _bar(prediction, *point), is_spare=True),
    ]
    Table(columns, prediction.curve, notes=changes).show(stderr=stderr)


def _show_trees(answer: Answer, *, stderr: bool) -> None:
    """Print the best chain, the requested trees and the best tree for each batch size."""
    rows: list[tuple[int, str, Any, float]] = []
    for chain, trees in zip(answer.predictions, answer.trees, strict=True):
        rows.append((chain.batch, f"chain of {chain.best_draft_length}", chain, 1.0))
        rows += [(chain.batch, f"tree of {point.nodes}", point, point.over_chain) for point in trees.points]
        rows.append((chain.batch, f"tree of {trees.best_nodes}, the best", trees.best, trees.best.over_chain))
    columns = [
        Column("batch", lambda row: row[0]),
        Column("checked", lambda row: row[1]),
        Column("tokens/round", lambda row: row[2].tokens_per_round, "{:.2f}"),
        Column("speed-up", lambda row: row[2].speedup, "{:.2f}x"),
        Column("tokens/s", lambda row: row[2].tokens_per_s, "{:,.0f}"),
        Column("over the chain", lambda row: row[3], "{:.2f}x"),
    ]
    Table(columns, rows, title="Trees compared with the best chain").show(stderr=stderr)


def _overhead_notes(answer: Answer) -> list[str]:
    """Return a note on the overhead added to each round, with the speed-ups without it."""
    overhead = answer.setup.overhead
    if overhead is None:
        return []
    speedups = ", ".join(
        f"{speedup:.2f}x ({length} drafts)" + (f" at batch {prediction.batch}" if len(answer.predictions) > 1 else "")
        for prediction, (length, speedup) in zip(answer.predictions, answer.without, strict=True)
    )
    return [
        f"overhead: {1e3 * overhead.seconds:.2f} ms of each round, {overhead.source}; the best without it: {speedups}"
    ]


def _parts(prediction: Prediction) -> str:
    return ", ".join(f"{part} {share:.0%}" for part, share in prediction.time_split.items() if share >= LEAST_SHARE)


def _bar(prediction: Prediction, length: int, speedup: float) -> str:
    bar = block() * round(BAR_WIDTH * speedup / prediction.speedup)
    return bar + ("  best" if length == prediction.best_draft_length else "")


def print_notes(setup: Setup, *, stderr: bool) -> None:
    """Print a prediction's assumptions, warnings and limits, to stderr if `stderr` is True, else to stdout. Only the
    first two limits are printed; the others are counted."""
    lines = [*filter(None, [setup.assumed]), *(f"warning: {warning}" for warning in setup.warnings)]
    lines += ["Limits:", *(f"- {sentence}" for sentence in setup.limits[:2])]  # the same after each answer
    if left := setup.limits[2:]:
        lines.append(f"- {len(left)} more: with --json under limits; docs/explanation/prediction.md, What is left out")
    (say if stderr else print)("\n".join(lines))


def _list_known(as_json: bool) -> dict[str, Any]:
    """Print the catalogue's models and machines, unless `as_json`; returns them as the JSON line."""
    from paceline.simulate.costs import catalogue

    known, shapes = catalogue.entries(), catalogue.all_shapes()
    unavailable = {name: entry["unavailable"] for name, entry in known.items() if "unavailable" in entry}
    sizes = {name: (each.num_parameters / 1e9, each.num_active / 1e9) for name, each in shapes.items()}
    for name in () if as_json else known:
        print(f"{name:22s} {'{:.4g}B, {:.3g}B active'.format(*sizes[name]) if name in sizes else unavailable[name]}")
    if not as_json:
        print("machines: " + ", ".join([*catalogue.machines(), "this"]))
    return {"models": list(shapes), "unavailable": unavailable, "machines": list(catalogue.machines())}


def _fit_and_report(config: CostsConfig, paths: list[Path], out: Path | None, as_json: bool) -> dict[str, Any]:
    """Write calibration.json, calibration.md and calibration.svg to `out`, or to the folder of the step times."""
    from paceline.report.pages import render
    from paceline.simulate.costs.calibrate import calibrate, measured_rounds, reached

    fitted = calibrate(config, paths)
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    bandwidth, arithmetic = reached(fitted.costs, measured_rounds(fitted.steps)[0].context)
    values = {"calibration": fitted.calibration, "report": fitted, "bandwidth": bandwidth, "arithmetic": arithmetic}
    file, text = folder / "calibration.json", render("calibration.md", **values)
    write_whole(file, json.dumps(plain(fitted.as_json()), indent=1) + "\n")
    write_whole(folder / "calibration.md", text)
    _draw_fit(folder / "calibration.svg", fitted)
    (say if as_json else print)(text)
    say(f"predict with it: paceline simulate --calibration {file}")
    return {"calibration": file, **fitted.as_json()}


def _draw_fit(file: Path, fitted: Fitted) -> None:
    """Draw round times: measured as lines, predicted as faint lines; prints a notice if matplotlib is missing."""
    from paceline.report.pages import Series, curves
    from paceline.simulate.costs.calibrate import measured_rounds

    rounds, series = measured_rounds(fitted.steps), []
    for color, batch in enumerate(sorted({one.batch for one in rounds})):
        own = sorted((one for one in rounds if one.batch == batch), key=lambda one: one.width)
        widths = [one.width for one in own]
        predicted = [1e3 * fitted.costs.round_s(batch, round(one.width) - 1, one.context) for one in own]
        series.append(Series(f"batch {batch:g}", widths, [1e3 * one.seconds for one in own], color))
        series.append(Series(f"predicted {batch:g}", widths, predicted, color, is_faint=True))
    try:
        _, drawn = curves(
            "Rounds, measured and predicted", series, xlabel="positions of a row", ylabel="ms", ylim=(0, None)
        )
    except ConfigError as error:
        say(f"no figure: {error}")
        return
    write_whole(file, drawn + "\n")
