"""`paceline train` and `paceline regenerate`: the options of these calls of `paceline.train`, and what is shown of the runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import Json, JsonSchema, Regex, TerminalProgress, grammar_of, say
from paceline.config import EngineConfig
from paceline.errors import CacheError, ConfigError
from paceline.train import config as asks
from paceline.train import regenerate as run_regenerate
from paceline.train import train as run_train
from paceline.train.ranks import Ranks

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
    "num_taps": Opt("--taps"),
    "start": Opt("--first-layers"),
    "is_causal": Opt("--causal/--bidirectional"),
    "mask_token_id": Opt("--mask-token"),
}


@options
def train(
    config: Annotated[asks.TrainConfig, Without("target", "asked", "answering", "elsewhere", "shape", "loop")],
    target: Target,
    asked: asks.PromptsConfig,
    answering: Annotated[asks.AnswerConfig, Without("seed", *GIVEN), Changed(temperatures=Opt("--temperature"))],
    elsewhere: asks.ElsewhereConfig,
    shape: Annotated[asks.DrafterShape, Changed(**SHAPE)],
    loop: Annotated[asks.LoopConfig, Without("loss", "optim"), Changed(autocast=Opt("--autocast/--full-precision"))],
    loss: Annotated[asks.LossConfig, Without("alpha"), Changed(name=Opt("--loss"), vocab=Opt("--loss-vocab"))],
    optim: Annotated[asks.OptimConfig, Only("name", "lr"), Changed(name=Opt("--optimiser"))],
    as_json: Json = False,
) -> dict[str, Any] | None:
    """Prompts in, drafter out: the target answers, its hidden states teach a DFlash drafter. Killed, it resumes.

    Example: paceline train --prompts questions.jsonl --out runs/mine --max-minutes 30
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
    result = run_train(config, progress=TerminalProgress())
    if not Ranks.here().is_first:
        return None
    try:
        from paceline.commands.evaluate import report

        report(result.run)
    except (ConfigError, CacheError) as error:
        say(f"note: no report.html ({error})")
    return asdict(result)


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
    """The target answers prompts, batched: the data a drafter learns from. Without prompts it writes some itself.

    Example: paceline regenerate --prompts questions.jsonl --out runs/answers
    """
    answering = replace(answering, grammar=grammar_of(json_schema, regex))
    config = replace(config, target=target, asked=asked, answering=answering, elsewhere=elsewhere)
    result = run_regenerate(config, progress=TerminalProgress())
    return asdict(result) if Ranks.here().is_first else None
