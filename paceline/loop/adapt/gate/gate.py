"""May a candidate replace the incumbent? Both are scored on the same stored requests (`score.py`), and compared pair by pair.

    verdict = judge(Pairs(incumbents, candidates), {"chat": ...}, ood, times)
    verdict.passed, verdict.reason

tokens/s = tokens / (rounds x time of a round), at the width of rounds that brings the most: the planner would find it, too. The
gain's interval is a paired bootstrap over requests (Efron and Tibshirani, chapter 16). It must lie above zero on the cluster
that fell; elsewhere, and on answers of another kind, the candidate may lose less than 2%. Requests are one a prompt, and none
whose answer repeats itself: what one client says over and over decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.traffic.stored import Request
from paceline.plan.costs import PassCosts
from paceline.report.statistics import Rounds, repetition

MOST_REPETITION = 0.5
"""Share of repeated n-grams above which an answer is a loop: easy to draft, and no evidence."""
NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What a round takes: a pass of the target by its positions, and the making of drafts."""

    passes: PassCosts
    incumbent_s: float = 0.0
    candidate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """The same requests under both drafters."""

    incumbent: Sequence[Rounds]
    candidate: Sequence[Rounds]

    def __len__(self) -> int:
        return len(self.incumbent)


@dataclass(frozen=True, slots=True)
class Gain:
    """Of the candidate over the incumbent in tokens/s, as a share; with its 95% interval."""

    requests: int
    incumbent: float
    """Tokens a round; of the candidate next."""
    candidate: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the gate; `reason` is for people, `gains` by set: the cluster that fell is "drifted"."""

    passed: bool
    reason: str
    gains: Mapping[str, Gain] = field(default_factory=dict)
    loses: bool = False
    """It is refused only for what it loses elsewhere."""
    drafter: str = ""
    """Folder of what was judged: the candidate's, or of a blend with the incumbent."""
    share: float = 1.0
    """Of the candidate's weights in it."""
    is_judged: bool = True
    """False if there was too little to judge by: nothing is known of the drafter then."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def too_few(num_prompts: int, config: CandidateConfig) -> Verdict | None:
    """The refusal to judge by so few prompts, or None where they are enough."""
    if num_prompts >= config.least_requests:
        return None
    why = f"{num_prompts} prompts are too few to judge by, {config.least_requests} are needed"
    return Verdict(False, why, is_judged=False)


def judge(
    drifted: Pairs,
    elsewhere: Mapping[str, Pairs],
    times: RoundTimes,
    ood: Pairs | None = None,
    config: CandidateConfig | None = None,
) -> Verdict:
    """Whether the candidate may be swapped in; of `config` its limits."""
    config = config or CandidateConfig()
    if refused := too_few(len(drifted), config):
        return refused
    gains = {"drifted": compare(drifted, times)}
    others = {**elsewhere, **({"ood": ood} if ood is not None else {})}
    gains |= {name: compare(pairs, times) for name, pairs in others.items() if len(pairs) >= 2}
    fell = gains["drifted"]
    if not all(math.isfinite(each.gain) for each in gains.values()):
        return Verdict(False, "a figure is no finite number", gains)
    if fell.low <= 0:
        return Verdict(False, f"its gain of {fell.gain:+.1%} on what fell may be none (95% from {fell.low:+.1%})", gains)
    worst = min((name for name in gains if name != "drifted"), key=lambda name: gains[name].gain, default=None)
    if worst is not None and gains[worst].gain <= -config.most_loss:
        told = f"it loses {-gains[worst].gain:.1%} on {worst!r}, {config.most_loss:.0%} is the limit"
        return Verdict(False, told, gains, loses=True)
    without = "; no answers of another kind were there to look at" if ood is None else ""
    return Verdict(True, f"{fell.gain:+.1%} tokens/s on what fell (95% from {fell.low:+.1%}){without}", gains)


def compare(pairs: Pairs, times: RoundTimes, num_draws: int = NUM_DRAWS) -> Gain:
    """Gain with its interval, by resampling requests; both drafters see the same sample each time."""
    ours = _Times.of(pairs.candidate, times.passes, times.candidate_s)
    theirs = _Times.of(pairs.incumbent, times.passes, times.incumbent_s)
    chosen_DN = np.random.default_rng(0).integers(len(pairs), size=(num_draws, len(pairs)))
    gains = ours.rate(chosen_DN) / theirs.rate(chosen_DN) - 1
    low, high = np.quantile(gains, [0.025, 0.975])
    everything = np.arange(len(pairs))[None]
    gain = float((ours.rate(everything) / theirs.rate(everything))[0] - 1)
    before, after = (Rounds.sum(each).tokens_per_round for each in (pairs.incumbent, pairs.candidate))
    return Gain(len(pairs), before, after, gain, float(low), float(high))


@dataclass(frozen=True, slots=True)
class _Times:
    """Tokens of each request, and the seconds its rounds take at the width that is best over all."""

    tokens_N: np.ndarray
    seconds_N: np.ndarray

    @classmethod
    def of(cls, rounds: Sequence[Rounds], passes: PassCosts, draft_s: float) -> _Times:
        tokens_N = np.array([each.num_accepted + each.num_rounds for each in rounds], float)
        deepest = max((len(each.accepted_histogram) for each in rounds), default=1)
        tables = [tokens_N * _cost(rounds, width, passes, draft_s) for width in range(deepest)]
        best = min(tables, key=lambda seconds_N: float(seconds_N.sum()))
        return cls(tokens_N, best)

    def rate(self, chosen_DN: np.ndarray) -> np.ndarray:
        return self.tokens_N[chosen_DN].sum(1) / self.seconds_N[chosen_DN].sum(1)


def _cost(rounds: Sequence[Rounds], width: int, passes: PassCosts, draft_s: float) -> np.ndarray:
    """Seconds a token of each request when `width` drafts are checked."""
    per_round = np.array([_tokens_at(each, width) for each in rounds])
    return (passes.seconds(1 + width) + (draft_s if width else 0.0)) / per_round


def _tokens_at(rounds: Rounds, width: int) -> float:
    """Tokens a round when no more than `width` drafts are checked."""
    if not rounds.num_rounds:
        return 1.0
    counts = enumerate(rounds.accepted_histogram)
    return 1.0 + sum(min(number, width) * count for number, count in counts) / rounds.num_rounds


def one_a_prompt(requests: Sequence[Request], most: int | None = None) -> list[Request]:
    """The newest request of each prompt, and none whose answer repeats itself or is another's; at most `most`, newest first."""
    found: dict[str, Request] = {}
    said: set[tuple[int, ...]] = set()
    for each in sorted(requests, key=lambda request: request.hour, reverse=True):
        answer = tuple(each.answer_ids)
        if each.prompt in found or answer in said or len(answer) < 2 or repetition([answer]) > MOST_REPETITION:
            continue
        found[each.prompt] = each
        said.add(answer)
        if len(found) == most:
            break
    return list(found.values())
