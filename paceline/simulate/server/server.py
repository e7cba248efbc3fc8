"""Simulates a server: requests arrive, wait, are prefilled, decode together in rounds, and leave. Runs no model, needs
no PyTorch, and is seeded.

    outcome = Case(jobs, costs, ServerShape(max_rows=8), survival).run("best")

The steps are those of `engine/scheduler.py` and `engine/engine.py`. Each has at most one prefill chunk, and one decode
round over all batch rows, including a row whose prompt was just finished. A step's tokens are sent at its end. A
request that arrives during a step waits for the next one. A round takes `verify_s + draft_s + host_s`; its accepted
drafts are drawn from a survival curve.

A planner decides the number of drafts by a policy. Off, a number and adaptive are `serve --speculate`'s off, N and
auto, with the engine's own planner (`paceline/plan/planner.py`). Best knows acceptance and costs, and takes the number
with the most tokens per second for the running rows: `sum of E[tokens | g] / round_s(rows, g)` (Finn,
adaptive-speculation, 2026).
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
from paceline.plan.planner import AdaptivePlanner, FixedPlanner, Offer, Plan, Planner, Row
from paceline.plan.speculate import Speculation
from paceline.simulate.costs.rounds import StepCosts
from paceline.simulate.server.drafts import Drafted, Survival, drafted, drafted_candidates
from paceline.types import LOOKUP, RoundStats, RowKind, Take

SOURCE = "drafter"
"""Name of the source of simulated drafts. Prompt lookup drafts have another (LOOKUP) and take no time."""
MEASURED = tuple(1 << power for power in range(11))
"""Pass sizes in token positions. An adaptive planner is given their times; an engine measures the same sizes when it
starts."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its arrival time, and the numbers of its prompt and answer tokens."""

    arrives_at: float
    """Arrival in seconds after the start. Closed loops ignore it: they send a request when an earlier answer is
    done."""
    prompt_tokens: int
    """Prompt tokens to compute; those in a prefix cache are not counted."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Lookups:
    """Frequency and acceptance of prompt lookup drafts, which a simulated server uses in addition to its drafter's."""

    share: float
    """Share of a batch row's rounds that have a prompt lookup draft."""
    survival: Survival

    @property
    def chance(self) -> float:
        """Share of the tried prompt lookup drafts that are accepted. A draft is tried if all earlier ones of its round
        are accepted."""
        return sum(self.survival) / (1 + sum(self.survival[:-1]))


