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
    """Runs one iteration (turn) of the flywheel, stage by stage; skips finished stages and resumes a killed stage.

    If a gate (minimum quality) refuses the student, `passed` is False and the served model does not change. Raises the
    errors of its stages without changing the served model: PromptError on too few answers or eval cases, on too many
    bad answers, and if the user's own suite overlaps with training data; JudgeError; TrainingError; ConfigError if the
    iteration was started with other settings or has no answers to start from.
    """
    from paceline.loop.flywheel.run import run

    return run(config, progress or Progress())


def price(config: FlywheelConfig, *, progress: Progress | None = None) -> TurnPrice:
    """Estimates minutes, tokens, disk space and cost of each stage of the flywheel's next iteration (turn); finished
    stages cost nothing. Writes no files."""
    from paceline.loop.flywheel.pricing import price_of

    return price_of(config, progress or Progress())
