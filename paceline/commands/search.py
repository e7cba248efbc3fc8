"""`paceline search`: finds settings of a drafter's training by trials."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

from paceline.commands.options import Only, Without, options
from paceline.commands.shared import REFUSED, Json, TerminalProgress, finish, starting
from paceline.commands.train import Target
from paceline.loop.search import config as asks
from paceline.train.config import AnswerConfig, PromptsConfig


@options
def search(
    config: Annotated[asks.SearchConfig, Without("target", "prompting", "answering")],
    target: Target,
    prompting: Annotated[PromptsConfig, Only("prompts", "limit", "strict")],
    answering: Annotated[AnswerConfig, Only("max_tokens", "max_prompt_tokens", "system", "before", "raw")],
    as_json: Json = False,
) -> None:
    """Search training settings that serve a workload fastest.

    Tries several settings of paceline train (the trials), such as the shape of the drafter, its block size, the loss,
    the learning rate and the sources of answers. Each trial's drafter is measured by tokens/s on held-out prompts; bad
    trials are stopped early (successive halving). The best trial is then compared with the settings that paceline train
    would choose itself, on prompts that no trial was measured on. The same command resumes an interrupted search. Exit
    status 0: better settings were found; 3: train's own choice is kept; 2: an error.

    Examples:
      paceline search --target smollm2-135m --answers runs/traffic \\
        --minutes 60 --out runs/search
    """
    config = replace(config, target=target, prompting=prompting, answering=answering)
    starting(target.model)
    from paceline.loop.search.run import search as library

    result = library(config, progress=TerminalProgress())
    finish(asdict(result), as_json, 0 if result.is_better else REFUSED)
