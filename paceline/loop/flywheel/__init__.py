"""One turn of the flywheel, as a library call; `paceline turn` shows what it says.

    from paceline.loop.flywheel import turn
    from paceline.loop.flywheel.config import read_config
    result = turn(read_config(Path("flywheel.yaml")))       # result.passed, result.model, result.drafter

What was recorded becomes evals, a drafter, a smaller model, and its drafter; the next call starts from what that answered.
Importing this is quick: PyTorch and TRL come with the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.loop.flywheel.config import FlywheelConfig
from paceline.report.tables import Progress

if TYPE_CHECKING:
    from paceline.loop.flywheel.pricing import TurnPrice
    from paceline.loop.flywheel.run import TurnResult


def turn(config: FlywheelConfig, *, progress: Progress | None = None) -> TurnResult:
    """One turn, stage by stage; a stage that is finished is not run again, one that was killed goes on where it stopped.

    A student that a gate refuses comes back with `passed` False; what serves is then what served before. Raises the errors of
    its stages (paceline.errors), with nothing swapped: PromptError on an empty or poisoned store and on evals that leak,
    JudgeError, TrainingError, ConfigError where the turn was begun with other settings or has nothing to begin with.
    """
    from paceline.loop.flywheel.run import run

    return run(config, progress or Progress())


def price(config: FlywheelConfig, *, progress: Progress | None = None) -> TurnPrice:
    """What the next turn, or what is left of it, would take: minutes, tokens, disk, and money. Writes nothing."""
    from paceline.loop.flywheel.pricing import price_of

    return price_of(config, progress or Progress())
