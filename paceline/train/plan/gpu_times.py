"""Times of a training on GPUs that do not depend on the number of prompts, and the uncertainty of its hours."""

from __future__ import annotations

import math

from paceline.train.config import TrainConfig
from paceline.train.plan.choices import Sizes
from paceline.train.plan.target_facts import MachineFacts, TargetFacts

COMPILE_S = 20.0
"""Seconds of the first step on a GPU, which compiles: 19 s on one H100."""
LOADS, LOAD_S, LOAD_BYTES_PER_S = 4, 10.0, 2e9
"""Loads of the target in a GPU run (answers, steps, serving, final figures); assumed seconds and bytes/s of each."""
SAVE_BYTES_PER_S = 1e9
UNSURE = (0.7, 2.0)
"""Factors for the lower and the upper limit of a GPU's hours: the efficiency was measured on one GPU and one shape."""
CHECKPOINT_BYTES = 12.0
"""Bytes per parameter with its two moments, float32."""


def fixed_seconds(
    config: TrainConfig, target: TargetFacts, machine: MachineFacts, sizes: Sizes, steps_s: float
) -> dict[str, float]:
    """Estimates the seconds of those parts of a GPU run that do not grow with the number of prompts: "loading" (of the
    target), "compiling" and "checkpoints" (writing them). Returns {} for a run on CPUs. `steps_s`: seconds of all
    training steps, which decide how many checkpoints are written."""
    if not machine.is_gpu:
        return {}
    weights = 0.0 if config.remote.features_at else target.total_bytes
    number = 1 + (0.0 if math.isinf(steps_s) else steps_s // (60 * config.loop.checkpoint_minutes))
    saving_s = number * CHECKPOINT_BYTES * sizes.parameters / SAVE_BYTES_PER_S
    return {"loading": LOADS * (LOAD_S + weights / LOAD_BYTES_PER_S), "compiling": COMPILE_S, "checkpoints": saving_s}


def hours_range(config: TrainConfig, hours: dict[str, float]) -> tuple[float, float]:
    """Returns the (lowest, highest) estimate of a run's hours: 0.7 times and 2 times (`UNSURE`) the sum of `hours`
    (stage -> expected hours). If the run has a time limit, the hours of the stage "steps" are exact, and are not
    multiplied."""
    has_end = config.minutes is not None or config.loop.max_minutes is not None
    exact = hours["steps"] if has_end else 0.0
    low, high = ((sum(hours.values()) - exact) * factor + exact for factor in UNSURE)
    return low, high
