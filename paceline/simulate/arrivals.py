"""Requests for a simulated server: when they come, how long their prompts and answers are. The same seed, the same requests.

Lengths are written 128, 64-512 (each equally likely) or lognormal:200,0.7 (median, standard deviation of the logarithm).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError

Survival = tuple[float, ...]
"""survival[i]: share of rounds whose first i + 1 drafts would all stand; one for each draft that may be made, 0 beyond."""
LONGEST = 1_000_000
"""Tokens of a prompt or an answer at most."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    arrives_at: float
    """Seconds after the beginning. A closed loop ignores it: it sends when an earlier answer is done."""
    prompt_tokens: int
    """Prompt tokens that have to be computed; those found in a prefix cache are not."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts."""

    low: int
    high: int
    """With `sigma`, the most; equal to `low` where the length is fixed."""
    median: float | None = None
    """Of a log-normal distribution, cut to low..high; None: equally likely."""
    sigma: float = 0.0

    def draw(self, source: random.Random) -> int:
        if self.median is None:
            return source.randint(self.low, self.high)
        return min(max(round(source.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


def parse_lengths(option: str, text: str) -> Lengths:
    """128, 64-512 or lognormal:MEDIAN,SIGMA. Raises ConfigError."""
    kind, _, values = text.strip().rpartition(":")
    try:
        if kind == "lognormal":
            median, sigma = (float(part) for part in values.split(","))
            if not (1 <= median <= LONGEST and 0 <= sigma <= 5):
                raise ValueError
            return Lengths(1, LONGEST, median, sigma)
        low, _, high = values.partition("-")
        made = Lengths(int(low), int(high or low))
        if kind or not 1 <= made.low <= made.high <= LONGEST:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is no length: write it as 128, 64-512 or lognormal:200,0.7 (1 to {LONGEST:,} tokens)"
        ) from None
    return made


def poisson(rate: float, number: int, seed: int) -> list[float]:
    """Arrival times of a Poisson process of `rate` per second, the very ones that `paceline bench serving` sends at."""
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(number)))


def workload(number: int, prompt: Lengths, answer: Lengths, seed: int) -> list[Job]:
    """Requests that are all there at time 0; `arriving` spreads them. The same seed gives the same lengths at every load."""
    source = random.Random(f"lengths {seed}")
    return [Job(0.0, prompt.draw(source), answer.draw(source)) for _ in range(number)]


def arriving(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """The same requests at these times."""
    return [replace(job, arrives_at=time) for job, time in zip(jobs, times, strict=True)]
