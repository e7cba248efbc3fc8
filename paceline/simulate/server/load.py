"""Load on a simulated server: arrivals of requests, and the resulting latencies, throughput, queue and utilisation.

    jobs = workload(400, parse_lengths("--prompt-tokens", "64-512"), parse_lengths("--answer-tokens", "128"), seed=0)
    rows = sweep(Case(jobs, costs, ServerShape(), survival), policies=("off", "best"), rates=(0.5, 1, 2))

Open loops send requests at random times (Poisson), whether earlier ones are answered or not; closed loops keep a number
in flight. The figures are those of `paceline bench serving`, so that both can be compared. The same seed gives the same
requests.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.report.statistics import Spread
from paceline.simulate.server.server import Case, Job, Outcome, SimulatedRequest

LONGEST = 1_000_000
"""Maximum tokens of a prompt or an answer."""
Lengths = Callable[[random.Random], int]
"""Function that draws a random number of tokens."""


def parse_lengths(option: str, text: str) -> Lengths:
    """Parses a distribution of token counts: 128, 64-512 (equally likely) or lognormal:MEDIAN,SIGMA (sigma of the
    logarithm). Returns a function that draws one count from a random generator. Raises ConfigError, which names
    `option`, for any other text."""
    kind, _, values = text.strip().rpartition(":")
    try:
        if kind == "lognormal":
            median, sigma = (float(part) for part in values.split(","))
            if not (1 <= median <= LONGEST and 0 <= sigma <= 5):
                raise ValueError
            return lambda source: min(max(round(source.lognormvariate(math.log(median), sigma)), 1), LONGEST)
        low, _, high = values.partition("-")
        least, most = int(low), int(high or low)
        if kind or not 1 <= least <= most <= LONGEST:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is no length: write it as 128, 64-512 or lognormal:200,0.7 (1 to {LONGEST:,} tokens)"
        ) from None
    return lambda source: source.randint(least, most)


def poisson(rate: float, number: int, seed: int) -> list[float]:
    """Returns `number` arrival times in seconds of a Poisson process with `rate` arrivals per second. `paceline bench
    serving` uses this function too, so its requests come at the same times."""
    source = random.Random(seed)
    return list(itertools.accumulate(source.expovariate(rate) for _ in range(number)))


def workload(number: int, prompt: Lengths, answer: Lengths, seed: int) -> list[Job]:
    """Returns `number` requests that all arrive at time 0 (`arriving` sets other times). `prompt` and `answer`:
    distributions of lengths in tokens. The same seed gives the same requests."""
    source = random.Random(f"lengths {seed}")
    return [Job(0.0, prompt(source), answer(source)) for _ in range(number)]


def arriving(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """Returns copies of the requests `jobs` that arrive at `times`, in seconds after the start."""
    return [replace(job, arrives_at=time) for job, time in zip(jobs, times, strict=True)]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Load of a server: request rate per second (open loop), or number of requests in flight (closed loop)."""

    rate: float | None = None
    concurrency: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g} per second" if self.rate else f"{self.concurrency} in flight"


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Simulated throughput, latencies and acceptance at one load under one policy (rule for the number of drafts).
    Times are in seconds."""

    policy: str
    rate: float | None
    """Requests per second of an open loop; None for a closed one."""
    concurrency: int | None
    """Requests in flight of a closed loop; None for an open one."""
    num_requests: int
    tokens_per_s: float
    """Output tokens per second, from the start to the last token."""
    requests_per_s: float
    first_token: Spread
    """Spread over requests of the time from arrival to the first token."""
    inter_token: Spread
    """Spread over answers of the mean time between tokens after the first."""
    total: Spread
    """Spread over requests of the time from arrival to the last token."""
    wait: Spread
    """Spread over requests of the time in the queue: from arrival until the request gets a batch row."""
    utilisation: float
    """Share of the time in which the server was busy."""
    mean_rows: float
    """Mean number of occupied batch rows, weighted by the rounds' durations."""
    mean_queue: float
    """Mean number of requests in the queue over time."""
    max_queue: int
    tokens_per_round: float
    drafted_per_round: float
    capacity_per_s: float
    """Capacity: requests per second that the server finishes if its queue is never empty."""
    is_saturated: bool
    """True if requests arrive at least as fast as the server can finish them, so that queue and waiting times keep
    growing."""

    @property
    def load(self) -> str:
        return str(Arrivals(self.rate, self.concurrency))


