"""`paceline compare`: replays one answer without and with drafts as an HTML page and an animated picture.

With --simulate: draws a chart of speed-up against acceptance length, predicted and measured."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.generate import encode
from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import MOCK, Json, Raw, System, TerminalProgress, check_template, load, prompt_of, say
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.runs.folder import RunFolder, check_folder, check_own, write_whole
from paceline.simulate.config import ChartConfig, CostsConfig, given_of
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.bench.pages.timing import Timing


CHART = Changed(
    results=Opt(metavar="RUN_FOLDER"),
    png=Opt(metavar="FILE"),
    columns=Opt(metavar="FILE"),
    columns_png=Opt(metavar="FILE"),
)
COSTS = ("hardware", "gpus", "precision", "drafter_cost", "block", "table", "calibration", "overhead_ms", "plain_rate")
REPEAT = 3
NO_OPTIONS = Without("max_batch", "mocked_survival", "mocked_marginals", "prefill_chunk", "kv_memory", "rule")
"""Engine settings that are not options of `compare`."""


@options
def compare(
    engine: Annotated[EngineConfig, NO_OPTIONS, MOCK],
    sampling: Annotated[SamplingParams, Only("temperature", "max_tokens", "seed", "ignore_eos")],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads stdin.")] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_FOLDER", help="Draw a recorded run again, without a model.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(help="Answers without and with drafts, in turns; keeps the median time of each.")
    ] = REPEAT,
    raw: Raw = False,
    system: System = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder [default: runs/compare-<time>, or that of --from].")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an animated SVG.")] = None,
    svg_speed: Annotated[
        float | None,
        typer.Option(
            help="Playback speed of the SVG: 1 is real time, 0.5 half as fast [default: slow enough to follow]."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Chart speed-up against acceptance length, predicted and measured.")
    ] = False,
    costs: Annotated[CostsConfig, Only(*COSTS)] = CostsConfig(),  # noqa: B008  (frozen)
    chart: Annotated[ChartConfig, CHART] = ChartConfig(),  # noqa: B008  (frozen)
    as_json: Json = False,
) -> dict[str, Any]:
    """Replay one answer without and with drafts, side by side.

    Generates the answer without and with drafts, and writes a page that replays both: each token appears at the time it
    was generated. The page is one file, compare.html in the run folder; it needs no server and no network.

    --simulate runs no model. It charts the predicted speed-up against acceptance length; with --columns, it draws a
    sample text that appears at the two predicted speeds.

    Examples:
      paceline compare "Why is the sky blue?" --max-tokens 96 --svg demo.svg
      paceline compare --simulate --model Qwen3-8B --hardware H100 \\
        --results runs/mock --results runs/bench-decode-1
      paceline compare --simulate --model Qwen3-8B --hardware H100 \\
        --block 16 --acceptance 0.85 --columns columns.svg
    """
    if simulate or recorded is not None:
        given: dict[str, object | None] = {"the prompt": prompt, "--system": system, "--raw": raw or None}
        given |= {"--repeat": None if repeat == REPEAT else repeat}
        given |= {"--from": recorded, "--svg-speed": svg_speed} if simulate else {}
        _refuse_answering("--simulate" if simulate else "--from", engine, sampling, given)
    if simulate:
        return _simulated(engine, costs, chart, out, svg)
    _refuse_predicting(chart, costs)
    _check_values(svg_speed, repeat)
    if recorded is not None:
        return _drawn_again(recorded, out, svg, svg_speed)
    check_own(out, "compare")
    text = prompt_of(prompt, "paceline compare")
    check_template(raw, system)
    if engine.drafter == "none" or engine.num_drafted == 0:
        raise ConfigError("nothing to compare without drafts: choose another --drafter, --num-drafted or --speculate")
    llm = load(engine)
    from paceline.bench.pages.timing import NAME, record
    from paceline.hardware import device_name

    token_ids = encode(llm, text, system, raw)
    machine = device_name(llm.config.device)
    with TerminalProgress().bar("answering", 2 * repeat) as advance:
        timing = record(llm, token_ids, sampling, prompt=text, machine=machine, repeat=repeat, on_answer=advance)
    described = {"llm": engine, "sampling": sampling, "system": system, "raw": raw, "repeat": repeat}
    run = RunFolder.create("compare", described, out)
    run.write_json(NAME, timing)
    return _draw(run, timing, svg, svg_speed)


def _refuse_answering(
    by: str, engine: EngineConfig, sampling: SamplingParams, others: dict[str, object | None]
) -> None:
    """Raises ConfigError if an option was given that has no effect with `by`, which answers nothing: one of the engine
    (--simulate uses the model), of sampling, or one that is not None in `others`."""
    engine = engine if by == "--from" else replace(engine, model=EngineConfig().model)
    given = [name for name, value in others.items() if value is not None]
    for config in (engine, sampling):
        names = [each.name for each in fields(config) if getattr(config, each.name) != each.default]
        given += [name if "_" in name else f"--{name}" for name in names]  # `options` makes options of the former
    if given:
        raise ConfigError(f"{by} answers nothing: leave {', '.join(given)} out")


def _check_values(svg_speed: float | None, repeat: int) -> None:
    """Raises ConfigError for a value out of range."""
    if svg_speed is not None and not 0.05 <= svg_speed <= 20:
        raise ConfigError(f"--svg-speed must be between 0.05 and 20, not {svg_speed:g}")
    if repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, not {repeat}")


def _refuse_predicting(chart: ChartConfig, costs: CostsConfig) -> None:
    """Raises ConfigError if an option was given that only --simulate uses."""
    if chart != ChartConfig() or costs != CostsConfig():
        names = [field.name for field in fields(ChartConfig)] + list(COSTS)
        raise ConfigError(f"--{', --'.join(names).replace('_', '-')} go with --simulate")


def _drawn_again(recorded: Path, out: Path | None, svg: Path | None, svg_speed: float | None) -> dict[str, Any]:
    """Draw the page and picture of an earlier run."""
    if out is not None:
        check_folder(out)
    from paceline.bench.pages.timing import read_timing

    run = RunFolder(out or (recorded if recorded.is_dir() else recorded.parent))
    return _draw(run, read_timing(recorded), svg, svg_speed)


def _simulated(
    engine: EngineConfig, costs: CostsConfig, config: ChartConfig, out: Path | None, svg: Path | None
) -> dict[str, Any]:
    """Draw the predicted columns, if requested, and the chart, unless only columns were requested."""
    has_columns = config.columns is not None or config.columns_png is not None
    is_chart = not has_columns or svg or config.png or out or config.results
    if is_chart and _has_run(config, out, svg):
        check_own(out, "compare")
    if not has_columns and (given := given_of(config, "acceptance", "max_draft")):
        raise ConfigError(f"{', '.join(given)}: only with --columns or --columns-png: add one, or leave it out")
    has_model = engine.model != EngineConfig().model or not (costs.table or costs.calibration)
    costs = replace(costs, model=engine.model if has_model else None)
    columns = _columns(costs, config) if has_columns else {}
    line = {**(_chart(costs, config, out, svg) if is_chart else {}), **columns}
    for warning in line["warnings"]:
        say(f"warning: {warning}")
    return line


def _columns(costs: CostsConfig, config: ChartConfig) -> dict[str, Any]:
    """Draw two columns of text that appear at the predicted speeds."""
    from paceline.bench.pages.predicted import draw_png, predicted
    from paceline.bench.pages.timing import svg

    timing, warnings = predicted(costs, config)
    if config.columns is not None:
        write_whole(config.columns, svg(timing))
    if config.columns_png is not None:
        draw_png(timing, config.columns_png)
    say(timing.verdict)
    say("drawn: " + ", ".join(str(file) for file in (config.columns, config.columns_png) if file))
    files = {"columns": config.columns, "columns_png": config.columns_png}
    figures = {"off": timing.off.figures, "on": timing.on.figures}
    return {"predicted": timing.verdict, "lossless": timing.on.lossless, "warnings": warnings, **figures, **files}


def _has_run(config: ChartConfig, out: Path | None, svg: Path | None) -> bool:
    """True if the chart is written to a run folder: to `out`, or without any other file to a new one."""
    return out is not None or (svg is None and config.png is None)


def _chart(costs: CostsConfig, config: ChartConfig, out: Path | None, svg: Path | None) -> dict[str, Any]:
    """Draw speed-up against acceptance length, to the requested files or to a run folder."""
    from paceline.bench.pages.speedup_chart import chart_of, draw

    chart, png = chart_of(costs, config), config.png
    line = chart.as_json()
    if _has_run(config, out, svg):
        run = RunFolder.create("compare", {"costs": costs, "chart": config}, out)
        run.write_json("speedup.json", line)
        svg, png, line["run"] = svg or run.path / "speedup.svg", png or run.path / "speedup.png", run.path
    draw(chart, svg, png)
    say(chart.text)
    say("drawn: " + ", ".join(str(file) for file in (svg, png) if file))
    return {**line, "svg": svg, "png": png}


def _draw(run: RunFolder, timing: Timing, picture: Path | None, svg_speed: float | None) -> dict[str, Any]:
    """Write the page and, if requested, the picture; returns the JSON line."""
    from paceline.bench.pages.timing import page, svg

    files = {"page": run.write("compare.html", page(timing))}
    if picture is not None:
        write_whole(picture, svg(timing, svg_speed))
        files["svg"] = picture
    off, on = timing.off, timing.on
    say(
        f"off {off.tokens_per_s:.1f} tokens/s, on {on.tokens_per_s:.1f} tokens/s ({on.tokens_per_round:.2f} tokens per "
        f"round): {timing.verdict}"
    )
    say("open in a browser: " + ", ".join(str(path) for path in files.values()))
    return {
        "speedup": timing.speedup,
        "doubt": timing.doubt,
        "off": off.figures,
        "on": {**on.figures, "tokens_per_round": on.tokens_per_round},
        "first_difference": timing.first_difference,
        "lossless": on.lossless,
        "text": on.text,
        "run": run.path,
        **files,
    }
