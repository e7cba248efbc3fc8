"""A simulated server: requests come, wait, are prefilled, decode together in rounds, and leave. No model, no torch, seeded.

    outcome = simulate(jobs, costs, ServerShape(max_rows=8), make_policy("best", survival, step_s, 15), survival)

The steps are those of `engine/scheduler.py` and `engine/engine.py`: each does at most one prefill chunk and one decode round
over all rows, in which a prompt that was just finished takes part; what a step made is handed out at its end; what comes during
a step waits for the next. A round takes `verify_s + draft_s + host_s`, and acceptance is drawn from a survival curve.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.learned import ChunkSizes
from paceline.simulate.arrivals import Job, Survival
from paceline.simulate.costs import StepCosts
from paceline.simulate.policies import Policy, StepSeconds, check_survival, num_accepted

REQUEST_S = 0.005
"""What a request of `paceline serve` spends there, about, on two cores that the engine keeps busy."""
PrefillSeconds = Callable[[int, int], float]
"""Tokens of a prompt's chunk, tokens in the cache after it -> seconds."""


@dataclass(frozen=True, slots=True)
class ServerShape:
    """What the server is allowed. Raises ConfigError."""

    max_rows: int = 8
    """Requests that decode together."""
    prefill_chunk: int | None = 256
    """Prompt tokens of a step at most; None prefills a prompt at once."""
    prefill_adapts: bool = False
    """Chunks beside running requests keep to their rounds' time (`plan.py`)."""
    request_s: float = 0.0
    """Seconds that a request spends outside the engine before its first token: HTTP, tokenizing. Others do not wait for it."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ConfigError(f"--max-rows must be at least 1, not {self.max_rows}")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ConfigError(f"--prefill-chunk must be at least 1, not {self.prefill_chunk}")
        if not 0 <= self.request_s < 3600:
            raise ConfigError(f"--request-overhead must be 0 seconds or more, not {self.request_s:g}")


@dataclass(slots=True, eq=False)
class Served:
    """One request's fate. Times in seconds since the beginning."""

    job: Job
    arrival_s: float
    luck: random.Random = field(repr=False)
    """Decides its acceptance, whatever else is in the batch."""
    admitted_s: float = 0.0
    first_s: float = 0.0
    finished_s: float | None = None
    num_prefilled: int = 0
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When tokens were handed out, and how many."""
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def wait_s(self) -> float:
        """Without a row."""
        return self.admitted_s - self.arrival_s

    @property
    def num_left(self) -> int:
        return self.job.answer_tokens - self.num_tokens

    def gain(self, count: int, now_s: float) -> None:
        """Take `count` tokens, not beyond the answer's end."""
        count = min(count, self.num_left)
        self.num_tokens += count
        self.first_s = self.first_s if self.chunks else now_s
        self.chunks.append((now_s, count))
        if self.num_left == 0:
            self.finished_s = now_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated server did."""

    served: list[Served]
    """In the order of the jobs."""
    wall_s: float
    """From time 0 to the last token."""
    busy_s: float
    num_rounds: int
    row_seconds: float
    """Rows that decoded times the seconds they did."""
    prefill_s: float

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.served)


def simulate(
    jobs: Sequence[Job],
    costs: StepCosts,
    server: ServerShape,
    policy: Policy,
    survival: Survival,
    *,
    concurrency: int | None = None,
    seed: int = 0,
    prefill_s: PrefillSeconds | None = None,
) -> Outcome:
    """Serve all jobs. `concurrency` keeps as many in flight, whatever the arrival times; `survival` is for jobs that have none.

    `prefill_s` prices prompt chunks where `costs` knows short passes only. Raises ConfigError on impossible input.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, not {concurrency}")
    if any(not 0 <= job.arrival_s < math.inf or job.prompt_tokens < 1 or job.answer_tokens < 1 for job in jobs):
        raise ConfigError("every request needs an arrival time of 0 or later, and at least one token of prompt and answer")
    for curve in {survival, *(job.survival for job in jobs if job.survival is not None)}:
        check_survival(curve)
    return _Loop(jobs, costs, server, policy, survival, concurrency, seed, prefill_s or prefill_as_pass(costs)).run()


def step_seconds(costs: StepCosts, context: float) -> StepSeconds:
    """What a policy is told of a round's cost: rows and drafts of each, at this many tokens of context."""
    return lambda rows, count: (
        costs.verify_s(rows, count + 1, context) + (costs.draft_s(rows, count, context) if count else 0.0) + costs.host_s
    )


def prefill_as_pass(costs: StepCosts) -> PrefillSeconds:
    """A chunk costs what a target pass of as many positions of one row does."""
    return lambda tokens, context: costs.verify_s(1, tokens, context)


