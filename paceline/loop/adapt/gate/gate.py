"""Decides whether a candidate drafter may replace the incumbent, the drafter that serves now. Both are scored on the
same stored requests (`score.py`).

    verdict = judge(Pairs(incumbents, candidates), {"chat": ...}, times, ood)
    verdict.passed, verdict.reason

tokens/s = tokens / (rounds x time of a round), at the number of drafts per round that gives the highest rate. The
confidence interval of the gain is a paired bootstrap over requests (Efron and Tibshirani, chapter 16). It must be above
zero on the clusters (groups of similar requests) whose acceptance fell, together. A loss of 2% or more on one of
several such clusters, on another cluster or on out-of-domain answers refuses the candidate if it is more than chance:
if its interval, at a level at which those of all sets hold together at 95% (Bonferroni), is below zero. This assumes
independent requests, and enough of them for a bootstrap. Each prompt counts once, and repetitive answers do not count,
so that one repeating client does not decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.traffic.stored import Request
from paceline.plan.costs import PassCosts
from paceline.report.statistics import Rounds, bootstrap, ratio_of_sums, repetition

MOST_REPETITION = 0.5
"""Share of repeated n-grams above which an answer counts as a loop. Loops are easy to draft and are not used as
evidence."""
NUM_DRAWS = 2000


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of the two parts of a round: the target's forward pass, and drafting. `passes`: time of the forward pass,
    by number of verified positions. `incumbent_s`, `candidate_s`: drafting time with each of the two drafters."""

    passes: PassCosts
    incumbent_s: float = 0.0
    candidate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pairs:
    """Numbers of rounds, drafted and accepted tokens of each request, once with the incumbent and once with the
    candidate. Index i is the same request in both."""

    incumbent: Sequence[Rounds]
    candidate: Sequence[Rounds]

    def __len__(self) -> int:
        return len(self.incumbent)


