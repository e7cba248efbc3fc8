"""Expected acceptance length of a drafter, from measured learning curves; for the plan of a training.

    expected_of("smollm2-135m", Learned(blocks=202_000, answers=44, places=48))

The number of blocks alone is too optimistic: after six passes over an answer there is little left to learn from it. So
at most `EPOCHS` times the blocks of *different* answers count. A target without its own curve has an interval from
published trainings (`trainings.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.train.plan.trainings import TRAININGS, published

NUMBERS = (300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Numbers of answers that are compared."""
ENOUGH = 0.85
"""The advised number of answers reaches this share of the largest gain."""
EPOCHS = 6.0
"""Most passes over the same answers that count as training data, as in the runs that measured the curves."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Amount of training data of a run: numbers of answers and of blocks (an anchor token and the draft positions after
    it)."""

    blocks: float
    answers: int | None
    """Different answers: samples of one prompt count once. None if they are counted only when the run begins."""
    places: float
    """Blocks per answer and epoch."""

    @property
    def counted(self) -> float:
        """Number of blocks that count as training data: those of at most 6 epochs (`EPOCHS`), since further ones add
        little."""
        return self.blocks if self.answers is None else min(self.blocks, EPOCHS * self.places * self.answers)


def expected_tokens(target: str, blocks: float) -> dict[str, Any] | None:
    """Returns the result that training a drafter on this many blocks is expected to have, by the learning curve that
    was measured for the target model `target`; None if it has no curve. Keys:
    - "tokens_per_round": acceptance length in serving, interpolated linearly in log(blocks);
    - "is_beyond_the_curve": True for more blocks than measured;
    - "source": where the curve is recorded;
    - "data": the data on which it was measured."""
    curves = json.loads(Path(__file__).with_name("curves.json").read_text(encoding="utf-8"))["curves"]
    curve = next((entry for entry in curves if entry["target"] == target), None)
    if curve is None:
        return None
    points = curve["eal"]
    flatter = curve["served_at_last"] / points[-1][1]
    (fewest, first), (most, _) = points[0], points[-1]
    if blocks <= fewest:
        value = 1.0 + (first - 1.0) * blocks / fewest
    else:  # linear in log(blocks), and level beyond the last point
        value = float(np.interp(math.log(blocks), [math.log(x) for x, _ in points], [y for _, y in points]))
    return {
        "tokens_per_round": round(max(1.0, value * flatter), 2),
        "is_beyond_the_curve": blocks > most,
        "source": curve["source"],
        "data": curve["data"],
    }


def expected_of(target: str, learned: Learned) -> dict[str, Any]:
    """Returns the result that training a drafter on this amount of data is expected to have. It uses the learning curve
    measured for the target model `target` or, if there is no such curve, published trainings of other drafters. Keys:
    - "tokens_per_round": acceptance length in serving;
    - "interval": (lowest, highest) acceptance length; only without a curve;
    - "is_own": True if the target has a curve;
    - "is_beyond_the_curve": True if there is more data than in the measurements;
    - "source", "data": where the measurements are recorded, and on which data they were made;
    - "advised": number of answers that is advised for a training;
    - "answers", "places": copies of `learned.answers` (number of answers) and `learned.places` (blocks per answer and
      epoch)."""
    expected = expected_tokens(target, learned.counted)
    is_own = expected is not None
    if expected is None:
        guess = published(learned.counted / (EPOCHS * learned.places))
        expected = {
            "tokens_per_round": round(guess.tokens_per_round, 2),
            "interval": (round(guess.low, 2), round(guess.high, 2)),
            "is_beyond_the_curve": guess.is_beyond,
            "source": "advice.json",
            "data": f"{len(TRAININGS)} published trainings",
        }
    advised = advised_answers(target, learned.places)
    return {**expected, "is_own": is_own, "advised": advised, "answers": learned.answers, "places": learned.places}


def expected_lines(target: str, expected: dict[str, Any]) -> Iterator[str]:
    """Yields the lines about the expected acceptance length in a printed training plan: the length, its source, and a
    warning if there are too few answers. `expected`: result of `expected_of` for the model named `target`."""
    about = "at least" if expected["is_beyond_the_curve"] else "about"
    answers, advised = expected["answers"], expected["advised"]
    learned = "" if answers is None else f" from {answers:,} different answers"
    yield f"expected   {about} {expected['tokens_per_round']:.2f} tokens a round{learned}"
    if expected["is_own"]:
        yield f"           by the curve of {target}, measured on {expected['data']} ({expected['source']})"
    else:
        low, high = expected["interval"]
        yield f"           a guess: {low:.2f} to {high:.2f} by {expected['data']}, as {target} has no curve of its own"
    if answers is not None and answers < advised:
        few = f"{answers:,} answers are too few: {advised:,} are advised"
        yield f"           {few} (paceline advise says what they bring)"


def advised_answers(target: str, places: float) -> int:
    """Returns the number of answers that is advised for a training; more would improve the drafter only a little. It is
    the smallest of `NUMBERS` (300 to 100,000) whose expected number of accepted drafts per round is at least 85%
    (`ENOUGH`) of the number for 100,000 answers. `places`: blocks per answer and epoch."""
    gains = []
    for number in NUMBERS:
        own = expected_tokens(target, EPOCHS * places * number)
        gains.append((own["tokens_per_round"] if own else published(number).tokens_per_round) - 1.0)
    return next(number for number, gain in zip(NUMBERS, gains, strict=True) if gain >= ENOUGH * gains[-1])
