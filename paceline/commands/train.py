"""`paceline train` and `paceline regenerate`: options and output of `paceline.train`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, Without, options, typed
from paceline.commands.shared import TARGET_FIELDS, Json, JsonSchema, Regex, TerminalProgress, grammar_of, say
from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError
from paceline.runs.folder import RunFolder, check_folder, check_own
from paceline.runs.ranks import Ranks
from paceline.train import config as asks
from paceline.train import regenerate as run_regenerate
from paceline.train import train as run_train
from paceline.train.run_file import OPTIONS, config_of, overlaid, read_run_file

Target = Annotated[
    EngineConfig,
    TARGET_FIELDS,
    Changed(model=Opt("--target", help="The target model: built-in name, folder, GGUF file or hub id.")),
]
GIVEN = ("system", "before", "tools", "variables", "grammar")
"""Fields of AnswerConfig that describe an application. They are not options of `train`, which reads answers made with
them."""


def _renamed(part: str) -> dict[str, Opt]:
    """Return the options of a part of TrainConfig, such as "shape", that are not named after their fields."""
    return {
        name.removeprefix(f"{part}."): Opt(option)
        for name, option in OPTIONS.items()
        if name.rpartition(".")[0] == part
    }


@options
def train(
    config: Annotated[
        asks.TrainConfig, Without("target", "prompting", "answering", "remote", "shape", "loop", "given")
    ],
    target: Target,
    prompting: Annotated[asks.PromptsConfig, Changed(**_renamed("prompting"))],
    answering: Annotated[asks.AnswerConfig, Without("seed", "top_k", *GIVEN), Changed(**_renamed("answering"))],
    remote: asks.RemoteConfig,
    shape: Annotated[asks.DrafterShape, Changed(**_renamed("shape"), block_size=Opt("--block-size", "--block"))],
    loop: Annotated[asks.LoopConfig, Without("loss", "optim"), Changed(**_renamed("loop"))],
    loss: Annotated[asks.LossConfig, Without("alpha"), Changed(**_renamed("loop.loss"))],
    optim: Annotated[asks.OptimConfig, Only("name", "lr"), Changed(**_renamed("loop.optim"))],
    run_file: Annotated[
        Path | None,
        typer.Option("--config", help="A run.yaml, as written by every run. The command line overrides it."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; loads no weights.")] = False,
    device_name: Annotated[
        str | None,
        typer.Option(help="With --dry-run: plan for another machine, such as '8x H100' [default: this one]."),
    ] = None,
    as_json: Json = False,
    context: typer.Context = None,  # pyright: ignore[reportArgumentType]  (typer gives it)
) -> dict[str, Any] | None:
    """Train a drafter for a model from prompts or traffic.

    The target answers the prompts, and a drafter (by default a DFlash drafter) is trained on its hidden states. The
    plan is printed first; settings that are not given are chosen for this target, data and machine. The same command
    resumes an interrupted run.

    Examples:
      paceline train --target path/to/model --prompts questions.jsonl \\
        --out runs/mine --minutes 60
    """
    config = replace(
        config,
        target=target,
        prompting=prompting,
        answering=replace(answering, seed=loop.seed),
        remote=remote,
        shape=shape,
        loop=replace(loop, loss=loss, optim=optim),
    )
    if context is not None:
        config = _merged(config, run_file, typed(train, context))
    if dry_run:
        return _dry_run(config, device_name)
    if device_name:
        raise ConfigError("--device-name plans for another machine: add --dry-run")
    check_own(config.out, "train")
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
    """Return a hint for the user: a sentence that names a run's folders of checkpoints and features, with their size,
    and says that they may be deleted unless the run is to be resumed. The result is a list of this sentence, or an
    empty list without such folders."""
    names = [
        path.name
        for path in sorted(run.iterdir())
        if path.is_dir() and path.name.startswith(("checkpoints", "features"))
    ]
    size = sum(file.stat().st_size for name in names for file in (run / name).rglob("*") if file.is_file())
    if not size:
        return []
    folders = " and ".join(f"{run / name}" for name in names)
    return [
        f"{folders} ({size / 1e6:,.0f} MB) may be deleted unless this run is to go on; serving needs "
        f"{run / 'drafter'} alone"
    ]


def _dry_run(config: asks.TrainConfig, device_name: str | None) -> dict[str, Any]:
    """Print the plan; also writes it to the run folder, if one is given."""
    from paceline.train.methods.kinds import check_drafter
    from paceline.train.plan.training_plan import make_plan

    if config.scale == "tiny":
        raise ConfigError("--scale tiny has fixed settings and makes no plan: leave --dry-run out, it takes a minute")
    check_drafter(config)
    if config.is_given("out"):
        check_folder(config.out)
    plan = make_plan(config, device_name, reads_answers=True)
    say(plan.text)
    if config.is_given("out"):
        say(f"plan: {RunFolder(config.out).write_json('dry-run.json', plan.as_json())}")
    return plan.as_json()


PARTS = {"loss": "loop.loss", "optim": "loop.optim"}
"""Parameter of the command -> its path in TrainConfig, if the two differ."""


def _merged(config: asks.TrainConfig, run_file: Path | None, names: set[str]) -> asks.TrainConfig:
    """Return the run file's settings, overridden by the command line's. Raises ConfigError, also for an option that has
    no effect next to the others."""
    from paceline.train.plan.choices import trained_kind
    from paceline.train.unused_settings import check_unused

    parted = [name.partition(".") for name in names]
    typed_names = {f"{PARTS.get(part, part)}.{field}".removeprefix("config.") for part, _, field in parted}
    if "loop.seed" in typed_names:
        typed_names.add("answering.seed")
    tree = read_run_file(run_file) if run_file else {}
    if "minutes" in typed_names:  # the file's minutes for steps are those of another plan
        tree.get("loop", {}).pop("max_minutes", None)
    config = config_of(overlaid(tree, config, typed_names), run_file or "--config")
    check_unused(config, trained_kind(config), typed_names)
    return config


ANSWERS = {**_renamed("answering"), "variables": Opt("--template-variable")}


@options
def regenerate(
    config: Annotated[asks.RegenerateConfig, Without("target", "prompting", "answering", "remote")],
    target: Target,
    prompting: Annotated[asks.PromptsConfig, Without("tags")],
    answering: Annotated[asks.AnswerConfig, Without("grammar"), Changed(**ANSWERS)],
    remote: Annotated[asks.RemoteConfig, Without("features_from", "features_folder")],
    json_schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Json = False,
) -> dict[str, Any] | None:
    """Have the target answer prompts: the data to train on.

    Writes the answers to a folder from which paceline train can train a drafter. Without --prompts, the target also
    generates the prompts.

    Examples:
      paceline regenerate --prompts questions.jsonl --out runs/answers
    """
    answering = replace(answering, grammar=grammar_of(json_schema, regex))
    config = replace(config, target=target, prompting=prompting, answering=answering, remote=remote)
    check_folder(config.out)
    result = run_regenerate(config, progress=TerminalProgress())
    return asdict(result) if Ranks.here().is_first else None
