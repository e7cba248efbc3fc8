"""Statistical tests of whether sampled answers come from the claimed model. Pure arithmetic: no model, no server.

At each position the target's distribution p, given the server's own text before it, is known. An honest server samples
from p, so every statistic x of the sampled token has known moments there, whatever the text:

    `surprisal`  -log p(token), with the entropy as its mean; flattened, sharpened or mixed distributions change it
    `likeliest`  1 if the token is the most probable one
    `rare`       1 if its probability is below RARE
    `cut`        with top-p: 1 if it is in the last part of the nucleus

x - mean, summed over any positions, is a martingale, and so is

    E = product over positions of exp(l * x) / sum over tokens v of p(v) exp(l * x(v))

with expectation 1 for every l. By Markov's inequality E reaches 1 / a with probability at most a: **exact** for any
number of tokens and any distribution, whereas "within three standard errors" holds only asymptotically. For the
surprisal, E is the likelihood ratio of the target at temperature 1 / (1 - l). The mean of E over several l, and over
mixtures in which l applies only to a share of the tokens, has the same property. All tests of an audit share its rate
of false alarms (Bonferroni). Rounding: |l| * tolerance is subtracted from log E at every token.

Equal answers are tested likewise: 1 / p(answer) for each equal pair, averaged over all pairs of draws from one prompt,
has an expectation of at most 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SLOPES = (-0.4, -0.15, -0.05, 0.05, 0.15, 0.4, 1.0)
"""Values of l for the surprisal. They correspond to temperatures 0.71, 0.87, 0.95, 1.05, 1.18, 1.67, and a uniform
draw."""
FOREIGN = ((0.01, 0.4), (0.01, 1.0), (0.1, 1.0))
"""Mixtures (share, l): this share of the tokens follows a distribution changed by l, the others follow the model."""
ODDS = (-2.0, -0.7, -0.25, 0.25, 0.7, 2.0)
"""Values of l for a statistic that is 0 or 1: its odds are multiplied by exp(l)."""
RARE = 1e-3
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Scores:
    """Probabilities and statistics that the local model computes for the T tokens of one answer. The arrays have one
    entry per token. Logarithms are natural."""

    nll_T: Floats
    """-log of the token's probability under the request's distribution; inf if that is 0."""
    entropy_T: Floats
    """Mean of the surprisal, -log of a token's probability, under the request's distribution."""
    variance_T: Floats
    """Variance of the surprisal, -log of a token's probability, under the request's distribution."""
    cgf_TL: Floats
    """Cumulant generating function of the surprisal: log sum over tokens v of p(v) ** (1 - l), for each l of the L
    values in SLOPES. Shape [T, L]."""
    binary: dict[str, tuple[Floats, Floats]]
    """Name of a binary statistic -> (1 if it is true for the token, else 0; probability that it is true). The
    statistics: `likeliest` (the token is the most probable one), `rare` (its probability is below RARE) and, with
    top-p, `cut` (it is in the last part of the nucleus)."""
    before_T: Floats
    """Total probability, before top-p, of all tokens that are more probable than this one by more than a rounding
    error."""
    gap_T: Floats
    """Largest logit minus the token's logit."""
    logprob_T: Floats
    """Log-probability at temperature 1, without filters."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One answer of the audited server, with the probabilities of its tokens under the local model."""

    prompt: int
    """Index of the prompt that it answers."""
    tokens: tuple[int, ...]
    scores: Scores


