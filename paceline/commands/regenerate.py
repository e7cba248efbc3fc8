"""`paceline regenerate`: the options of `paceline.train.regenerate`, and what is shown of the run."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from paceline.commands.options import Changed, Opt, Without, options
from paceline.commands.shared import Json
from paceline.commands.terminal import TerminalProgress
from paceline.commands.train import Target
from paceline.train import regenerate as run
from paceline.train.config import AnswerConfig, PromptsConfig, RegenerateConfig
from paceline.train.ranks import Ranks


@options
def regenerate(
    config: Annotated[RegenerateConfig, Without("target", "asked", "answering")],
    target: Target,
    asked: PromptsConfig,
    answering: Annotated[AnswerConfig, Changed(temperatures=Opt("--temperature"))],
    as_json: Json = False,
) -> dict[str, Any] | None:
    """The target answers prompts, batched: the data a drafter learns from. Without prompts it writes some itself.

    Example: paceline regenerate --prompts questions.jsonl --out runs/answers
    """
    result = run(replace(config, target=target, asked=asked, answering=answering), progress=TerminalProgress())
    return asdict(result) if Ranks.here().is_first else None
