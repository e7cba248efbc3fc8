"""The arithmetic of measurements, on plain numbers: percentiles, histograms of accepted drafts, intervals, differences.

One place for the whole package, so that a figure of one name is computed in one way. No torch here.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.types import Round

Interval = tuple[float | None, float | None]
"""Low and high end of 95%; of None when there is one sample only."""
BUSY = "the machine was busy: repeat"
"""Stands in place of a measured speed-up that speculation cannot have brought."""
FEWEST_TOKENS = 100
"""Output tokens that a verdict on a speed-up needs; fewer are some forty rounds, and chance decides."""


def is_possible(speedup: float, tokens_per_round: float | None) -> bool:
    """Return False if a speed-up over plain decoding exceeds the acceptance length, in the two digits that are printed.

    A round costs at least one pass of the target, so speculation gains at most the tokens that a round keeps. Times that say
    more were disturbed: other programs ran while plain decoding was timed. None (rounds are not known) allows everything.
    """
    return tokens_per_round is None or round(speedup, 2) <= round(tokens_per_round, 2)


def possible_speedup(speedup: float | None, tokens_per_round: float | None) -> float | None:
    """Return the measured speed-up over plain decoding, or None if `is_possible` rules it out.

    Every speed-up that is printed, drawn or kept passes through here; what is shown in its place is `doubt`.
    """
    return speedup if speedup is not None and is_possible(speedup, tokens_per_round) else None


GAIN, LOAD_GAIN, EVEN = 1.1, 1.05, 0.97
"""Speed-ups from which on a verdict is a gain (under load the second), and below which drafting costs time."""
Tone = Literal["good", "cost", "bad", ""]
"""Colour of a verdict: green for a gain; amber for a cost; red for what is wrong; grey for no verdict and no difference."""


def tone_of(speedups: Sequence[float], gain: float = GAIN) -> Tone:
    """Return the tone of a verdict on these speed-ups: a gain if the best is one and none costs time. Grey without any."""
    if not speedups:
        return ""
    return "cost" if min(speedups) < EVEN else "good" if max(speedups) >= gain else ""


def doubt(speedup: float | None, tokens_per_round: float | None, num_tokens: int | None) -> str | None:
    """Return why a measured speed-up allows no verdict, or None. `num_tokens`: output tokens timed; None if not known."""
    if speedup is not None and not is_possible(speedup, tokens_per_round):
        return BUSY
    if num_tokens is not None and num_tokens < FEWEST_TOKENS:
        return f"{num_tokens} tokens are too few for a verdict: time at least {FEWEST_TOKENS}"
    return None


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a set of values; None when the set is empty."""

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
    """The value below which `share` of the values lie, linear between neighbours as numpy's default; `values` is not empty."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def add_histograms(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Element-wise sum; a histogram that is too short counts as zero there."""
    longest = max((len(each) for each in histograms), default=0)
    return [sum(each[n] for each in histograms if n < len(each)) for n in range(longest)]


@dataclass(frozen=True, slots=True)
class Rounds:
    """The figures of some rounds: how many tokens they drafted, and how many of these stood."""

    num_rounds: int = 0
    num_drafted: int = 0
    accepted_histogram: tuple[int, ...] = ()
    """accepted_histogram[n]: rounds in which exactly n drafts stood."""

    @classmethod
    def counted(cls, rounds: Iterable[Round]) -> Rounds:
        found = list(rounds)
        counts = Counter(each.num_accepted for each in found)
        histogram = tuple(counts[number] for number in range(max(counts, default=-1) + 1))
        return Rounds(len(found), sum(each.num_drafted for each in found), histogram)

    @classmethod
    def sum(cls, parts: Iterable[Rounds]) -> Rounds:
        found = list(parts)
        histogram = tuple(add_histograms([each.accepted_histogram for each in found]))
        return Rounds(sum(each.num_rounds for each in found), sum(each.num_drafted for each in found), histogram)

    @classmethod
    def by_source(cls, rounds: Sequence[Round]) -> dict[str, Rounds]:
        """Source of drafts ("dflash", "ngram", "none") -> the figures of its rounds."""
        sources = sorted({each.source for each in rounds})
        return {source: cls.counted(each for each in rounds if each.source == source) for source in sources}

    @property
    def num_accepted(self) -> int:
        return sum(number * rounds for number, rounds in enumerate(self.accepted_histogram))

    @property
    def drafted_per_round(self) -> float:
        return self.num_drafted / self.num_rounds if self.num_rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Accepted drafts plus the target's own token, the mean over rounds; 1.0 without a round."""
        return 1.0 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts; 0.0 when nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


def shares(histogram: Sequence[int]) -> list[float]:
    """The histogram (as `accepted_histogram`) as shares of all rounds; [] without a round."""
    num_rounds = sum(histogram)
    return [rounds / num_rounds for rounds in histogram] if num_rounds else []


def survival(histogram: Sequence[float], num_drafted: int = 0) -> list[float]:
    """survival_i for i = 1..num_drafted, at index i - 1: the share of rounds whose first i drafts all stood.

    Rounds near the end of an answer draft fewer tokens and count as rounds all the same, so short answers lower the tail a
    little.
    """
    num_rounds = sum(histogram)
    depth = max(num_drafted, len(histogram) - 1)
    return [sum(histogram[i:]) / num_rounds for i in range(1, depth + 1)] if num_rounds else []


def bootstrap(
    items: Sequence[tuple[float, ...]], figure: Callable[[list[tuple[float, ...]]], float], num_draws: int = 1000
) -> Interval:
    """The 95% percentile interval of `figure` over resampled items (Efron and Tibshirani, chapter 13)."""
    if len(items) < 2:
        return None, None
    draw = random.Random(0)
    values = sorted(figure(draw.choices(items, k=len(items))) for _ in range(num_draws))
    return values[int(0.025 * num_draws)], values[int(0.975 * num_draws)]


def ratio_of_sums(pairs: Sequence[tuple[float, ...]]) -> float:
    """sum of firsts / sum of seconds: how token-weighted averages are made."""
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below else 0.0


def repetition(answers: Sequence[Sequence[int]], size: int = 8) -> float:
    """Share of n-grams of tokens that stood before in the same answer: near 1 the text is a loop, and easy to draft."""
    num_all = sum(max(len(answer) - size + 1, 0) for answer in answers)
    num_distinct = sum(len({tuple(answer[at : at + size]) for at in range(len(answer) - size + 1)}) for answer in answers)
    return (num_all - num_distinct) / num_all if num_all else 0.0


def is_loop(token_ids: Sequence[int], tail: int = 32, max_period: int = 8) -> bool:
    """Whether the last `tail` tokens repeat themselves with a period of at most `max_period`; a shorter answer does not."""
    last = list(token_ids[-tail:])
    return len(last) == tail and any(last[period:] == last[:-period] for period in range(1, max_period + 1))


def num_common(ours: list[int], theirs: list[int]) -> int:
    """How many first tokens two texts share: found piece by piece, then one by one in the first piece that differs."""
    most = min(len(ours), len(theirs))
    piece = next((at for at in range(0, most, 64) if ours[at : at + 64] != theirs[at : at + 64]), most)
    return next((at for at in range(piece, most) if ours[at] != theirs[at]), most)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter one's end included; None when they are the same."""
    at = num_common(list(ours), list(theirs))
    return None if at == len(ours) == len(theirs) else at
