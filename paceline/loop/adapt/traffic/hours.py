"""Tokens and rounds of an hour's requests, as sums that can be added: what everything else here is computed from.

Acceptance is tokens a round, token-weighted: sum of tokens / sum of rounds. Requests differ, so its error is that of a ratio
of sums over requests (Cochran, Sampling Techniques, 6.3), not that of single rounds. All of it is kept as six numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError

SHORTER = "PACELINE_ADAPT_HOUR_S"
"""Variable of the environment: seconds of an hour, to see days of the daemon within minutes."""


def _hour_s() -> float:
    text = os.environ.get(SHORTER, "3600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:  # no number fails, too
        raise ConfigError(f"{SHORTER} is {text!r}: give the seconds of an hour, between 0.1 and 3600, or leave it out")
    return seconds


HOUR_S = _hour_s()
DAY, WEEK = 24, 168
"""Hours. Hour numbers count from 1970-01-01 00:00 UTC, a Thursday."""
PRIOR_REQUESTS, PRIOR_VARIANCE = 4.0, 0.1
"""An hour of few requests cannot tell its own error: it is mixed with so many requests of this relative variance."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Of some requests; `tokens` are those that rounds brought, the first token of an answer is none of them."""

    requests: int = 0
    tokens: float = 0.0
    rounds: float = 0.0
    tokens_2: float = 0.0
    """Sum of squares over requests; the next two are of tokens x rounds, and of rounds."""
    tokens_rounds: float = 0.0
    rounds_2: float = 0.0

    @classmethod
    def of(cls, requests: Iterable[tuple[float, float]]) -> Sums:
        """(tokens, rounds) of each request; those without a round say nothing."""
        found = [(tokens, rounds) for tokens, rounds in requests if rounds > 0]
        return cls(
            len(found),
            math.fsum(tokens for tokens, _ in found),
            math.fsum(rounds for _, rounds in found),
            math.fsum(tokens * tokens for tokens, _ in found),
            math.fsum(tokens * rounds for tokens, rounds in found),
            math.fsum(rounds * rounds for _, rounds in found),
        )

    def __add__(self, other: Sums) -> Sums:
        return self._with(other, 1)

    def __sub__(self, other: Sums) -> Sums:
        return self._with(other, -1)

    def _with(self, other: Sums, sign: int) -> Sums:
        return Sums(
            self.requests + sign * other.requests,
            self.tokens + sign * other.tokens,
            self.rounds + sign * other.rounds,
            self.tokens_2 + sign * other.tokens_2,
            self.tokens_rounds + sign * other.tokens_rounds,
            self.rounds_2 + sign * other.rounds_2,
        )

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def log_variance(self) -> float:
        """Squared standard error of log(tokens_per_round); infinite without a request."""
        if not self.requests or self.tokens <= 0:
            return math.inf
        ratio, mean = self.tokens_per_round, self.tokens / self.requests
        squares = self.tokens_2 - 2 * ratio * self.tokens_rounds + ratio * ratio * self.rounds_2
        relative = (max(squares, 0.0) / mean**2 + PRIOR_REQUESTS * PRIOR_VARIANCE) / (self.requests + PRIOR_REQUESTS)
        return relative / self.requests

    @property
    def num_effective(self) -> float:
        """As many requests of equal length would tell as much (Kish)."""
        return self.tokens**2 / self.tokens_2 if self.tokens_2 else 0.0


def total(parts: Iterable[Sums]) -> Sums:
    return sum(parts, Sums())
