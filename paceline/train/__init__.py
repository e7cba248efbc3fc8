"""Trains a drafter for a model: the library calls behind the commands `paceline train` and `paceline regenerate`.

    from paceline.train import train
    from paceline.train.config import PromptsConfig, TrainConfig
    result = train(TrainConfig(out=Path("runs/mine"), prompting=PromptsConfig(prompts=("questions.jsonl",))))
    llm = LLM("smollm2-135m", drafter=str(result.drafter))

The import is quick: PyTorch is loaded by the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.tables import Progress
from paceline.train.config import RegenerateConfig, TrainConfig
from paceline.train.unused_settings import check_prompts

if TYPE_CHECKING:
    from paceline.train.answers.conversation import Regenerated
    from paceline.train.run import TrainResult


def train(config: TrainConfig, *, progress: Progress | None = None) -> TrainResult:
    """Trains a drafter for the model `config.target`: the target answers prompts, the drafter learns from the target's
    hidden states, and the engine measures the finished drafter on held-out prompts. A second call with the same
    `config.out` resumes the run. Raises subclasses of PacelineError, such as ConfigError, PromptError and
    TrainingError."""
    from paceline.train.run import run

    return run(config, progress or Progress())


def regenerate(config: RegenerateConfig, *, progress: Progress | None = None) -> Regenerated:
    """Has the target answer prompts and writes the answers to the folder `config.out`; existing answers are not
    generated again. Returns counts. Raises ConfigError for a setting without effect, or if the folder holds a run with
    other settings or is in use by another run, PromptError for unreadable or unusable prompts, CacheError for disk
    errors, NumericsError if the model fails on a prompt."""
    check_prompts(config.prompting)
    from paceline.train.answers.on_ray import run

    return run(config, progress or Progress())