@dataclass(frozen=True, slots=True)
class Gain:
    """Relative gain of the candidate's tokens/s over the incumbent's on one set of requests (0.1: 10% faster). `low`
    and `high` are the ends of its confidence interval.

    The interval is a 95% interval for the main set: the requests of all clusters whose acceptance fell. The other sets
    are tested together, so their intervals are wider: with 95% probability all of these contain the true gains."""

    requests: int
    incumbent: float
    """Acceptance length of the incumbent."""
    candidate: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the gate, which compares a candidate drafter with the one that serves now: whether the candidate
    passed, why, and its gains in tokens/s. `gains` has one entry for each set of requests:
    - "drifted": the requests of all clusters whose acceptance fell, together.
    - "cluster NAME": the requests of one cluster. If acceptance fell in one cluster only, that one has no such entry,
      because "drifted" is the same set.
    - "ood": out-of-domain answers."""

    passed: bool
    reason: str
    gains: Mapping[str, Gain] = field(default_factory=dict)
    loses: bool = False
    """True if the candidate is refused only because of losses on other traffic."""
    drafter: str = ""
    """Folder of the judged drafter: the candidate, or a blend with the incumbent."""
    share: float = 1.0
    """Share of the candidate's weights in the judged drafter; below 1 for a blend."""
    is_judged: bool = True
    """False if there was too little data to judge; the drafter is then neither good nor bad."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def too_few(num_prompts: int, config: CandidateConfig) -> Verdict | None:
    """Returns the verdict "could not be judged" (`is_judged` is false) if there are fewer than `config.least_requests`
    prompts to compare two drafters on; else None. `num_prompts`: number of different prompts of the clusters whose
    acceptance fell."""
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
    """Decides whether the candidate may replace the incumbent, from the rounds that both need for the same requests.
    The candidate must be faster on `drifted`, and must not lose too much on any other set.

    - `drifted`: requests of all clusters whose acceptance fell, together.
    - `elsewhere`: name -> requests of one cluster. If acceptance fell in one cluster only, that one is left out,
      because `drifted` is the same set.
    - `ood`: out-of-domain answers.
    - `times`: seconds of one round with each drafter.
    - `config`: limits [default: those of CandidateConfig].

    With fewer than `config.least_requests` requests in `drifted` the verdict is that the candidate could not be judged.
    Other sets with fewer requests are ignored."""
    config = config or CandidateConfig()
    if refused := too_few(len(drifted), config):
        return refused
    gains = {"drifted": compare(drifted, times)}
    others = {**elsewhere, **({"ood": ood} if ood is not None else {})}
    judged = {name: pairs for name, pairs in others.items() if len(pairs) >= config.least_requests}
    gains |= {name: compare(pairs, times, num_sets=len(others)) for name, pairs in judged.items()}
    fell = gains["drifted"]
    if not all(math.isfinite(gain.gain) for gain in gains.values()):
        return Verdict(False, "a figure is no finite number", gains)
    if fell.low <= 0:
        return Verdict(
            False, f"its gain of {fell.gain:+.1%} on what fell may be none (95% from {fell.low:+.1%})", gains
        )
    if lost := lost_elsewhere(gains, config):
        return lost
    without = "; no answers of another kind were there to look at" if "ood" not in gains else ""
    return Verdict(True, f"{fell.gain:+.1%} tokens/s on what fell (95% from {fell.low:+.1%}){without}", gains)


def worst_of(gains: Mapping[str, Gain], config: CandidateConfig) -> str | None:
    """Returns the name of the request set on which the candidate loses the most tokens/s, apart from "drifted". A loss
    counts if it is at least `config.most_loss` and chance does not explain it; returns None if no set has such a
    loss."""
    lost = {
        name: gain.gain
        for name, gain in gains.items()
        if name != "drifted" and gain.gain <= -config.most_loss and gain.high <= 0
    }
    return min(lost, key=lost.__getitem__, default=None)


def lost_elsewhere(gains: Mapping[str, Gain], config: CandidateConfig) -> Verdict | None:
    """Returns a verdict that refuses the candidate if it is slower than the incumbent on requests that have not
    drifted, else None. `gains`: {name of a set of requests: gain in tokens/s over the incumbent}. "Slower" means a loss
    of at least the share `config.most_loss` on a set other than "drifted", and more than chance explains."""
    if (worst := worst_of(gains, config)) is None:
        return None
    why = f"it loses {-gains[worst].gain:.1%} on {worst!r}, {config.most_loss:.0%} is the limit"
    return Verdict(False, why, gains, loses=True)


def compare(pairs: Pairs, times: RoundTimes, num_draws: int = NUM_DRAWS, num_sets: int = 1) -> Gain:
    """Computes the candidate's gain in tokens/s over the incumbent's, with a bootstrap confidence interval. Each of the
    `num_draws` bootstrap samples takes the same requests for both drafters.

    `num_sets`: number of request sets that are tested together. With 1 the result has a 95% interval. With more the
    interval is wider, so that with 95% probability the intervals of all sets contain the true gains."""
    candidate = _tokens_and_seconds(pairs.candidate, times.passes, times.candidate_s)
    incumbent = _tokens_and_seconds(pairs.incumbent, times.passes, times.incumbent_s)
    items = [(*one, *other) for one, other in zip(candidate, incumbent, strict=True)]
    gain, (low, high) = _gain(items), bootstrap(items, _gain, num_draws, 1 - 0.05 / num_sets)
    before, after = (Rounds.sum(rounds).tokens_per_round for rounds in (pairs.incumbent, pairs.candidate))
    return Gain(len(pairs), before, after, gain, gain if low is None else low, gain if high is None else high)


def _gain(items: Sequence[tuple[float, ...]]) -> float:
    """Gain in tokens/s, from (candidate's tokens, its seconds, incumbent's tokens, its seconds) per request."""
    return ratio_of_sums([item[:2] for item in items]) / ratio_of_sums([item[2:] for item in items]) - 1


def _tokens_and_seconds(rounds: Sequence[Rounds], passes: PassCosts, draft_s: float) -> list[tuple[float, float]]:
    """Returns (tokens, seconds of its rounds) per request, at the draft width that takes least time overall."""
    tokens = [one.num_accepted + one.num_rounds for one in rounds]
    tables = []
    for width in range(max((len(one.accepted_histogram) for one in rounds), default=1)):
        round_s = passes.seconds(1 + width) + (draft_s if width else 0.0)
        tables.append([num * round_s / _tokens_at(one, width) for num, one in zip(tokens, rounds, strict=True)])
    return list(zip(tokens, min(tables, key=sum), strict=True))


def _tokens_at(rounds: Rounds, width: int) -> float:
    """Acceptance length when at most `width` drafts are verified."""
    if not rounds.num_rounds:
        return 1.0
    counts = enumerate(rounds.accepted_histogram)
    return 1.0 + sum(min(number, width) * count for number, count in counts) / rounds.num_rounds


def one_a_prompt(requests: Sequence[Request], most: int | None = None) -> list[Request]:
    """Selects the newest usable request of each prompt, so that a client who repeats a prompt does not dominate.
    Returns them newest first, at most `most` (None: all). A request is unusable if its answer has fewer than two
    tokens, consists mostly of repeated n-grams, or has the same tokens as the answer of a request already selected."""
    by_prompt: dict[str, Request] = {}
    answers: set[tuple[int, ...]] = set()
    for request in sorted(requests, key=lambda request: request.hour, reverse=True):
        answer = tuple(request.answer_ids)
        if (
            request.prompt in by_prompt
            or answer in answers
            or len(answer) < 2
            or repetition([answer]) > MOST_REPETITION
        ):
            continue
        by_prompt[request.prompt] = request
        answers.add(answer)
        if len(by_prompt) == most:
            break
    return list(by_prompt.values())
