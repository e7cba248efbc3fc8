"""From a teacher and its answers to a smaller student, as a library call; `paceline distill` shows what it says.

    from paceline.loop.distill import distill
    from paceline.loop.distill.config import DistillConfig
    result = distill(DistillConfig(out=Path("runs/student"), answers=(Path("runs/answers/answers"),)))
    llm = LLM(str(result.student))

Importing this is quick: PyTorch and TRL come with the call.
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
    """Teach a student, measure it beside its teacher and keep it only if every gate passes; `judges` are gates of one's own.

    Goes on where an earlier call with the same folder stopped. A student that is refused comes back with `passed` False, in
    a folder named `refused`; what an earlier run kept stays as it is. Raises ConfigError, PromptError, TrainingError (its
    numbers diverged), CacheError, and what reading the models raises.
    """
    from paceline.loop.distill.run import run

    return run(config, judges, progress or Progress())
