"""Statistics of measurements, in plain Python: percentiles, histograms of accepted drafts, bootstrap intervals,
comparisons.

Each quantity is computed here for the whole package, so that a name always means the same calculation. Imports no
PyTorch.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from paceline.types import Round

Interval = tuple[float | None, float | None]
"""Lower and upper end of a 95% interval; (None, None) with a single sample."""
BUSY = "the machine was busy: repeat"
"""Text shown instead of a speed-up that is higher than speculation can give."""
FEWEST_TOKENS = 100
"""Minimum output tokens for a verdict on a speed-up: in fewer, random variation dominates."""


def is_possible(speedup: float, tokens_per_round: float | None) -> bool:
    """Return False if a measured speed-up exceeds the acceptance length `tokens_per_round` (both rounded to two
    digits). A round takes at least as long as one pass of the target, so a true speed-up is at most the number of
    tokens per round. A larger one means that other programs ran while plain decoding was timed. An unknown acceptance
    length (None) gives True."""
    return tokens_per_round is None or round(speedup, 2) <= round(tokens_per_round, 2)


def possible_speedup(speedup: float | None, tokens_per_round: float | None) -> float | None:
    """Return the measured speed-up over plain decoding; None if it is missing or impossible (see `is_possible`). Every
    speed-up that is printed, plotted or stored passes through here."""
    return speedup if speedup is not None and is_possible(speedup, tokens_per_round) else None


GAIN, LOAD_GAIN, EVEN = 1.1, 1.05, 0.97
"""Limits of a verdict on a speed-up: a gain from GAIN on (LOAD_GAIN: under load); drafting costs time below EVEN."""
Tone = Literal["good", "cost", "bad", ""]
"""Colour of a verdict: good is green (a gain), cost is amber, bad is red (an error), "" is grey (no clear result)."""


def tone_of(speedups: Sequence[float], gain: float = GAIN) -> Tone:
    """Return the tone (colour) of a verdict on speed-ups, where 1.0 is no change. It is "cost" if one of them is below
    0.97 (EVEN), otherwise "good" if one is at least `gain`, otherwise "" (neutral)."""
    if not speedups:
        return ""
    return "cost" if min(speedups) < EVEN else "good" if max(speedups) >= gain else ""


def doubt(speedup: float | None, tokens_per_round: float | None, num_tokens: int | None) -> str | None:
    """Return the reason not to trust a measured speed-up, or None. A speed-up is not trusted if it is impossible (see
    `is_possible`), or if fewer than 100 (FEWEST_TOKENS) output tokens were timed. `tokens_per_round`: acceptance
    length. `num_tokens`: number of timed output tokens; None if unknown."""
    if speedup is not None and not is_possible(speedup, tokens_per_round):
        return BUSY
    if num_tokens is not None and num_tokens < FEWEST_TOKENS:
        return f"{num_tokens} tokens are too few for a verdict: time at least {FEWEST_TOKENS}"
    return None


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a set of values, in the values' unit; all None if the set is empty."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(None, None, None, None)
        return cls(statistics.fmean(values), *(quantile(values, share) for share in (0.5, 0.9, 0.99)))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of `values` (not empty) at `share` (0 to 1), interpolated linearly."""
    import numpy as np  # here, because predictions that need no percentiles start without NumPy

    return float(np.quantile(values, share))


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Return the element-wise sum of histograms; shorter ones are padded with zeros."""
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Totals over a set of decode rounds: number of rounds, drafted tokens and accepted tokens."""

    num_rounds: int = 0
    """Decode rounds: each is one verification pass of the target."""
    num_drafted: int = 0
    """Drafted tokens of all rounds."""
    accepted_histogram: tuple[int, ...] = ()
    """Entry n: number of rounds in which exactly n drafts were accepted."""

    @classmethod
    def counted(cls, rounds: Iterable[Round]) -> Rounds:
        listed = list(rounds)
        counts = Counter(one.num_accepted for one in listed)
        histogram = tuple(counts[number] for number in range(max(counts, default=-1) + 1))
        return Rounds(len(listed), sum(one.num_drafted for one in listed), histogram)

    @classmethod
    def sum(cls, parts: Iterable[Rounds]) -> Rounds:
        listed = list(parts)
        histogram = tuple(add_histograms([part.accepted_histogram for part in listed]))
        return Rounds(sum(part.num_rounds for part in listed), sum(part.num_drafted for part in listed), histogram)

    @classmethod
    def by_source(cls, rounds: Sequence[Round]) -> dict[str, Rounds]:
        """Return source of drafts ("dflash", "ngram", ...) -> totals over the rounds with this source. Rounds without
        drafts have the source "none"."""
        sources = sorted({one.source for one in rounds})
        return {source: cls.counted(one for one in rounds if one.source == source) for source in sources}

    @property
    def num_accepted(self) -> int:
        """Accepted drafts of all rounds, without bonus tokens."""
        return sum(number * rounds for number, rounds in enumerate(self.accepted_histogram))

    @property
    def drafted_per_round(self) -> float:
        """Mean number of drafted tokens per round."""
        return self.num_drafted / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Acceptance length: mean tokens per round, accepted drafts plus the bonus token; 1.0 without rounds."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted; 0.0 without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