@dataclass(frozen=True, slots=True)
class ServerShape:
    """Limits of the simulated server, and the seconds that each request spends outside the engine."""

    max_rows: int = 8
    """Requests that decode together."""
    prefill_chunk: int | None = 256
    """Maximum prompt tokens of a step; None prefills a prompt in one step."""
    request_s: float = 0.0
    """Seconds that a request spends outside the engine (HTTP, tokenizing) before its first token, without delaying
    others."""


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of a simulation: requests, costs of a round, limits of the server, and acceptance of its drafts."""

    jobs: Sequence[Job]
    costs: StepCosts
    server: ServerShape
    survival: Survival
    """Survival curve of the drafter; its length is the maximum number of drafts of a round."""
    seed: int = 0
    lookups: Lookups | None = None
    """Prompt lookup drafts; only the policy adaptive uses them, as in a server."""
    marginals: Marginals | None = None
    """Chances by draft position and candidate rank of a block drafter. The policies adaptive and tree:N use them
    instead of the survival curve, and may verify trees."""

    @property
    def context(self) -> float:
        """Mean cached tokens of a row while it decodes: the prompt and half of the answer, averaged over the
        requests."""
        return statistics.fmean(job.prompt_tokens + job.answer_tokens / 2 for job in self.jobs)

    def run(self, policy: str, jobs: Sequence[Job] | None = None, concurrency: int | None = None) -> Outcome:
        """Simulates the server under this policy (rule for the number of drafts). `jobs`: requests to use instead of
        those of the case. `concurrency`: number of requests in flight; None for requests that arrive at their own
        times. Raises ConfigError for an invalid policy or request."""
        return Simulation(self, self.planner(policy), self.jobs if jobs is None else jobs, concurrency).run()

    def planner(self, policy: str) -> Planner:
        """Returns a new planner, which chooses the drafts of each round by this policy. Raises ConfigError for an
        invalid one."""
        chunk = self.server.prefill_chunk or max((job.prompt_tokens for job in self.jobs), default=1)
        return make_planner(policy, self.survival, self.costs, self.context, chunk, self.marginals is not None)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in the simulated server. Times ending in `_at` are seconds since the start."""

    job: Job
    arrived_at: float
    luck: random.Random = field(repr=False)
    """Random generator that decides acceptance, one per request."""
    admitted_at: float = 0.0
    """Time at which it got a batch row."""
    first_token_at: float = 0.0
    finished_at: float = 0.0
    num_prefilled: int = 0
    num_tokens: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of tokens) of each delivery to the client."""
    num_rounds: int = 0
    num_drafted_total: int = 0
    """Drafts over all its rounds."""
    num_accepted_total: int = 0
    """Accepted drafts over all its rounds."""

    @property
    def wait_s(self) -> float:
        """Seconds in the queue: from arrival to a batch row."""
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
        """Tokens still to generate."""
        return self.job.answer_tokens - self.num_tokens

    def add_tokens(self, count: int, now: float) -> None:
        """Delivers `count` tokens at time `now`, but not more than the answer still needs."""
        count = min(count, self.num_left)
        self.num_tokens += count
        self.first_token_at = self.first_token_at if self.chunks else now
        self.finished_at = now
        self.chunks.append((now, count))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a simulation: all requests with their times, and the seconds in which the server was busy."""

    requests: list[SimulatedRequest]
    """All requests, in the order of the jobs."""
    busy_s: float
    """Seconds in which the server was busy."""
    prefill_s: float
    """Seconds spent on prefill chunks."""
    row_seconds: float
    """Sum over rounds of seconds times occupied batch rows."""

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the simulation to the last token of all requests."""
        return max((each.finished_at for each in self.requests), default=0.0)

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.requests)


class Simulation:
    """Simulates how one server answers the requests `jobs`: its clock, queue and batch rows. `run` returns the
    result."""

    def __init__(self, case: Case, planner: Planner, jobs: Sequence[Job], concurrency: int | None = None) -> None:
        """`concurrency`: number of jobs in flight; their arrival times are then ignored. Raises ConfigError for
        impossible input."""
        if any(not 0 <= job.arrives_at < math.inf or job.prompt_tokens < 1 or job.answer_tokens < 1 for job in jobs):
            raise ConfigError(
                "every request needs an arrival time of 0 or later, and at least one token of prompt and answer"
            )
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
        # A block drafter, whose second draft costs hardly more than the first, knows its confidence at each slot
        # beforehand.
        self._is_block = case.costs.draft_s(1, 2, 1) < 1.5 * case.costs.draft_s(1, 1, 1)

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
        tokens_by_row = [(joining, 1)] if joining else []
        rows = self._running + ([joining] if joining and joining.job.answer_tokens > 1 else [])
        if rows and rows != [joining]:  # with no other row, a first token is sent before its first round
            if rows[-1] is joining:
                self._planner.join(plan, len(plan.rows), self._row(rows[-1]))
            tokens_by_row += self._round(rows, plan)
        self._busy_s += self._now - began
        for each, count in tokens_by_row:  # sent together, at the end of the step
            each.add_tokens(count, self._now + self._server.request_s)
        self._running = [each for each in rows if each.num_left]
        num_done = sum(each.num_left == 0 for each, _ in tokens_by_row)
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
        """Prefills one chunk of the first prompt in the queue; returns the request if it was the last chunk."""
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
        """Runs one decode round; returns the tokens of each row. The first token of a joining row is not in
        `num_tokens` yet."""
        has_confidence = not plan.whole_blocks and self._is_block
        asks = self._planner.num_candidates if self._is_block else 0
        drafts = [self._drafted(each, take, has_confidence, asks) for each, take in zip(rows, plan.drafts, strict=True)]
        counts = [take.count for take in plan.drafts if take.count and take.source != LOOKUP]
        chosen = self._planner.narrow(plan, [each.confidence for each in drafts], [each.candidates for each in drafts])
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
        stats.confidence_B = [each.confidence for each in drafts]
        stats.trees_B = [outcome for _, outcome in outcomes]
        self._planner.learn(plan, stats)
        spent_s = verify_s + draft_s + self._costs.host_s
        self._now += spent_s
        self._row_seconds += spent_s * len(rows)
        return [(each, count + 1) for each, count in zip(rows, accepted, strict=True)]

    def _drafted(self, each: SimulatedRequest, take: Take, has_confidence: bool, num_candidates: int) -> Drafted:
        if take.source == LOOKUP and self._lookups:
            return drafted(self._lookups.survival, each.luck, take.count, has_confidence=False)
        if self._marginals and num_candidates and take.count:
            return drafted_candidates(self._marginals, each.luck, take.count, num_candidates)
        return drafted(self._survival, each.luck, take.count, has_confidence)


@dataclass(slots=True)
class BestPlanner(FixedPlanner):
    """Chooses the number of drafts, the same for all rows, that gives the most tokens per second, from known acceptance
    and costs."""

    survival: Survival = ()
    round_s: Callable[[int, int], float] = field(default=lambda rows, count: 1.0)
    """Function (rows, drafts per row) -> seconds of a round."""
    _known: dict[int, int] = field(default_factory=dict)

    def choose(self, num_rows: int) -> int:
        """Returns the number of drafts per row that gives the most tokens per second in a round of `num_rows` rows; the
        smallest one if several are equally good."""
        if num_rows not in self._known:
            expected = list(itertools.accumulate((1.0, *self.survival)))
            gains = [tokens / self.round_s(num_rows, count) for count, tokens in enumerate(expected)]
            self._known[num_rows] = gains.index(max(gains))
        return self._known[num_rows]

    def _begin(self, num_rows: int) -> None:
        self.num_drafted = self.choose(num_rows)


class OffPlanner(AdaptivePlanner):
    """Plans rounds without drafts. Plans prefill chunks as the engine's adaptive planner does."""

    def offer(self, source: str, kind: RowKind, most: int, *, is_stepwise: bool = False) -> Offer:
        return Offer(source, ())


