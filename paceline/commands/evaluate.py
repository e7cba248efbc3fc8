"""`paceline evaluate` measures a drafter; `paceline report` writes the HTML page of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench.config import BenchConfig
from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import Json, TerminalProgress, say, starting
from paceline.config import EngineConfig
from paceline.runs.folder import write_whole

FIELDS = Only("model", "max_len", "dtype", "backend", "isa", "weight_format", "device", "threads")
TARGET = Changed(model=Opt("--model", "--target", help="The drafter's target model."))
NAMES = Changed(batches=Opt("--batch", default=(1, 8)), temperatures=Opt("--temperature", default=(0.0, 1.0)))


@options
def evaluate(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, default, ngram, or a hub id.")],
    engine: Annotated[EngineConfig, FIELDS, TARGET],
    config: Annotated[BenchConfig, Without("drafters", "against", "marginals"), NAMES],
    prompts: Annotated[
        list[str] | None, typer.Option(help="JSON lines, Parquet, folder of traces or data set id. May be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first prompts of each source.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(help="Only requests with this tag (x-paceline-tag), of traces or a store. May be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder, may be a training run's [default: runs/evaluate-<time>].")
    ] = None,
    by_context: Annotated[
        bool, typer.Option("--by-context", help="Also report the acceptance length by context length.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Measure a drafter in the real engine, set by set.

    Answers each set of prompts with plain decoding and with the drafter. Reports acceptance length, survival by draft
    position and speed-up for each set, and checks whether both give equal texts.

    Examples:
      paceline evaluate runs/mine/drafter --prompts questions.jsonl --limit 20
    """
    starting(engine.model)
    from paceline.bench import evaluate as library

    engine = replace(engine, speculate="full")
    chosen = {"limit": limit, "out": out, "tags": tuple(tag or ()), "shows_context": by_context}
    done = library.evaluate(drafter, prompts or (), config, engine=engine, progress=TerminalProgress(), **chosen)
    say(f"figures and texts: {done.run.path / library.EVALUATION} (paceline report {done.run.path} draws them)")
    return {**done.as_line(), "run": done.run.path}


@options
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder of train, evaluate or bench decode.")],
    as_json: Json = False,
) -> dict[str, Any]:
    """Write the HTML page of a run.

    The page, report.html in the run folder, has a summary, curves, figures, survival by draft position and texts. It is
    one file that needs no network and no server.

    Examples:
      paceline report runs/mine
    """
    from paceline.bench.pages.run_page import page, read_run

    run = read_run(folder)
    file = run.path / "report.html"
    write_whole(file, page(run))
    say(f"report: {file}")
    return {"report": file, "steps": len(run.steps), "checks": len(run.checks), "sets": list(run.sets)}