def figures_of(
    outcome: Outcome, policy: str, capacity_per_s: float, rate: float | None = None, concurrency: int | None = None
) -> LoadFigures:
    """Computes the figures of one simulated load, either `rate` requests per second or `concurrency` requests in
    flight. `policy`: name of the rule for the number of drafts. `capacity_per_s`: most requests per second that the
    server can finish with this policy."""
    requests, wall_s = outcome.requests, outcome.wall_s
    num_rounds = sum(each.num_rounds for each in requests)
    return LoadFigures(
        policy=policy,
        rate=rate,
        concurrency=concurrency,
        num_requests=len(requests),
        tokens_per_s=share(outcome.num_tokens, wall_s),
        requests_per_s=share(len(requests), wall_s),
        first_token=Spread.of([each.first_token_s for each in requests]),
        inter_token=Spread.of([each.inter_token_s for each in requests if each.inter_token_s is not None]),
        total=Spread.of([each.total_s for each in requests]),
        wait=Spread.of([each.wait_s for each in requests]),
        utilisation=share(outcome.busy_s, wall_s),
        mean_rows=share(outcome.row_seconds, outcome.busy_s - outcome.prefill_s),
        mean_queue=share(sum(each.wait_s for each in requests), wall_s),
        max_queue=_longest_queue(requests),
        tokens_per_round=1 + share(sum(each.num_accepted_total for each in requests), num_rounds),
        drafted_per_round=share(sum(each.num_drafted_total for each in requests), num_rounds),
        capacity_per_s=capacity_per_s,
        is_saturated=rate is not None and rate >= capacity_per_s,
    )


def share(amount: float, of: float) -> float:
    """Returns amount / of; 0 if `of` is 0."""
    return amount / of if of > 0 else 0.0


def _longest_queue(requests: Sequence[SimulatedRequest]) -> int:
    """Returns the maximum number of requests waiting for a row; at equal times, those admitted no longer count."""
    waited = [each for each in requests if each.wait_s > 0]
    events = sorted([(each.arrived_at, 1) for each in waited] + [(each.admitted_at, -1) for each in waited])
    return max(itertools.accumulate(change for _, change in events), default=0)


def capacity(case: Case, policy: str) -> float:
    """Returns the most requests per second that the server can finish under `policy` (rule for the number of drafts).
    Simulates the requests of `case`, all arriving at the start. The result is the tokens per second of a full batch,
    divided by the mean answer length.

    Tokens are counted until the last request leaves the queue, because the batch is full until then. If fewer than half
    of all tokens are generated by then, the tokens of the whole simulation are counted instead.
    """
    outcome = case.run(policy, [replace(job, arrives_at=0.0) for job in case.jobs])
    full_s = max((each.admitted_at for each in outcome.requests), default=0.0)
    num_tokens = sum(count for each in outcome.requests for when, count in each.chunks if when <= full_s)
    if not full_s or num_tokens < outcome.num_tokens / 2:  # too few requests to fill the rows for long
        full_s, num_tokens = outcome.wall_s, outcome.num_tokens
    return share(num_tokens, full_s) / statistics.fmean(job.answer_tokens for job in case.jobs)


def sweep(
    case: Case, policies: Sequence[str], rates: Sequence[float] = (), concurrencies: Sequence[int] = ()
) -> list[LoadFigures]:
    """Simulates every load under every policy (rule for the number of drafts), with the same requests. A load is one of
    the `rates` (requests per second) or of the `concurrencies` (requests in flight). Raises ConfigError for an invalid
    policy or request, or without requests, policies or loads."""
    if not case.jobs or not policies or not (rates or concurrencies):
        raise ConfigError("nothing to simulate: give at least one request, one policy, and one --rate or --concurrency")
    most = {policy: capacity(case, policy) for policy in policies}
    figures = []
    for rate, concurrency in [*((rate, None) for rate in rates), *((None, number) for number in concurrencies)]:
        jobs = arriving(case.jobs, poisson(rate, len(case.jobs), case.seed)) if rate else case.jobs
        for policy in policies:
            figures.append(figures_of(case.run(policy, jobs, concurrency), policy, most[policy], rate, concurrency))
    return figures
