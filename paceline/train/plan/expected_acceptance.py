"""What a drafter may be expected to keep, from learning curves that were measured: for plans, and for `advise`.

    expected_of("smollm2-135m", Learned(blocks=202_000, answers=44, places=48))

Blocks alone flatter: after six looks at the same answer there is little left to learn from it. So the blocks that count are
at most `EPOCHS` times the places of *different* answers. A target without a curve borrows that of `CURVE_TARGET`, at `CAUTION`
times the answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = json.loads(Path(__file__).with_name("advice.json").read_text(encoding="utf-8"))
CURVE_TARGET = "smollm2-135m"
CAUTION: int = TOLD["caution"]
"""As many times the answers are asked for of a target whose own curve was not measured; advice.json says why."""
NUMBERS = (300, 1_000, 3_000, 10_000, 30_000, 100_000)
"""Answers to learn from."""
ENOUGH = 0.97
"""The fewest answers that bring so much of the most are advised."""
EPOCHS = 6.0
"""Passes over the same answers that count, as the curves' runs had."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run learns from."""

    blocks: float
    answers: int | None
    """Different ones: several samples of one prompt count once. None if they are counted only when the run begins."""
    places: float
    """Blocks of one answer in one epoch."""

    @property
    def counted(self) -> float:
        """Blocks, those that repeat an answer more than `EPOCHS` times left out."""
        return self.blocks if self.answers is None else min(self.blocks, EPOCHS * self.places * self.answers)


def expected_tokens(target: str, blocks: float) -> dict[str, Any] | None:
    """Tokens a round, served, after so many blocks: from the target's own curve, straight lines over log(blocks)."""
    curves = json.loads(Path(__file__).with_name("curves.json").read_text(encoding="utf-8"))["curves"]
    curve = next((each for each in curves if each["target"] == target), None)
    if curve is None:
        return None
    points = curve["eal"]
    flatter = curve["served_at_last"] / points[-1][1]
    value, beyond = points[-1][1], blocks > points[-1][0]
    if blocks <= points[0][0]:
        value = 1.0 + (points[0][1] - 1.0) * blocks / points[0][0]
    elif not beyond:
        (low, before), (high, after) = next(pair for pair in pairwise(points) if blocks <= pair[1][0])
        value = before + (after - before) * math.log(blocks / low) / math.log(high / low)
    return {
        "tokens_per_round": round(max(1.0, value * flatter), 2),
        "is_beyond_the_curve": beyond,
        "source": curve["source"],
        "data": curve["data"],
    }


def expected_of(target: str, learned: Learned) -> dict[str, Any]:
    """Returns `expected_tokens` of the blocks that count, with what was learned from, "is_own" (False: the curve of another
    target stands for it) and "advised": the answers that bring `ENOUGH` of what the curve's end does."""
    found = expected_tokens(target, learned.counted)
    is_own = found is not None
    found = found or expected_tokens(CURVE_TARGET, learned.counted / CAUTION)
    assert found is not None
    advised = advised_answers(learned.places) * (1 if is_own else CAUTION)
    return {**found, "is_own": is_own, "advised": advised, "answers": learned.answers, "places": learned.places}


def expected_lines(target: str, expected: dict[str, Any]) -> Iterator[str]:
    """The lines of a plan on `expected_of`."""
    about = "at least" if expected["is_beyond_the_curve"] else "about"
    answers, advised = expected["answers"], expected["advised"]
    learned = "" if answers is None else f" from {answers:,} different answers"
    yield f"expected   {about} {expected['tokens_per_round']:.2f} tokens a round{learned}"
    if expected["is_own"]:
        yield f"           by the curve of {target}, measured on {expected['data']} ({expected['source']})"
    else:
        yield f"           a guess: no curve for {target}; that of {CURVE_TARGET} at {CAUTION} times the answers stands for it"
    if answers is not None and answers < advised:
        yield f"           {answers:,} answers are too few: {advised:,} are advised (paceline advise says what they bring)"


def advised_answers(places: float) -> int:
    """Returns the fewest of NUMBERS that bring ENOUGH of what the most bring, for `CURVE_TARGET`."""
    gains = [_gain(number, places) for number in NUMBERS]
    return next(number for number, gain in zip(NUMBERS, gains, strict=True) if gain >= ENOUGH * gains[-1])


def _gain(answers: int, places: float) -> float:
    found = expected_tokens(CURVE_TARGET, EPOCHS * places * answers)
    assert found is not None
    return found["tokens_per_round"] - 1.0