def shares(histogram: Sequence[int]) -> list[float]:
    """Return the shares of rounds with exactly 0, 1, 2, ... accepted drafts; [] without a round. `histogram`: entry n
    is the number of rounds with n accepted drafts."""
    num_rounds = sum(histogram)
    return [rounds / num_rounds for rounds in histogram] if num_rounds else []


def survival(histogram: Sequence[float], num_drafted: int = 0) -> list[float]:
    """Return the survival curve: entry i - 1 is the share of rounds whose first i drafts were all accepted; [] without
    a round. `histogram`: entry n is the number of rounds with n accepted drafts. `num_drafted`: minimum length of the
    curve, which is filled up with zeros."""
    num_rounds = sum(histogram)
    depth = max(num_drafted, len(histogram) - 1)
    return [sum(histogram[i:]) / num_rounds for i in range(1, depth + 1)] if num_rounds else []


def bootstrap(
    items: Sequence[tuple[float, ...]],
    figure: Callable[[list[tuple[float, ...]]], float],
    num_draws: int = 1000,
    level: float = 0.95,
) -> Interval:
    """Return the percentile bootstrap interval of a statistic of `items` (Efron and Tibshirani, chapter 13); (None,
    None) for fewer than two items. `figure`: function that computes the statistic of a list of items. It is called for
    `num_draws` lists, each drawn from `items` with replacement. `level`: share of the computed values that lies in the
    interval."""
    if len(items) < 2:
        return None, None
    draw = random.Random(0)
    values = sorted(figure(draw.choices(items, k=len(items))) for _ in range(num_draws))
    return values[int((1 - level) / 2 * num_draws)], values[int((1 + level) / 2 * num_draws)]


def ratio_of_sums(pairs: Sequence[tuple[float, ...]]) -> float:
    """Return the sum of first elements over the sum of second elements, e.g. tokens per second; 0.0 if the second sum
    is 0."""
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below else 0.0


def repetition(answers: Sequence[Sequence[int]], size: int = 8) -> float:
    """Return the share (0 to 1) of token n-grams of length `size` that occurred earlier in the same answer, over all
    answers."""
    runs = [[tuple(answer[at : at + size]) for at in range(len(answer) - size + 1)] for answer in answers]
    num_all, num_distinct = sum(map(len, runs)), sum(len({*each}) for each in runs)
    return (num_all - num_distinct) / num_all if num_all else 0.0


def is_loop(token_ids: Sequence[int], tail: int = 32, max_period: int = 8) -> bool:
    """Return True if the last `tail` tokens repeat with a period of at most `max_period`; False for a shorter
    answer."""
    last = list(token_ids[-tail:])
    return len(last) == tail and any(last[period:] == last[:-period] for period in range(1, max_period + 1))


def num_common(ours: list[int], theirs: list[int]) -> int:
    """Return the number of tokens with which both answers begin."""
    most = min(len(ours), len(theirs))
    piece = next((at for at in range(0, most, 64) if ours[at : at + 64] != theirs[at : at + 64]), most)
    return next((at for at in range(piece, most) if ours[at] != theirs[at]), most)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs between two answers; None if they are equal. If one begins the
    other, this is the shorter one's length."""
    at = num_common(list(ours), list(theirs))
    return None if at == len(ours) == len(theirs) else at