class _Loop:
    """The clock, the queue, the rows."""

    def __init__(
        self,
        jobs: Sequence[Job],
        costs: StepCosts,
        server: ServerShape,
        policy: Policy,
        survival: Survival,
        concurrency: int | None,
        seed: int,
        prefill_s: PrefillSeconds,
    ) -> None:
        self._costs, self._prefill_s_of, self._server, self._policy = costs, prefill_s, server, policy
        self._is_closed = concurrency is not None
        self._all = [
            Served(job, 0.0 if self._is_closed else job.arrival_s, random.Random(f"{seed} {index}"))
            for index, job in enumerate(jobs)
        ]
        self._survival = survival
        self._order = itertools.count()
        self._coming = [(each.arrival_s, next(self._order), each) for each in self._all[:concurrency]]
        heapq.heapify(self._coming)
        self._unsent = deque(self._all[concurrency:] if self._is_closed else ())
        self._waiting: deque[Served] = deque()
        self._prefilling: deque[Served] = deque()
        self._running: list[Served] = []
        self._now = self._busy_s = self._row_seconds = self._prefill_s = 0.0
        self._num_rounds, self._has_chunk = 0, False
        chunk = server.prefill_chunk or max((job.prompt_tokens for job in jobs), default=1)
        self._pace = ChunkSizes(chunk, adapts=server.prefill_adapts)

    def run(self) -> Outcome:
        while self._coming or self._waiting or self._prefilling or self._running:
            if not (self._waiting or self._prefilling or self._running):
                self._now = max(self._now, self._coming[0][0])  # asleep until somebody comes
            self._receive()
            self._step()
        last = max((each.finished_s or 0.0 for each in self._all), default=0.0)
        return Outcome(self._all, last, self._busy_s, self._num_rounds, self._row_seconds, self._prefill_s)

    def _receive(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            self._waiting.append(heapq.heappop(self._coming)[2])
        while self._waiting and len(self._prefilling) + len(self._running) < self._server.max_rows:
            admitted = self._waiting.popleft()
            admitted.admitted_s = self._now
            self._prefilling.append(admitted)

    def _step(self) -> None:
        self._has_chunk = bool(self._prefilling)
        began, joining = self._now, self._prefill()
        gained = [(joining, 1)] if joining else []
        rows = self._running + ([joining] if joining and joining.job.answer_tokens > 1 else [])
        if rows and rows != [joining]:  # a first token that delays nobody goes out before its first round
            gained += self._round(rows)
        self._busy_s += self._now - began
        self._running = rows
        for each, count in gained:  # handed out together, at the end of the step
            each.gain(count, self._now + self._server.request_s)
        for each in [each for each, _ in gained if each.num_left == 0]:
            self._finish(each)

    def _prefill(self) -> Served | None:
        """One chunk of the prompt that waits longest; returns who has its first token now."""
        if not self._prefilling:
            return None
        each = self._prefilling[0]
        count = min(each.job.prompt_tokens - each.num_prefilled, self._pace.size(len(self._running)))
        spent = self._prefill_s_of(count, each.num_prefilled + count)
        self._pace.prefilled(count, spent)
        each.num_prefilled += count
        self._now += spent
        self._prefill_s += spent
        if each.num_prefilled < each.job.prompt_tokens:
            return None
        return self._prefilling.popleft()

    def _round(self, rows: list[Served]) -> list[tuple[Served, int]]:
        """One decode round; returns what each row gained. A row's first token, of this step's prefill, is not counted yet."""
        chosen = self._policy.choose(len(rows) + len(self._prefilling))
        gained, num_positions, most, context = [], 0, 0, 0
        for each in rows:
            made = max(each.num_tokens, 1)
            drafted = min(chosen, each.job.answer_tokens - made - 1)
            survival = self._survival if each.job.survival is None else each.job.survival
            accepted = num_accepted(survival, each.luck.random(), drafted)
            self._policy.record(drafted, accepted)
            each.num_rounds += 1
            each.num_drafted += drafted
            each.num_accepted += accepted
            num_positions += 1 + drafted
            most = max(most, drafted)
            context += each.job.prompt_tokens + made
            gained.append((each, accepted + 1))
        spent = self._costs.verify_s(len(rows), num_positions / len(rows), context / len(rows)) + self._costs.host_s
        if most:
            spent += self._costs.draft_s(len(rows), most, context / len(rows))
        self._now += spent
        self._pace.decoded(spent, beside_chunk=self._has_chunk)
        self._row_seconds += spent * len(rows)
        self._num_rounds += 1
        return gained

    def _finish(self, each: Served) -> None:
        if each in self._running:
            self._running.remove(each)
        if self._unsent:
            sent = self._unsent.popleft()
            sent.arrival_s = self._now + self._server.request_s
            heapq.heappush(self._coming, (sent.arrival_s, next(self._order), sent))
