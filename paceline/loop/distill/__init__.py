"""Distillation of a teacher and its answers into a smaller student, as a library call; `paceline distill` calls it.

    from paceline.loop.distill import distill
    from paceline.loop.distill.config import DistillConfig
    result = distill(DistillConfig(out=Path("runs/student"), answers=(Path("runs/answers/answers"),)))
    llm = LLM(str(result.student))

This import is cheap; PyTorch and TRL are imported by the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.loop.distill.config import DistillConfig
from paceline.report.tables import Progress

if TYPE_CHECKING:
    from paceline.loop.distill.gate import Judge
    from paceline.loop.distill.run import DistillResult


def distill(config: DistillConfig, *, judges: Sequence[Judge] = (), progress: Progress | None = None) -> DistillResult:
    """Trains a student and accepts it if it passes every gate. `judges` are additional gates of the caller.

    A call with the same folder resumes the run in it. A student that fails a gate is returned with `passed` False, in
    the folder `refused`; an earlier accepted student is unchanged. Raises ConfigError, PromptError (too few prompts),
    TrainingError (training diverged), CacheError, and the errors of loading models.
    """
    from paceline.loop.distill.run import run

    return run(config, judges, progress or Progress())
