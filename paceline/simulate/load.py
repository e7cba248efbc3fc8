"""Figures of a simulated server under load: time to the first token, between tokens, of answers; throughput, queue, use.

    rows = sweep(jobs, costs, ServerShape(), survival, policies=("off", "best"), rates=(0.5, 1, 2))

Open loops send at random times whatever becomes of those before (Poisson), closed loops keep a number in flight; the figures
are those of `paceline bench serving`, so that the two can be compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.simulate.arrivals import Job, Survival, arriving, poisson
from paceline.simulate.costs import StepCosts
from paceline.simulate.policies import make_policy
from paceline.simulate.serving import Outcome, PrefillSeconds, Served, ServerShape, simulate, step_seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a set of times, in seconds; None when it is empty."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None)
        return cls(statistics.fmean(ordered), *(_quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated: everything but the load and the policy."""

    jobs: Sequence[Job]
    costs: StepCosts
    server: ServerShape
    survival: Survival
    """As long as the most drafts of a round."""
    seed: int = 0
    prefill_s: PrefillSeconds | None = None
    """None: a chunk is a pass of `costs`."""

    @property
    def context(self) -> float:
        """Tokens of a row on average: its prompt and half its answer."""
        return statistics.fmean(job.prompt_tokens + job.answer_tokens / 2 for job in self.jobs)

    def run(self, policy: str, jobs: Sequence[Job] | None = None, concurrency: int | None = None) -> Outcome:
        """Under a fresh policy of this name. Raises ConfigError."""
        step_s = step_seconds(self.costs, self.context)
        made = make_policy(policy, self.survival, step_s, len(self.survival))
        jobs = self.jobs if jobs is None else jobs
        costs, server = self.costs, self.server
        return simulate(
            jobs, costs, server, made, self.survival, concurrency=concurrency, seed=self.seed, prefill_s=self.prefill_s
        )


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load under one policy. Times in seconds."""

    policy: str
    rate: float | None
    """Requests per second of an open loop."""
    concurrency: int | None
    """In flight, of a closed loop."""
    num_requests: int
    tokens_per_s: float
    """Output tokens over the time from the beginning to the last token."""
    requests_per_s: float
    first_token: Spread
    inter_token: Spread
    """Of each answer's mean time between tokens after the first."""
    total: Spread
    wait: Spread
    """For a row."""
    utilisation: float
    """Share of the time in which the server worked."""
    mean_rows: float
    """Rows of a round, weighted by its time."""
    mean_queue: float
    """Requests without a row, averaged over time."""
    max_queue: int
    tokens_per_round: float
    drafted_per_round: float
    capacity_per_s: float
    """Requests per second that the server finishes when there is always one waiting."""
    is_saturated: bool
    """More comes than it can finish: the queue grows for as long as that lasts, and waiting times with it."""

    @property
    def load(self) -> str:
        return f"{self.rate:g} per second" if self.rate else f"{self.concurrency} in flight"


def figures(
    outcome: Outcome, policy: str, capacity_per_s: float, rate: float | None = None, concurrency: int | None = None
) -> LoadFigures:
    """Of one simulation."""
    served, wall_s = outcome.served, outcome.wall_s
    num_rounds = sum(each.num_rounds for each in served)
    decoding_s = outcome.busy_s - outcome.prefill_s
    return LoadFigures(
        policy=policy,
        rate=rate,
        concurrency=concurrency,
        num_requests=len(served),
        tokens_per_s=_per(outcome.num_tokens, wall_s),
        requests_per_s=_per(len(served), wall_s),
        first_token=Spread.of([each.first_s - each.arrival_s for each in served]),
        inter_token=Spread.of([gap for each in served if (gap := inter_token_s(each)) is not None]),
        total=Spread.of([(each.finished_s or 0.0) - each.arrival_s for each in served]),
        wait=Spread.of([each.wait_s for each in served]),
        utilisation=_per(outcome.busy_s, wall_s),
        mean_rows=_per(outcome.row_seconds, decoding_s),
        mean_queue=_per(sum(each.wait_s for each in served), wall_s),
        max_queue=_longest_queue(served),
        tokens_per_round=1 + _per(sum(each.num_accepted for each in served), num_rounds),
        drafted_per_round=_per(sum(each.num_drafted for each in served), num_rounds),
        capacity_per_s=capacity_per_s,
        is_saturated=rate is not None and rate >= capacity_per_s,
    )


def _per(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def inter_token_s(each: Served) -> float | None:
    """Mean seconds between an answer's tokens after the first; None for an answer of one."""
    if each.num_tokens < 2:
        return None
    return ((each.finished_s or each.first_s) - each.first_s) / (each.num_tokens - 1)


def _longest_queue(served: Sequence[Served]) -> int:
    """Most requests that waited for a row at once; one that gets its row as another comes has left by then."""
    events = sorted(
        [(each.arrival_s, 1) for each in served if each.wait_s > 0]
        + [(each.admitted_s, -1) for each in served if each.wait_s > 0]
    )
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def capacity(case: Case, policy: str) -> float:
    """Requests per second while there is always one waiting: all come at the beginning; the emptying at the end is left out."""
    outcome = case.run(policy, [Job(0.0, job.prompt_tokens, job.answer_tokens, job.survival) for job in case.jobs])
    full_s = max((each.admitted_s for each in outcome.served), default=0.0)
    made = sum(count for each in outcome.served for when, count in each.chunks if when <= full_s)
    if not full_s or made < outcome.num_tokens / 2:  # too few to ever fill the rows for long
        full_s, made = outcome.wall_s, outcome.num_tokens
    return _per(made, full_s) / statistics.fmean(job.answer_tokens for job in case.jobs)


def sweep(
    case: Case, policies: Sequence[str], rates: Sequence[float] = (), concurrencies: Sequence[int] = ()
) -> list[LoadFigures]:
    """Every policy at every load, the same requests each time. Raises ConfigError."""
    if not case.jobs or not policies or not (rates or concurrencies):
        raise ConfigError("nothing to simulate: give at least one request, one policy, and one --rate or --concurrency")
    if any(not 0 < rate < math.inf for rate in rates):
        raise ConfigError("--rate must be above 0")
    most = {policy: capacity(case, policy) for policy in policies}
    made = []
    for rate in rates:
        jobs = arriving(case.jobs, poisson(rate, len(case.jobs), case.seed))
        made += [figures(case.run(policy, jobs), policy, most[policy], rate=rate) for policy in policies]
    for concurrency in concurrencies:
        for policy in policies:
            outcome = case.run(policy, concurrency=concurrency)
            made.append(figures(outcome, policy, most[policy], concurrency=concurrency))
    return made
