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
    """Distils a teacher model into a smaller student, and accepts the student if it passes every gate (quality check).

    A call with the same `config.out` resumes the run there. An accepted student is in its folder `student`. A student
    that fails a gate is in the folder `refused`; a student accepted earlier is unchanged. `judges`: further gates,
    applied after the built-in ones.

    Raises ConfigError, PromptError (fewer than 10 different prompts), TrainingError (training diverged), CacheError
    (disk cannot be written or read), and ModelNotFoundError, ModelFileError, UnsupportedModelError or DownloadError if
    a model cannot be loaded.
    """
    from paceline.loop.distill.run import run

    return run(config, judges, progress or Progress())
