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
    """Settings of a search for a drafter's training settings. A trial is one training."""

    out: Path = Path("runs/search")
    """Run folder; repeat the same command to resume."""
    target: EngineConfig = field(default_factory=EngineConfig)
    """The model to speed up."""
    prompting: PromptsConfig = field(default_factory=PromptsConfig)
    answering: AnswerConfig = field(default_factory=AnswerConfig)
    answers: tuple[Path, ...] = ()
    """Folder of answers from regenerate, or of a server's traces. A trial can leave one out."""
    minutes: Positive = 60.0
    """Minutes of the whole search: answers, trials and the last comparison. A higher number continues a search."""
    trial_minutes: Positive | None = None
    """Minutes of training steps of a trial that is never stopped [default: a tenth of the first start's `minutes`]."""
    rungs: Count = 3
    """How often a trial is measured: at its end, and when it may be stopped before."""
    reduction: Annotated[int, at_least(2)] = 3
    """One of this many trials continues after a measurement, to this many times the training steps."""
    most_trials: Count | None = None
    """Most trials, the planner's choice included [default: as many as the minutes allow]."""
    num_prompts: Annotated[int, at_least(6)] = 36
    """Held-out prompts: a third of them measures the trials, the others judge the winner."""
    measured_tokens: Count = 96
    """Longest answer in a measurement, in tokens."""
    repeat: Count = 3
    """Turns of a measurement; drafters alternate."""
    seed: Whole = 0
    """Seed of the settings that are tried, and of each training."""

    @property
    def rung_minutes(self) -> list[float]:
        """Minutes of training after which a trial (one training) is measured, ascending. The last number is the full
        length of a trial. At the earlier ones, a trial that is slow compared with others is stopped (successive
        halving). Trial 0, the planner's choice, is never stopped."""
        longest = self.trial_minutes or self.minutes / 10
        return [longest / self.reduction ** (self.rungs - 1 - rung) for rung in range(self.rungs)]
