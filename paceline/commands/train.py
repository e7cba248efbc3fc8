"""`paceline train` and `paceline regenerate`: the options of these calls of `paceline.train`, and what is shown of the runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, Without, options, typed
from paceline.commands.shared import Json, JsonSchema, Regex, TerminalProgress, grammar_of, say
from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError
from paceline.runs.folder import RunFolder, check_folder
from paceline.runs.ranks import Ranks
from paceline.train import config as asks
from paceline.train import regenerate as run_regenerate
from paceline.train import train as run_train
from paceline.train.run_file import config_of, overlaid, read_run_file

Target = Annotated[
    EngineConfig,
    Only("model", "dtype", "backend", "isa", "weight_format", "device", "threads"),
    Changed(model=Opt("--target", help="The model to be sped up: built-in name, folder, GGUF file or hub id.")),
]
GIVEN = ("system", "before", "tools", "variables", "grammar")
"""What an application gives with every prompt: `train` reads answers that were given it."""
ANSWERS = {"temperatures": Opt("--temperature"), "variables": Opt("--template-variable")}
SHAPE = {
    "num_layers": Opt("--layers"),
    "num_heads": Opt("--heads"),
    "num_kv_heads": Opt("--kv-heads"),
    "block_size": Opt("--block-size", "--block"),
    "num_taps": Opt("--taps"),
    "start": Opt("--first-layers"),
    "is_causal": Opt("--causal/--bidirectional"),
    "mask_token_id": Opt("--mask-token"),
    "kind": Opt("--drafter-kind"),
}

LOSS = Changed(name=Opt("--loss"), vocab=Opt("--loss-vocab"), selector=Opt("--selector-weight"))


@options
def train(
    config: Annotated[asks.TrainConfig, Without("target", "asked", "answering", "elsewhere", "shape", "loop", "given")],
    target: Target,
    asked: asks.PromptsConfig,
    answering: Annotated[asks.AnswerConfig, Without("seed", "top_k", *GIVEN), Changed(temperatures=Opt("--temperature"))],
    elsewhere: asks.ElsewhereConfig,
    shape: Annotated[asks.DrafterShape, Changed(**SHAPE)],
    loop: Annotated[asks.LoopConfig, Without("loss", "optim"), Changed(autocast=Opt("--autocast/--full-precision"))],
    loss: Annotated[asks.LossConfig, Without("alpha"), LOSS],
    optim: Annotated[asks.OptimConfig, Only("name", "lr"), Changed(name=Opt("--optimiser"))],
    run_file: Annotated[
        Path | None, typer.Option("--config", help="A run.yaml, as every run leaves one. What is typed wins over it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say the plan and stop: no weight is loaded.")] = False,
    device_name: Annotated[
        str | None, typer.Option(help="With --dry-run: plan for another machine, as '8x H100' [default: this one].")
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # pyright: ignore[reportArgumentType]  (typer gives it)
) -> dict[str, Any] | None:
    """Train a drafter for a model from prompts or traffic.

    The target answers the prompts, and its hidden states teach a DFlash drafter. The plan is printed first; settings
    that are not given are chosen for this target, data and machine. The same command resumes a run that was
    interrupted.

    Examples:
      paceline train --target path/to/model --prompts questions.jsonl \\
        --out runs/mine --minutes 60
    """
    config = replace(
        config,
        target=target,
        asked=asked,
        answering=replace(answering, seed=loop.seed),
        elsewhere=elsewhere,
        shape=shape,
        loop=replace(loop, loss=loss, optim=optim),
    )
    if context is not None:
        config = _merged(config, run_file, typed(train, context))
    if dry_run:
        return _dry_run(config, device_name)
    if device_name:
        raise ConfigError("--device-name plans for another machine: add --dry-run")
    check_folder(config.out)
    result = run_train(config, progress=TerminalProgress())
    if not Ranks.here().is_first:
        return None
    try:
        from paceline.commands.evaluate import report

        report(result.run)
    except (ConfigError, CacheError) as error:
        say(f"note: no report.html ({error})")
    from paceline.bench.pages.run_page import read_run, training_verdict

    verdict = training_verdict(trained := read_run(result.run))
    say("\n".join([*kept_files(result.run), verdict]))
    return {**asdict(result), "expected": trained.plan.get("expected"), "verdict": verdict}


def kept_files(run: Path) -> list[str]:
    """A sentence on the files that only a run that goes on needs, with their size; none where there are none."""
    names = [each.name for each in sorted(run.iterdir()) if each.is_dir() and each.name.startswith(("checkpoints", "features"))]
    size = sum(file.stat().st_size for name in names for file in (run / name).rglob("*") if file.is_file())
    if not size:
        return []
    folders = " and ".join(f"{run / name}" for name in names)
    return [
        f"{folders} ({size / 1e6:,.0f} MB) may be deleted unless this run is to go on; serving needs {run / 'drafter'} alone"
    ]


def _dry_run(config: asks.TrainConfig, device_name: str | None) -> dict[str, Any]:
    """Say the plan; into the run's folder too, where one was named."""
    from paceline.train.plan.training_plan import make_plan

    if config.is_given("out"):
        check_folder(config.out)
    plan = make_plan(config, device_name, reads_answers=True)
    say(plan.text)
    if config.is_given("out"):
        say(f"plan: {RunFolder(config.out).write_json('dry-run.json', plan.as_json())}")
    return plan.as_json()


PARTS = {"loss": "loop.loss", "optim": "loop.optim"}
"""Where parameters of the command stand in its config."""


def _merged(config: asks.TrainConfig, run_file: Path | None, names: set[str]) -> asks.TrainConfig:
    """What was typed over what the file says. Raises ConfigError."""
    parted = [name.partition(".") for name in names]
    typed_names = {f"{PARTS.get(part, part)}.{field}".removeprefix("config.") for part, _, field in parted}
    if "loop.seed" in typed_names:
        typed_names.add("answering.seed")
    tree = read_run_file(run_file, say) if run_file else {}
    return config_of(overlaid(tree, config, typed_names), run_file or "--config")


@options
def regenerate(
    config: Annotated[asks.RegenerateConfig, Without("target", "asked", "answering", "elsewhere")],
    target: Target,
    asked: asks.PromptsConfig,
    answering: Annotated[asks.AnswerConfig, Without("grammar"), Changed(**ANSWERS)],
    elsewhere: Annotated[asks.ElsewhereConfig, Without("features_from", "features_folder")],
    json_schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Json = False,
) -> dict[str, Any] | None:
    """Have the target answer prompts: the data to train on.

    Prompts are answered in batches. Without --prompts the target writes some itself.

    Examples:
      paceline regenerate --prompts questions.jsonl --out runs/answers
    """
    answering = replace(answering, grammar=grammar_of(json_schema, regex))
    config = replace(config, target=target, asked=asked, answering=answering, elsewhere=elsewhere)
    check_folder(config.out)
    result = run_regenerate(config, progress=TerminalProgress())
    return asdict(result) if Ranks.here().is_first else None
