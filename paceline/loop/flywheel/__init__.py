"""One iteration ("turn") of the flywheel, as a library call; `paceline turn` calls it.

    from paceline.loop.flywheel import turn
    from paceline.loop.flywheel.config import read_config
    result = turn(read_config(Path("flywheel.yaml")))       # result.passed, result.model, result.drafter

An iteration makes evals, a drafter, a smaller model and its drafter from recorded answers; the next one starts from the
answers of that model. This import is cheap; PyTorch and TRL are imported by the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.loop.flywheel.config import FlywheelConfig
from paceline.report.tables import Progress

if TYPE_CHECKING:
    from paceline.loop.flywheel.pricing import TurnPrice
    from paceline.loop.flywheel.run import TurnResult


def turn(config: FlywheelConfig, *, progress: Progress | None = None) -> TurnResult:
    """Runs one iteration (turn) of the flywheel: distils the served model into a student, and trains drafters for both.
    Skips finished stages and resumes a killed stage.

    The served model changes only if the student passes every gate (minimum quality) and no stage raises an error.
    PromptError: too few answers or eval cases, too many bad answers, or the user's own suite overlaps with training
    data. JudgeError: the judge of the evals fails. TrainingError: a training diverges. ConfigError: the iteration was
    started with other settings, or there are neither recorded answers nor prompts.
    """
    from paceline.loop.flywheel.run import run

    return run(config, progress or Progress())


def price(config: FlywheelConfig, *, progress: Progress | None = None) -> TurnPrice:
    """Estimates minutes, tokens, disk space and cost of each stage of the current or next iteration (turn). Finished
    stages cost nothing. Writes no files."""
    from paceline.loop.flywheel.pricing import price_of

    return price_of(config, progress or Progress())
