"""Which token the target will draw, guessed with the numbers that it will draw with.

The target's token at a position is the winner of a race whose numbers are keyed by seed, position and token
(`model/sampling/race.py`): they are known before its pass. Were a drafter's probabilities the target's own, its race
would have the same winner. They are not, so that each candidate gets a chance: with log-probabilities l and numbers e,
the target's score of a token is scale * l - log e + (what the drafter does not know). If that is Gumbel with this
spread, independent for each token, the chance of candidate x to win is softmax over the candidates of (scale * l - log
e) / spread.

A drafter that learned from greedy answers is surer than the target is at temperature 1: its scale is below 1. Drafts made so
are certain ones, and only where they are held against the target's draws (`Rule.draws`): the text stays what plain decoding
says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Foresight:
    """How a drafter's log-probabilities and the numbers become chances; of a config.json's own key `paceline.foresight`."""

    scale: float = 0.8
    """What log-probabilities are multiplied by: below 1 for a drafter that is surer than its target."""
    spread: float = 1.4
    """Of what the drafter does not know; smaller ones trust the race more."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> Foresight:
        """Raises ModelFileError for a number that is none, or not above 0."""
        own = raw.get("paceline") or {}
        told = own.get("foresight") or {} if isinstance(own, Mapping) else None
        if not isinstance(told, Mapping) or not told.keys() <= {"scale", "spread"}:
            raise ModelFileError(f"{path}: paceline.foresight is an object of scale and spread: correct config.json")
        for name, value in told.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                wrong = f"paceline.foresight.{name} must be a number above 0, not {value!r}"
                raise ModelFileError(f"{path}: {wrong}: correct config.json")
        return cls(**told)

    def chances(self, logprobs_M: list[float], times_M: list[float]) -> list[float]:
        """Log-probabilities that each candidate is the target's token; the largest of `logprobs_M` is finite."""
        pairs = zip(logprobs_M, times_M, strict=True)
        scores = [(self.scale * logprob - math.log(time)) / self.spread for logprob, time in pairs]
        most = max(scores)
        total = math.log(sum(math.exp(each - most) for each in scores)) + most
        return [each - total for each in scores]


def ranked(tokens: list[int], logprobs: list[float], count: int) -> tuple[list[int], list[float]]:
    """The `count` likeliest, best first, of equals the first."""
    order = sorted(range(len(tokens)), key=logprobs.__getitem__, reverse=True)[:count]
    return [tokens[each] for each in order], [logprobs[each] for each in order]
