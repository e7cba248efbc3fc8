"""A simulated server: requests come, wait, are prefilled, decode together in rounds, and leave. No model, no torch, seeded.

    outcome = Case(jobs, costs, ServerShape(max_rows=8), survival).run("best")

The steps are those of `engine/scheduler.py` and `engine/engine.py`: each does at most one prefill chunk and one decode round
over all rows, in which a prompt that was just finished takes part. What a step made is handed out at its end; a request that
comes during a step waits for the next. A round takes `verify_s + draft_s + host_s`; how many of its drafts stand is drawn from
a survival curve.

What is drafted decides a planner, mostly the engine's own (`paceline/plan/planner.py`): off, a number of drafts and
adaptive are `serve --speculate`'s off, N and auto. best knows acceptance and costs and takes the number with the
highest goodput for the rows that run, `sum of E[tokens | g] / round_s(rows, g)` (Finn, adaptive-speculation, 2026):
what a table for each batch size can reach.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.plan.costs import PassCosts
from paceline.plan.marginals import Marginals
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Offer, Plan, Planner, Row, fixed_planner
from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.server.drafts import Drafted, Survival, drafted, drafted_candidates
from paceline.types import LOOKUP, RoundStats, RowKind, Take

SOURCE = "drafter"
"""Whose drafts a simulated row checks, unless they were found in the text so far (LOOKUP), which takes no time."""
MEASURED = tuple(1 << power for power in range(11))
"""Positions of the passes whose time an adaptive planner is told, as an engine measures them at its start."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    arrives_at: float
    """Seconds after the beginning. A closed loop ignores it: it sends when an earlier answer is done."""
    prompt_tokens: int
    """Prompt tokens that have to be computed; those found in a prefix cache are not."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Lookups:
    """Drafts found in the text so far, beside the drafter's own."""

    share: float
    """Of a row's rounds those in which something is found."""
    survival: Survival

    @property
    def chance(self) -> float:
        """The average chance that a looked-up draft is accepted when all drafts before it were."""
        return sum(self.survival) / (1 + sum(self.survival[:-1]))