@dataclass(slots=True)
class Group:
    """The server's answers to requests with the same sampling settings, with their token probabilities under the local
    model."""

    name: str
    temperature: float
    top_p: float = 1.0
    draws: list[Draw] = field(default_factory=list)
    num_lost: int = 0
    """Number of answers with unknown tokens, which are not in `draws`."""

    @property
    def num_tokens(self) -> int:
        return sum(len(draw.tokens) for draw in self.draws)

    @property
    def lost_share(self) -> float:
        return self.num_lost / max(1, self.num_lost + len(self.draws))


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one statistical test of a group of sampled answers. The test compares the mean of a statistic of the
    tokens, such as the surprisal (-log p of a token), with the mean expected from an honest server."""

    group: str
    statistic: str
    positions: str
    """Tested token positions in the answers, such as "4-7", or "all"; "pairs" for the test of equal answers."""
    num_tokens: int
    """Number of tested tokens; of pairs of answers in the test of equal answers."""
    expected: float
    """Mean of the statistic for an honest server; `seen` is its mean over the answers."""
    seen: float
    low: float
    """Lower end of the 95% confidence interval of seen - expected."""
    high: float
    log_evidence: float
    """Natural logarithm of E, the evidence of a fault: an honest server reaches a value of E with a probability of at
    most 1 / E."""
    is_fault: bool = False

    @property
    def difference(self) -> float:
        return self.seen - self.expected

    @property
    def chance(self) -> float:
        """Upper bound of the p-value: the probability that an honest server gives at least as strong evidence."""
        return min(1.0, math.exp(-max(self.log_evidence, 0.0)))


@dataclass(frozen=True, slots=True)
class _Column:
    """One statistic over N tokens."""

    seen_N: Floats
    expected_N: Floats
    variance_N: Floats
    slopes: tuple[float, ...]
    log_ratio_NL: Floats
    """Contribution of each token to log E, for each slope; tolerance subtracted."""

    def of(self, chosen_N: NDArray[np.bool_]) -> _Column:
        parts = (self.seen_N[chosen_N], self.expected_N[chosen_N], self.variance_N[chosen_N])
        return _Column(*parts, self.slopes, self.log_ratio_NL[chosen_N])

    def log_evidence(self, mixtures: Iterable[tuple[float, float]] = ()) -> float:
        logs = list(self.log_ratio_NL.sum(0))
        for share, slope in mixtures:
            ratio_N = self.log_ratio_NL[:, self.slopes.index(slope)]
            logs.append(np.logaddexp(math.log1p(-share), math.log(share) + ratio_N).sum())
        return float(np.logaddexp.reduce(np.array(logs)) - math.log(len(logs)))

    def test(self, group: str, statistic: str, positions: str, mixtures: Iterable[tuple[float, float]] = ()) -> Trial:
        num = len(self.seen_N)
        expected, seen = float(self.expected_N.mean()), float(self.seen_N.mean())
        half = Z95 * math.sqrt(float(self.variance_N.sum())) / num
        known = (num, expected, seen, seen - expected - half, seen - expected + half)
        return Trial(group, statistic, positions, *known, self.log_evidence(mixtures))


def _surprisal(scores: Scores, tolerance: float) -> _Column:
    """Column of the possible tokens; impossible ones are judged by `before_T`."""
    is_possible = np.isfinite(scores.nll_T)
    nll_N, slopes = scores.nll_T[is_possible], np.array(SLOPES)
    ratio_NL = slopes * nll_N[:, None] - scores.cgf_TL[is_possible] - np.abs(slopes) * tolerance
    return _Column(nll_N, scores.entropy_T[is_possible], scores.variance_T[is_possible], SLOPES, ratio_NL)


def _binary(scores: Scores, name: str, tolerance: float) -> _Column:
    is_so_T, chance_T = scores.binary[name]
    chance_T, slopes = np.clip(chance_T, 0.0, 1.0), np.array(ODDS)
    ratio_TL = slopes * is_so_T[:, None] - np.log1p(chance_T[:, None] * np.expm1(slopes)) - np.abs(slopes) * tolerance
    return _Column(is_so_T, chance_T, chance_T * (1 - chance_T), ODDS, ratio_TL)


def _join(columns: Sequence[_Column]) -> _Column:
    names = ("seen_N", "expected_N", "variance_N", "log_ratio_NL")
    arrays = {name: np.concatenate([getattr(column, name) for column in columns]) for name in names}
    return _Column(slopes=columns[0].slopes, **arrays)


def buckets(longest: int) -> list[tuple[int, int]]:
    """Splits the token positions 0 to `longest` - 1 into ranges (first, last) that double in length: (0, 0), (1, 1),
    (2, 3), (4, 7), ..."""
    ranges, first = [(0, 0)], 1
    while first < longest:
        ranges.append((first, min(2 * first, longest) - 1))
        first *= 2
    return ranges


def tests_of(group: Group, tolerance: float) -> list[Trial]:
    """Runs all statistical tests on the answers of a group; returns [] without known tokens. Does not yet decide which
    results are faults: `judged` does that.

    Three things are tested: the surprisal (-log p of a token), over all token positions and over ranges of them; how
    often the most probable token, rare tokens and, with top-p, those in the last part of the nucleus occur; how often
    answers are equal. `tolerance`: rounding error of the mean surprisal, in nats."""
    draws = [draw for draw in group.draws if len(draw.tokens)]
    if not draws:
        return []
    tolerance += group.lost_share  # lost answers may have been a nat more surprising than the others
    tests: list[Trial] = []
    surprisal = _join([_surprisal(draw.scores, tolerance) for draw in draws])
    place_N = np.concatenate([np.flatnonzero(np.isfinite(draw.scores.nll_T)) for draw in draws])
    if not len(place_N):
        return []
    tests.append(surprisal.test(group.name, "surprisal", "all", FOREIGN))
    for first, last in buckets(int(place_N.max()) + 1):
        chosen_N = (place_N >= first) & (place_N <= last)
        if chosen_N.any():
            positions = f"{first + 1}-{last + 1}" if last > first else f"{first + 1}"
            tests.append(surprisal.of(chosen_N).test(group.name, "surprisal", positions))
    for name in draws[0].scores.binary:
        tests.append(_join([_binary(draw.scores, name, tolerance) for draw in draws]).test(group.name, name, "all"))
    repeated = _repeats(group.name, draws)
    return [*tests, repeated] if repeated else tests


def detectable(test: Trial, num_tests: int, tolerance: float, false_alarms: float) -> float:
    """Estimates the smallest shift of the mean surprisal (-log p of a token), in nats, that the audit would detect.

    Uses a normal approximation, with the standard error of `test`, the result of a surprisal test. `num_tests`: number
    of all tests of the audit; `tolerance`: rounding error of the mean surprisal, in nats; `false_alarms`: probability
    that any test finds a fault in an honest server."""
    deviation = (test.high - test.low) / (2 * Z95)
    return tolerance + deviation * math.sqrt(2 * math.log(num_tests * (len(SLOPES) + len(FOREIGN)) / false_alarms))


def _repeats(name: str, draws: Sequence[Draw]) -> Trial | None:
    """Tests for answers to one prompt that are equal to the last token."""
    by_prompt: dict[int, list[Draw]] = defaultdict(list)
    for draw in draws:
        by_prompt[draw.prompt].append(draw)
    num_pairs, expected, logs = 0, 0.0, list[float]()
    for of_prompt in by_prompt.values():
        surprise = [float(draw.scores.nll_T.sum()) for draw in of_prompt]
        for (one, nll), (other, _) in combinations(zip(of_prompt, surprise, strict=True), 2):
            num_pairs += 1
            expected += math.exp(-nll)
            if one.tokens == other.tokens and math.isfinite(nll):
                logs.append(nll)
    if not num_pairs:
        return None
    log_evidence = float(np.logaddexp.reduce(np.array(logs))) - math.log(num_pairs) if logs else -math.inf
    seen, expected = len(logs) / num_pairs, expected / num_pairs
    half = Z95 * math.sqrt(max(expected * (1 - expected), 0.0) / num_pairs)
    difference = seen - expected
    low, high = difference - half, difference + half
    return Trial(name, "equal answers", "pairs", num_pairs, expected, seen, low, high, log_evidence)


def judged(groups: Sequence[Group], tolerance: float, false_alarms: float) -> list[Trial]:
    """Runs all statistical tests on all groups of sampled answers, and returns the results. A result that is too
    improbable for an honest server is marked as a fault (`is_fault`).

    `tolerance`: rounding error of the mean surprisal (-log p of a token), in nats. `false_alarms`: probability that any
    test finds a fault in an honest server; each test gets an equal share of it (Bonferroni)."""
    tests = [test for group in groups for test in tests_of(group, tolerance)]
    limit = math.log(len(tests) / false_alarms) if tests else math.inf
    return [replace(test, is_fault=test.log_evidence >= limit) for test in tests]
