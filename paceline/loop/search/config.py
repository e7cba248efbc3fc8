"""Settings of `paceline search`: a frozen dataclass, validated on construction. Does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from paceline.bounds import Checked, Count, Positive, Whole, at_least
from paceline.config import EngineConfig
from paceline.train.config import AnswerConfig, PromptsConfig


@dataclass(frozen=True, slots=True)
class SearchConfig(Checked):
    """Settings of a search for a drafter's training settings. A trial is one training with certain settings. Trial 0 is
    the planner's choice: the settings that `paceline train` would choose."""

    out: Path = Path("runs/search")
    """Run folder; repeat the same command to resume."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """The model to speed up."""
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    answers: tuple[Path, ...] = ()
    """Folders of answers from regenerate, or of a server's traces. A trial may train without one of them."""
    minutes: Positive = 60.0
    """Minutes of the whole search: answers, trials and the last comparison. Repeat the command with more minutes to
    continue a finished search."""
    trial_minutes: Positive | None = None
    """Minutes of training steps of a complete trial, one that is not stopped early [default: a tenth of `minutes`, as
    given when the search was first started]."""
    rungs: Count = 3
    """Number of measurements of a complete trial. The last is at the trial's end; after each earlier one, the trial may
    be stopped."""
    reduction: Annotated[int, at_least(2)] = 3
    """R: after a measurement, only the fastest 1/R of the trials continue. They are measured again after R times as
    much training."""
    most_trials: Count | None = None
    """Maximum number of trials, including trial 0 [default: as many as the minutes allow]."""
    num_prompts: Annotated[int, at_least(6)] = 36
    """Number of held-out prompts. The trials are measured on a third of them; on the others, the best trial is compared
    with trial 0."""
    measured_tokens: Count = 96
    """Longest answer in a measurement, in tokens."""
    repeat: Count = 3
    """Repetitions of a measurement; the two compared drafters alternate."""
    seed: Whole = 0
    """Seed of the settings that are tried, and of each training."""

    @property
    def rung_minutes(self) -> list[float]:
        """Minutes of training after which a trial (one training) is measured, ascending. The last number is the full
        length of a trial. At the earlier ones, a trial that is slow compared with others is stopped (successive
        halving). Trial 0, the planner's choice, is never stopped."""
        longest = self.trial_minutes or self.minutes / 10
        return [longest / self.reduction ** (self.rungs - 1 - rung) for rung in range(self.rungs)]
