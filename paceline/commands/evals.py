"""Commands of `paceline evals`: options and output of `paceline.loop.evals`."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import REFUSED, Json, TerminalProgress, finish, say, starting
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.loop.evals.compare import Gate
from paceline.loop.evals.config import EndpointConfig, EvalSampling, JudgeConfig, MakeConfig, PricesConfig
from paceline.loop.evals.sandbox.run import Limits
from paceline.runs.folder import check_file

ENGINE = Only("model", "drafter", "dtype", "max_len", "backend", "isa", "weight_format", "device", "threads")
NAMES = Changed(
    drafter=Opt(default="none", help="none, default, ngram, a folder or hub id; must not change any answer.")
)
ENDPOINT = Changed(served_name=Opt("--served-name"), key_file=Opt("--api-key-file"), timeout_s=Opt("--timeout"))
JUDGE = Changed(url=Opt("--judge"), served_name=Opt("--judge-name"), key_file=Opt("--judge-key-file"))
LIMITS = Changed(
    wall_s=Opt("--code-seconds", help="Time limit for code in an answer, in seconds."),
    memory_bytes=Opt("--code-memory", help="Memory limit for all processes of this code together, in bytes."),
)


@options
def evals_make(
    sources: Annotated[list[str], typer.Argument(help="A store (its evals side is used), or files of questions.")],
    config: Annotated[MakeConfig, Without("sources"), Changed(fields=Opt("--field"))],
    out: Annotated[Path, typer.Option(help="File of the suite.")] = Path("suite.jsonl"),
    apart_from: Annotated[
        Path | None, typer.Option(help="A store: leave out cases similar to its training rows.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Make a suite of cases from a store or a file.

    A case is a question whose answer can be scored. A store is a folder of recorded prompts and answers, as paceline
    store add writes it; each recorded answer counts as the right one.

    Examples:
      paceline evals make store --scorer json --out suite.jsonl
    """
    from paceline.data.rows import Dropped
    from paceline.loop.evals.make import make_suite, without_leaks

    check_file(out, "choose another --out")
    dropped = Dropped()
    suite = make_suite(replace(config, sources=tuple(sources)), out.stem, dropped)
    if apart_from is not None:
        suite = without_leaks(suite, apart_from, dropped)
    for text in filter(None, (str(dropped) if dropped else "", dropped.unread_text)):
        say(text)
    for source in sources:
        if (Path(source) / "store.json").is_file():
            from paceline.loop.store.folder import Store

            Store.open(source).note_suite(out)  # first: `store forget` must know a suite whose command is killed now
    suite.write(out)
    kinds = {case.scorer["kind"] for case in suite}
    say(f"suite: {out}, {len(suite)} cases, scored by {', '.join(sorted(kinds))}")
    return {"suite": out, "cases": len(suite), "digest": suite.digest, "scorers": sorted(kinds)}


@options
def evals_run(
    suite: Annotated[Path, typer.Argument(help="File of the suite, as evals make writes it.")],
    engine: Annotated[EngineConfig, ENGINE, NAMES],
    endpoint: Annotated[EndpointConfig, ENDPOINT],
    sampling: EvalSampling,
    judge: Annotated[JudgeConfig, JUDGE],
    prices: PricesConfig,
    gate: Gate,
    limits: Annotated[Limits, Only("wall_s", "memory_bytes"), LIMITS],
    samples: Annotated[int, typer.Option(help="Answers to each case; its score is their mean.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Only the first cases.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this run in reports [default: model and drafter].")] = None,
    check_drafter: Annotated[
        bool,
        typer.Option(help="With a drafter and greedy decoding: check that the model alone gives the same answers."),
    ] = True,
    unsafe_code: Annotated[
        bool,
        typer.Option(
            "--unsafe-code", help="Run code in answers even where no sandbox is available. Only if you trust it."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/evals-<time>].")] = None,
    as_json: Json = False,
) -> None:
    """Score a model, a model with a drafter, or an endpoint.

    Answers the questions of a suite and scores each answer. Exit status 0: passed; 3: rejected, because an option sets
    a limit that the scores miss (such as --fail-below), or because the drafter changed an answer; 2: an error.

    Examples:
      paceline evals run suite.jsonl --model smollm2-135m \\
        --fail-below 0.8 --no-worse-than runs/teacher
    """
    _refuse_unused(engine, endpoint, judge)
    if endpoint.url is None:
        starting(engine.model)
    from paceline.loop.evals.run import EvalSettings, evaluate

    request = EvalSettings(
        endpoint, judge, sampling, prices, limits, gate, samples, limit, name, check_drafter, unsafe_code
    )
    done = evaluate(suite, engine, request, out=out, progress=TerminalProgress())
    finish(done.as_line(), as_json, REFUSED if done.refusals else 0)


def _refuse_unused(engine: EngineConfig, endpoint: EndpointConfig, judge: JudgeConfig) -> None:
    """Raises ConfigError for settings of a server without its address, and for settings of a local model next to
    --url."""
    local = EngineConfig(drafter="none")
    names = [each.name for each in fields(local) if getattr(engine, each.name) != getattr(local, each.name)]
    if endpoint.url is not None and names:
        raise ConfigError(f"--{names[0].replace('_', '-')} means nothing for the server at --url: leave it out")
    for server, address, changed in ((endpoint, "--url", ENDPOINT), (judge, "--judge", JUDGE)):
        for name, option in changed.opts.items() if server.url is None else ():
            if getattr(server, name) != getattr(type(server)(), name):
                raise ConfigError(f"{option.names[0]} means nothing without {address}: leave it out")


@options
def evals_compare(
    before: Annotated[Path, typer.Argument(help="Run folder of evals.")],
    after: Annotated[Path, typer.Argument(help="Another one, of the same suite.")],
    gate: Annotated[Gate, Without("no_worse_than")],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/evals-<time>].")] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs of one suite, case by case.

    Reports the difference in score with its confidence interval and p-value. Exit status 0: passed; 3: rejected,
    because the second run misses a limit set by an option (such as --margin); 2: an error.

    Examples:
      paceline evals compare runs/teacher runs/student --margin 0.02
    """
    from paceline.loop.evals.run import compare_runs

    comparison, refusals, run = compare_runs(before, after, gate, out=out, progress=TerminalProgress())
    line = {**comparison.as_line(), "passed": not refusals, "refusals": refusals, "run": run.path}
    finish(line, as_json, REFUSED if refusals else 0)
