"""Noise-aware drafting: predict the token that the target will sample, from the sampling noise that the target will
use.

The target samples by an exponential race whose noise is keyed by seed, position and token (`model/sampling/race.py`),
so the noise is known before the target's pass. If a drafter's probabilities equalled the target's, its race would have
the same winner. They differ, so every candidate gets a winning probability: with log-probabilities l and noise e, the
target's score of a token is scale * l - log e + error. If the errors are independent and Gumbel-distributed with scale
parameter `spread`, candidate x wins with the softmax over the candidates of (scale * l - log e) / spread.

Such drafts are deterministic. They are only used where the target's own samples decide acceptance (`Rule.draws`), so
the output equals plain decoding.
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
    """Parameters of noise-aware drafting, which uses the target's random numbers to predict the token that the target
    will sample. They describe how the drafter's log-probabilities differ from the target's. Values that were fitted for
    a drafter are stored under the key `paceline.foresight` of its config.json."""

    scale: float = 0.8
    """Factor on the drafter's log-probabilities; below 1 for a drafter that is more confident than its target."""
    spread: float = 1.4
    """Assumed size of the drafter's error in log-probabilities (scale parameter of a Gumbel distribution). A larger
    value makes predictions less confident, but does not change which token is predicted."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], path: Path) -> Foresight:
        """Reads the parameters from a drafter's config.json: `raw` is its JSON object, `path` its name in error
        messages. Missing ones get the default values 0.8 (`scale`) and 1.4 (`spread`). Raises ModelFileError for other
        keys, or for a value that is not a number above 0."""
        own = raw.get("paceline") or {}
        values = own.get("foresight") or {} if isinstance(own, Mapping) else None
        if not isinstance(values, Mapping) or not values.keys() <= {"scale", "spread"}:
            raise ModelFileError(f"{path}: paceline.foresight is an object of scale and spread: correct config.json")
        for name, value in values.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                wrong = f"paceline.foresight.{name} must be a number above 0, not {value!r}"
                raise ModelFileError(f"{path}: {wrong}: correct config.json")
        return cls(**values)

    def chances(self, logprobs_M: list[float], times_M: list[float]) -> list[float]:
        """Returns for each of M candidate tokens the log-probability that the target will sample it, given the random
        numbers that the target will use.

        `logprobs_M`: the drafter's log-probabilities of the candidates; at least one is finite. `times_M`: the target's
        random number for each candidate, from `rng.Noise.exponentials`.
        """
        pairs = zip(logprobs_M, times_M, strict=True)
        scores = [(self.scale * logprob - math.log(time)) / self.spread for logprob, time in pairs]
        most = max(scores)
        total = math.log(sum(math.exp(each - most) for each in scores)) + most
        return [each - total for each in scores]


def ranked(tokens: list[int], logprobs: list[float], count: int) -> tuple[list[int], list[float]]:
    """Sorts `tokens` by their `logprobs`, highest first, and returns the first `count` of both. Equal ones keep their
    order."""
    order = sorted(range(len(tokens)), key=logprobs.__getitem__, reverse=True)[:count]
    return [tokens[each] for each in order], [logprobs[each] for each in order]
