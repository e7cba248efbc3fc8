"""Sums of tokens and rounds (draft and verify once) over an hour's requests; acceptance lengths and their errors are
computed from them.

Acceptance length is a ratio of sums, sum of tokens / sum of rounds. Requests differ, so its standard error is that of a
ratio estimator over requests (Cochran, Sampling Techniques, 6.3), not of single rounds. It needs six sums.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError

SHORTER = "PACELINE_ADAPT_HOUR_S"
"""Environment variable with the number of seconds that count as an hour; with a small one, days of the daemon take
minutes."""


def _hour_s() -> float:
    text = os.environ.get(SHORTER, "3600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:  # NaN fails, too
        raise ConfigError(f"{SHORTER} is {text!r}: give the seconds of an hour, between 0.1 and 3600, or leave it out")
    return seconds


HOUR_S = _hour_s()
DAY, WEEK = 24, 168
"""Hours. Hour numbers count from 1970-01-01 00:00 UTC, a Thursday."""
PRIOR_REQUESTS, PRIOR_VARIANCE = 4.0, 0.1
"""Prior for the variance of an hour's acceptance length: this number of added requests with this relative variance,
since few requests cannot estimate it."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over requests, from which acceptance length and its standard error are computed: the number of requests,
    their tokens and rounds, and the squares and products of these. The first token of each answer is not counted, since
    it needs no round."""

    requests: float = 0
    tokens: float = 0.0
    rounds: float = 0.0
    tokens_2: float = 0.0
    """Sum of tokens ** 2 over requests."""
    tokens_rounds: float = 0.0
    """Sum of tokens x rounds over requests."""
    rounds_2: float = 0.0
    """Sum of rounds ** 2 over requests."""

    @classmethod
    def of(cls, requests: Iterable[tuple[float, float]]) -> Sums:
        """Sum up requests, each given as (tokens without the answer's first one, rounds). Requests without a round are
        left out."""
        terms = [(t, r, t * t, t * r, r * r) for t, r in requests if r > 0]
        return cls(len(terms), *map(math.fsum, zip(*terms, strict=True)))

    def __add__(self, other: Sums) -> Sums:
        return Sums(*map(operator.add, _values(self), _values(other)))

    def __sub__(self, other: Sums) -> Sums:
        return Sums(*map(operator.sub, _values(self), _values(other)))

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def log_variance(self) -> float:
        """Squared standard error of the log of acceptance length; infinite without a request."""
        return self.log_variance_of(1.0)

    def log_variance_of(self, requests_each: float) -> float:
        """Squared standard error of the log of acceptance length, for sums in which each counted request is really a
        group of requests, such as all requests between two readings of a server's counters; infinite without any.
        `requests_each`: mean number of requests in a group. Requests are assumed to be independent."""
        if not self.requests or self.tokens <= 0:
            return math.inf
        ratio, mean = self.tokens_per_round, self.tokens / self.requests
        squares = self.tokens_2 - 2 * ratio * self.tokens_rounds + ratio * ratio * self.rounds_2
        prior = PRIOR_VARIANCE / requests_each
        relative = (max(squares, 0.0) / mean**2 + PRIOR_REQUESTS * prior) / (self.requests + PRIOR_REQUESTS)
        return relative / self.requests

    @property
    def num_effective(self) -> float:
        """Effective number of requests (Kish's formula): the number of requests if all are equally long, else less."""
        return self.tokens**2 / self.tokens_2 if self.tokens_2 else 0.0


_values = operator.attrgetter(*Sums.__slots__)


def total(parts: Iterable[Sums]) -> Sums:
    return sum(parts, Sums())