@dataclass(frozen=True, slots=True)
class ServerShape:
    """The limits of a server."""

    max_rows: int = 8
    """Requests that decode together."""
    prefill_chunk: int | None = 256
    """Prompt tokens of a step at most; None prefills a prompt at once."""
    request_s: float = 0.0
    """Seconds of a request outside the engine before its first token: HTTP, tokenizing. They delay no other request."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything of a simulation but its load and its policy."""

    jobs: Sequence[Job]
    costs: StepCosts
    server: ServerShape
    survival: Survival
    """As long as the most drafts of a round."""
    seed: int = 0
    lookups: Lookups | None = None
    """Of the policy adaptive, as a server has them."""
    marginals: Marginals | None = None
    """Of a block drafter whose drafts may be checked as trees, by the policies adaptive and tree:N; in place of the curve."""

    @property
    def context(self) -> float:
        """Tokens of a row on average: its prompt and half its answer."""
        return statistics.fmean(job.prompt_tokens + job.answer_tokens / 2 for job in self.jobs)

    def run(self, policy: str, jobs: Sequence[Job] | None = None, concurrency: int | None = None) -> Outcome:
        """One simulation, under a fresh policy of this name. Raises ConfigError."""
        return Simulation(self, self.planner(policy), self.jobs if jobs is None else jobs, concurrency).run()

    def planner(self, policy: str) -> Planner:
        """A fresh one. Raises ConfigError."""
        chunk = self.server.prefill_chunk or max((job.prompt_tokens for job in self.jobs), default=1)
        return make_planner(policy, self.survival, self.costs, self.context, chunk, self.marginals is not None)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on its way through the server. Moments (`_at`) are seconds since the beginning."""

    job: Job
    arrived_at: float
    luck: random.Random = field(repr=False)
    """Decides how many drafts stand, independently of the other requests."""
    admitted_at: float = 0.0
    """When it got a row."""
    first_token_at: float = 0.0
    finished_at: float = 0.0
    num_prefilled: int = 0
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(moment, number of tokens) of each time that tokens were handed out."""
    num_rounds: int = 0
    num_drafted_total: int = 0
    """Drafts of all its rounds."""
    num_accepted_total: int = 0
    """Drafts that stood, of all its rounds."""

    @property
    def wait_s(self) -> float:
        """Seconds from arrival to a row."""
        return self.admitted_at - self.arrived_at

    @property
    def first_token_s(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token_at - self.arrived_at

    @property
    def total_s(self) -> float:
        """Seconds from arrival to the last token."""
        return self.finished_at - self.arrived_at

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between tokens after the first; None for an answer of one token."""
        return (self.finished_at - self.first_token_at) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def num_left(self) -> int:
        """Tokens that the answer lacks."""
        return self.job.answer_tokens - self.num_tokens

    def add_tokens(self, count: int, now: float) -> None:
        """Hand out `count` tokens, not beyond the answer's end."""
        count = min(count, self.num_left)
        self.num_tokens += count
        self.first_token_at = self.first_token_at if self.chunks else now
        self.finished_at = now
        self.chunks.append((now, count))


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests after a simulation, and how the server spent its time."""

    requests: list[SimulatedRequest]
    """In the order of the jobs."""
    busy_s: float
    """Seconds in which the server worked."""
    prefill_s: float
    """Seconds of prefill chunks."""
    row_seconds: float
    """Seconds of each round times its rows, summed."""

    @property
    def wall_s(self) -> float:
        """From time 0 to the last token."""
        return max((each.finished_at for each in self.requests), default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.requests)


class Simulation:
    """The clock, the queue and the rows of a server that serves all jobs."""

    def __init__(self, case: Case, planner: Planner, jobs: Sequence[Job], concurrency: int | None = None) -> None:
        """`concurrency` keeps so many jobs in flight, whatever their arrival times. Raises ConfigError on impossible input."""
        if any(not 0 <= job.arrives_at < math.inf or job.prompt_tokens < 1 or job.answer_tokens < 1 for job in jobs):
            raise ConfigError("every request needs an arrival time of 0 or later, and at least one token of prompt and answer")
        self._costs, self._server, self._planner, self._survival = case.costs, case.server, planner, case.survival
        self._marginals = case.marginals
        self._lookups = case.lookups if type(planner) is AdaptivePlanner else None
        is_closed = concurrency is not None
        self._all = [
            SimulatedRequest(job, 0.0 if is_closed else job.arrives_at, random.Random(f"{case.seed} {index}"))
            for index, job in enumerate(jobs)
        ]
        self._order = itertools.count()
        self._coming = [(each.arrived_at, next(self._order), each) for each in self._all[:concurrency]]
        heapq.heapify(self._coming)
        self._unsent = deque(self._all[concurrency:] if is_closed else ())
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._now = self._busy_s = self._row_seconds = self._prefill_s = 0.0
        self._is_block = case.costs.draft_s(1, 2, 1) < 1.5 * case.costs.draft_s(1, 1, 1)
        # A second draft costs hardly more than the first: a block drafter, which knows beforehand how sure it is of each slot.

    def run(self) -> Outcome:
        while self._coming or self._waiting or self._prefilling or self._running:
            if not (self._waiting or self._prefilling or self._running):
                self._now = max(self._now, self._coming[0][0])  # idle until a request comes
            self._receive()
            self._step()
        return Outcome(self._all, self._busy_s, self._prefill_s, self._row_seconds)

    def _receive(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            self._waiting.append(heapq.heappop(self._coming)[2])
        while self._waiting and len(self._prefilling) + len(self._running) < self._server.max_rows:
            admitted = self._waiting.popleft()
            admitted.admitted_at = self._now
            self._prefilling.append(admitted)

    def _step(self) -> None:
        began, reading = self._now, self._prefilling
        prompt_left = reading[0].job.prompt_tokens - reading[0].num_prefilled if reading else 0
        plan = self._planner.next([self._row(each) for each in self._running], prompt_left)
        joining = self._prefill(plan.chunk)
        made = [(joining, 1)] if joining else []
        rows = self._running + ([joining] if joining and joining.job.answer_tokens > 1 else [])
        if rows and rows != [joining]:  # with no other row, a first token goes out before its first round
            if rows[-1] is joining:
                self._planner.join(plan, len(plan.rows), self._row(rows[-1]))
            made += self._round(rows, plan)
        self._busy_s += self._now - began
        for each, count in made:  # handed out together, at the end of the step
            each.add_tokens(count, self._now + self._server.request_s)
        self._running = [each for each in rows if each.num_left]
        num_done = sum(each.num_left == 0 for each, _ in made)
        for _ in range(min(num_done, len(self._unsent))):  # a closed loop sends its next request when an answer is done
            sent = self._unsent.popleft()
            sent.arrived_at = self._now + self._server.request_s
            heapq.heappush(self._coming, (sent.arrived_at, next(self._order), sent))

    def _row(self, each: SimulatedRequest) -> Row:
        left = each.job.answer_tokens - max(each.num_tokens, 1) - 1
        most, offers = min(len(self._survival), left), list[Offer]()
        if most > 0:
            offers.append(self._planner.offer(SOURCE, "greedy", most))
        if self._lookups and left > 0 and each.luck.random() < self._lookups.share:
            offers.append(Offer(LOOKUP, (self._lookups.chance,) * min(len(self._lookups.survival), left)))
        return Row(id(each), "greedy", offers)

    def _prefill(self, num_tokens: int) -> SimulatedRequest | None:
        """One chunk of the prompt that waits longest; returns the request if this was its last chunk."""
        if not self._prefilling:
            return None
        each = self._prefilling[0]
        count = min(each.job.prompt_tokens - each.num_prefilled, num_tokens)
        each.num_prefilled += count
        spent_s = self._costs.prefill_s(count, each.num_prefilled)
        self._planner.prefilled(count, spent_s)
        self._now += spent_s
        self._prefill_s += spent_s
        return self._prefilling.popleft() if each.num_prefilled == each.job.prompt_tokens else None

    def _round(self, rows: list[SimulatedRequest], plan: Plan) -> list[tuple[SimulatedRequest, int]]:
        """One decode round; returns the tokens of each row. The first token of a row that joins is not in `num_tokens` yet."""
        says_sure = not plan.whole_blocks and self._is_block
        asks = self._planner.num_candidates if self._is_block else 0
        drafts = [self._drafted(each, take, says_sure, asks) for each, take in zip(rows, plan.drafts, strict=True)]
        counts = [take.count for take in plan.drafts if take.count and take.source != LOOKUP]
        chosen = self._planner.narrow(plan, [each.sure for each in drafts], [each.candidates for each in drafts])
        outcomes = [each.checked(width) for each, width in zip(drafts, chosen, strict=True)]
        widths = [each if isinstance(each, int) else len(each.tokens) for each in chosen]
        depths = [each if isinstance(each, int) else each.depth for each in chosen]
        accepted = [num_kept for num_kept, _ in outcomes]
        context = statistics.fmean(each.job.prompt_tokens + max(each.num_tokens, 1) for each in rows)
        for each, depth, num_accepted in zip(rows, depths, accepted, strict=True):
            each.num_rounds += 1
            each.num_drafted_total += depth
            each.num_accepted_total += num_accepted
        verify_s = self._costs.verify_s(len(rows), 1 + sum(widths) / len(rows), context)
        draft_s = self._costs.draft_s(len(counts), max(counts), context) if counts else 0.0
        stats = RoundStats(depths, accepted, True, draft_s, verify_s, self._costs.host_s, num_checked_B=widths)
        stats.sure_B = [each.sure for each in drafts]
        stats.trees_B = [outcome for _, outcome in outcomes]
        self._planner.learn(plan, stats)
        spent_s = verify_s + draft_s + self._costs.host_s
        self._now += spent_s
        self._row_seconds += spent_s * len(rows)
        return [(each, count + 1) for each, count in zip(rows, accepted, strict=True)]

    def _drafted(self, each: SimulatedRequest, take: Take, says_sure: bool, num_candidates: int) -> Drafted:
        if take.source == LOOKUP and self._lookups:
            return drafted(self._lookups.survival, each.luck, take.count, says_sure=False)
        if self._marginals and num_candidates and take.count:
            return drafted_candidates(self._marginals, each.luck, take.count, num_candidates)
        return drafted(self._survival, each.luck, take.count, says_sure)


@dataclass(slots=True)
class BestPlanner(FixedPlanner):
    """As many drafts for every row as bring the most tokens a second, acceptance and costs being known."""

    survival: Survival = ()
    round_s: Callable[[int, int], float] = field(default=lambda rows, count: 1.0)
    """By rows and drafts of each."""
    _known: dict[int, int] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Drafts of each row in a round of so many rows; the smallest of equally good numbers."""
        if num_rows not in self._known:
            expected = list(itertools.accumulate((1.0, *self.survival)))
            gains = [tokens / self.round_s(num_rows, count) for count, tokens in enumerate(expected)]
            self._known[num_rows] = gains.index(max(gains))
        return self._known[num_rows]

    def _begin(self, num_rows: int) -> None:
        self.num_drafted = self.choose(num_rows)


class OffPlanner(AdaptivePlanner):
    """No drafts; chunks as the engine's planner has them."""

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        return Offer(source, ())


def make_planner(
    name: str, survival: Survival, costs: StepCosts, context: float, most_chunk: int, grows_trees: bool = False
) -> Planner:
    """A fresh planner, which has seen nothing yet, for off, best, adaptive, a number of drafts or tree:N. Raises ConfigError.

    `context`: tokens of a row on average, at which costs are told. `grows_trees`: whether it is known what trees are made of.
    """
    if name == "off":
        return OffPlanner(PassCosts([(1, 1.0)]), most_chunk=most_chunk, adapts_chunks=costs.prefill_adapts)
    passes = PassCosts([(size, costs.verify_s(1, size, context) + costs.host_s) for size in MEASURED])
    if name == "adaptive":
        return AdaptivePlanner(passes, most_chunk=most_chunk, adapts_chunks=costs.prefill_adapts, grows_trees=grows_trees)
    if name.startswith("tree:"):
        if not grows_trees:
            raise ConfigError(f"--policy {name} needs to know how often other tokens than the likeliest stand: add --marginals")
        return fixed_planner(name, most_chunk)
    if name == "best":
        return BestPlanner(0, most_chunk, survival=survival, round_s=lambda rows, count: costs.round_s(rows, count, context))
    if not (name.isascii() and name.isdecimal()):
        raise ConfigError(
            f"--policy {name!r} is not known: choose from off, best, adaptive, a number of drafts, or tree:N with --marginals"
        )
    if int(name) > len(survival):
        raise ConfigError(f"--policy {name} drafts more than the drafter can: at most {len(survival)}")
    return FixedPlanner(int(name), most_chunk)