def make_planner(
    name: str, survival: Survival, costs: StepCosts, context: float, most_chunk: int, grows_trees: bool = False
) -> Planner:
    """Returns a new planner, which chooses the drafts of each round. `name`: its policy, one of off (no drafts), best
    (the number with the most tokens/s by `survival` and `costs`), adaptive (the engine's planner), a number of drafts,
    or tree:N (draft trees of N nodes). Raises ConfigError for another name, and for a number above the length of
    `survival`.

    - `survival`: shares of rounds whose first 1, 2, ... drafts are accepted.
    - `costs`: round costs, evaluated at `context` cached tokens per row.
    - `most_chunk`: maximum tokens of a prefill chunk.
    - `grows_trees`: True if the acceptance chances of a tree's branches are known; tree:N needs them."""
    if name == "off":
        return OffPlanner(PassCosts([(1, 1.0)]), most_chunk=most_chunk, adapts_chunks=costs.prefill_adapts)
    passes = PassCosts([(size, costs.verify_s(1, size, context) + costs.host_s) for size in MEASURED])
    if name == "adaptive":
        return AdaptivePlanner(
            passes, most_chunk=most_chunk, adapts_chunks=costs.prefill_adapts, grows_trees=grows_trees
        )
    if name.startswith("tree:"):
        if not grows_trees:
            raise ConfigError(
                f"--policy {name} needs to know how often other tokens than the likeliest stand: add --marginals"
            )
        return Speculation.of(name).planner(most_chunk)
    if name == "best":
        return BestPlanner(
            0, most_chunk, survival=survival, round_s=lambda rows, count: costs.round_s(rows, count, context)
        )
    if not (name.isascii() and name.isdecimal()):
        raise ConfigError(
            f"--policy {name!r} is not known: choose from off, best, adaptive, a number of drafts, or tree:N with "
            "--marginals"
        )
    if int(name) > len(survival):
        raise ConfigError(f"--policy {name} drafts more than the drafter can: at most {len(survival)}")
    return FixedPlanner(int(name), most_chunk)
