"""Make a drafter for a model, as library calls; the commands of the same names show what these say.

    from paceline.train import train
    from paceline.train.config import PromptsConfig, TrainConfig
    result = train(TrainConfig(out=Path("runs/mine"), asked=PromptsConfig(prompts=("questions.jsonl",))))
    llm = LLM("smollm2-135m", drafter=str(result.drafter))

Importing this is quick: PyTorch comes with the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.tables import Progress
from paceline.train.config import RegenerateConfig, TrainConfig

if TYPE_CHECKING:
    from paceline.train.answers.conversation import Regenerated
    from paceline.train.run import TrainResult


def train(config: TrainConfig, *, progress: Progress | None = None) -> TrainResult:
    """Prompts in, drafter out: the target answers, its hidden states teach a drafter, the engine measures it.

    Goes on where an earlier call with the same folder stopped. Raises the errors of its stages (paceline.errors).
    """
    from paceline.train.run import run

    return run(config, progress or Progress())


def regenerate(config: RegenerateConfig, *, progress: Progress | None = None) -> Regenerated:
    """The target answers prompts into a folder; what an earlier call answered there is not asked again.

    Raises ConfigError when the folder was begun with other settings or another run is at work there, PromptError on prompts
    that cannot be read or used, CacheError when the disk refuses, NumericsError when the model fails at a prompt.
    """
    from paceline.train.answers.on_ray import run

    return run(config, progress or Progress())
