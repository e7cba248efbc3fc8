"""One thread owns the engine; the event loop hands it requests and reads what becomes of them.

Requests go in as commands through a queue, answers come back as one call of the event loop per engine step. Neither side
waits for the other: the engine sleeps only when it has nothing to do. An exception out of a step ends every request in flight
with EngineCrashed; the engine is then built anew and goes on with what waits.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from paceline.config import EngineConfig
from paceline.engine.engine import Chunk, Engine
from paceline.engine.grammar import Grammars
from paceline.engine.llm import LLM
from paceline.errors import PacelineError
from paceline.model.tokenizer import Tokenizer
from paceline.serve.failures import DeadlinePassed, EngineCrashed, NotServing, QueueFull, RequestFailed, RequestRefused
from paceline.serve.outbox import Addressed, Outbox
from paceline.serve.ticket import Event, Job, NoObserver, Observer, Ticket

State = Literal["loading", "ready", "restarting", "draining", "stopped", "failed"]
COMPILERS = 2
"""Grammars that are compiled at once: a large one takes seconds, which neither the engine nor other requests wait for."""
MAX_LOADS = 3
"""Tries to build an engine after a crash before the worker gives up."""
STEADY_SECONDS = 10.0
"""Weights that served for so long are used again after a crash; of an engine that fails sooner nothing is kept."""
log = logging.getLogger("paceline.serve")


@dataclass(frozen=True, slots=True)
class Served:
    """What the event loop may know of the engine; holds none of its memory."""

    model: str
    tokenizer: Tokenizer
    config: EngineConfig
    max_len: int
    """Tokens of prompt and answer together."""
    num_rows: int
    """Answers made at once."""
    vocab_size: int
    grammars: Grammars

    @classmethod
    def of(cls, llm: LLM) -> Served:
        cache, engine = llm.target.cache, llm.engine
        sizes = cache.max_len, cache.num_rows, llm.target.vocab_size
        return cls(llm.config.model, llm.tokenizer, llm.config, *sizes, engine.grammars)


@dataclass(slots=True)
class _Live:
    """A request inside the engine."""

    ticket: Ticket
    index: int
    num_accepted: int = 0
    num_logprobs: int = 0
    has_begun: bool = False
    """Its first token is on its way."""


class EngineWorker:
    """The engine's thread and the way in and out of it. All public methods belong to the event loop."""

    def __init__(
        self,
        factory: Callable[[], LLM],
        *,
        max_queue: int = 256,
        deadline_s: float | None = None,
        observer: Observer | None = None,
        warm_up: Callable[[LLM], None] | None = None,
        stream_interval_s: float = 0.0,
    ) -> None:
        """`factory` builds the engine, in the engine's thread, at the start and when it fails soon after; `warm_up` is called
        with each engine before its first request. Tokens may be held back for `stream_interval_s`, as `Outbox` says."""
        self.state: State = "loading"
        self.served: Served | None = None
        self.failure: Exception | None = None
        self.observer = observer or NoObserver()
        self.max_queue, self.deadline_s = max_queue, deadline_s
        self._factory, self._warm_up = factory, warm_up
        self._compiling = ThreadPoolExecutor(COMPILERS, "paceline-grammar")
        self._open: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._mean_s = 1.0
        self._commands: deque[Callable[[LLM], None]] = deque()
        self._condition = threading.Condition()
        self._is_stopping = False
        self._outbox = Outbox(partial(self._tell, self._deliver), stream_interval_s)
        self._live: dict[int, _Live] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # The event loop's side

    def start(self) -> None:
        """Begin to load the engine; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    async def loaded(self) -> Served:
        """Wait for the engine. Raises what kept it from loading."""
        await self._settled.wait()
        if self.failure:
            raise self.failure
        assert self.served is not None
        return self.served

    def serving(self) -> Served:
        """The engine's facts. Raises NotServing unless requests are taken now."""
        if self.state not in ("ready", "restarting") or self.served is None:
            raise NotServing(self.state)
        return self.served

    @property
    def num_open(self) -> int:
        """Answers that wait or are under way."""
        return sum(ticket.num_left for ticket in self._open)

    async def compiled(self, jobs: list[Job]) -> list[Job]:
        """The jobs of one API request with their grammar, if they have one. Raises RequestRefused when it is none."""
        spec = jobs[0].params.grammar
        if spec is None:
            return jobs
        compile_one = self.serving().grammars.compile
        try:
            grammars = await self._loop.run_in_executor(self._compiling, lambda: [compile_one(spec) for _ in jobs])
        except PacelineError as error:
            self.observer.refused("invalid")
            raise RequestRefused.of(error) from error
        return [replace(job, constraint=grammar) for job, grammar in zip(jobs, grammars, strict=True)]

    def submit(self, jobs: list[Job], tag: str | None = None) -> Ticket:
        """Queue the jobs of one API request, all or none. Raises QueueFull or NotServing."""
        num_rows, num_open = self.serving().num_rows, self.num_open
        if num_open + len(jobs) > num_rows + self.max_queue:
            self.observer.refused("queue_full")
            raise QueueFull(retry_after_s=max(1, round(self._mean_s * (num_open - num_rows) / num_rows)))
        deadline = time.perf_counter() + self.deadline_s if self.deadline_s else None
        ticket = Ticket(jobs, self.abort, tag=tag, deadline=deadline)
        self._open.add(ticket)
        self._idle.clear()
        self._post(partial(self._add, ticket))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Drop what is unfinished of a ticket."""
        self._post(partial(self._abort, ticket))

    async def call(self, function: Callable[[LLM], Any]) -> Any:
        """Run a function in the engine's thread between two steps; returns its result, raises its exception."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._post(partial(_answer, self._loop, future, function))
        return await future

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what is in flight finish for at most this long, abort the rest, end the thread."""
        if self.state != "failed":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("%d answers were not finished within %g s and are cut off", self.num_open, seconds)
            for ticket in list(self._open):
                self._fail(ticket, NotServing("draining"))
                self.abort(ticket)
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        while self._thread.is_alive():
            await asyncio.sleep(0.005)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self.state = "stopped"

    def _post(self, command: Callable[[LLM], None]) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def _deliver(self, events: list[Addressed]) -> None:
        for ticket, event in events:
            if ticket not in self._open:
                continue
            if isinstance(event, Exception):
                self._fail(ticket, event)
                continue
            ticket.put(event)
            if event.finish_reason is not None:
                self._mean_s += 0.1 * (time.perf_counter() - event.sequence.timings.arrival_s - self._mean_s)
            if ticket.num_left == 0:
                self._closed(ticket)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.fail(error)
        self._closed(ticket)

    def _closed(self, ticket: Ticket) -> None:
        self._open.discard(ticket)
        if not self._open:
            self._idle.set()

    def _settle(self, state: State, served: Served | None, failure: Exception | None) -> None:
        self.served, self.failure = served or self.served, failure
        if self.state in ("loading", "ready", "restarting"):
            self.state = state
        if state == "failed":
            self.state = state
            for ticket in list(self._open):
                self._fail(ticket, NotServing("failed"))
        if state != "restarting":
            self._settled.set()

    # The thread's side

    def _run(self) -> None:
        steady: LLM | None = None
        grammars: Grammars | None = None
        failures = 0
        while not self._is_stopping:
            try:
                llm = _renewed(steady) if steady else self._factory()
                grammars = llm.engine.grammars = grammars or llm.engine.grammars  # has read the vocabulary
                if self._warm_up:
                    self._warm_up(llm)
                gc.collect()
                gc.freeze()  # a full collection would walk through all that was imported, in the middle of a step
            except Exception as error:  # noqa: BLE001  (whatever keeps a model from loading is for the owner to see)
                steady, failures = None, failures + 1
                if self.served is None or failures == MAX_LOADS:
                    self._tell(self._settle, "failed", None, error)
                    return
                time.sleep(0.2 * failures)
                continue
            steady, failures = None, 0
            self._tell(self._settle, "ready", Served.of(llm), None)
            began = time.monotonic()
            try:
                self._serve(llm)
            except BaseException:
                log.exception("the engine failed and is built anew")
                self._crash(llm)
                steady = llm if time.monotonic() - began >= STEADY_SECONDS else None
            del llm
            gc.unfreeze()
            gc.collect()

    def _serve(self, llm: LLM) -> None:
        while True:
            if not self._commands and not llm.engine.has_work:
                with self._condition:
                    while not self._commands:
                        if self._is_stopping:
                            return
                        self._condition.wait()
            if self._commands:
                self._outbox.flush()
            while self._commands:
                self._commands.popleft()(llm)
            if llm.engine.has_work:
                started = time.perf_counter()
                chunks = llm.engine.step()
                now = time.perf_counter()
                self._watch(self.observer.step, llm.engine, now - started)
                if chunks:
                    self._hand_over(chunks, now, now - started, llm.engine)
            if self._deadlines:
                self._expire(llm)

    def _add(self, ticket: Ticket, llm: LLM) -> None:
        try:
            for index, job in enumerate(ticket.jobs):
                request_id = llm.engine.add(job.prompt_ids, job.params, job.constraint)
                ticket.request_ids.append(request_id)
                self._live[request_id] = _Live(ticket, index)
        except PacelineError as error:
            self._watch(self.observer.refused, "invalid")
            self._drop(ticket, llm, RequestRefused.of(error))
            return
        except Exception:
            log.exception("a request could not be queued")
            self._drop(ticket, llm, RequestFailed())
            llm.engine.check_integrity()  # an engine that was harmed is built anew
            return
        if ticket.deadline is not None:
            heapq.heappush(self._deadlines, (ticket.deadline, next(self._order), ticket))

    def _abort(self, ticket: Ticket, llm: LLM) -> None:
        self._drop(ticket, llm, NotServing("aborted"))

    def _drop(self, ticket: Ticket, llm: LLM, error: Exception) -> None:
        for request_id in ticket.request_ids:
            if self._live.pop(request_id, None):
                seq = llm.engine.abort(request_id)
                if seq is not None:
                    self._watch(self.observer.finished, seq, "abort", ticket.tag)
        self._outbox.send([(ticket, error)])

    def _expire(self, llm: LLM) -> None:
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if any(request_id in self._live for request_id in ticket.request_ids):
                self._drop(ticket, llm, DeadlinePassed(self.deadline_s or 0.0))
        if not self._live:
            self._deadlines.clear()

    def _hand_over(self, chunks: list[Chunk], now: float, step_s: float, engine: Engine) -> None:
        events: list[Addressed] = []
        is_urgent = bool(engine.scheduler.prefilling)  # the next step may take far longer
        for chunk in chunks:
            seq = chunk.sequence
            live = self._live.get(seq.request_id)
            if live is None:
                continue
            num_drafted = min(seq.num_accepted - live.num_accepted, len(chunk.token_ids))
            logprobs = seq.logprobs[live.num_logprobs :] if seq.params.logprobs is not None else []
            live.num_accepted, live.num_logprobs = seq.num_accepted, live.num_logprobs + len(logprobs)
            event = Event(live.index, chunk.token_ids, chunk.text, num_drafted, logprobs, chunk.finish_reason, seq)
            events.append((live.ticket, event))
            is_urgent = is_urgent or chunk.finish_reason is not None or not live.has_begun
            live.has_begun = True
        self._outbox.put(events, now, step_s, is_urgent=is_urgent)
        for chunk in chunks:
            seq = chunk.sequence
            self._watch(self.observer.chunk, seq, len(chunk.token_ids), now)
            if chunk.finish_reason is not None and (live := self._live.pop(seq.request_id, None)):
                self._watch(self.observer.finished, seq, chunk.finish_reason, live.ticket.tag)

    def _crash(self, llm: LLM) -> None:
        """What had begun is lost; requests of which nothing had begun go to the next engine, in their order."""
        scheduler = llm.engine.scheduler
        waiting = {seq.request_id for seq in scheduler.waiting}
        tickets = list(dict.fromkeys(live.ticket for live in self._live.values()))
        kept = [ticket for ticket in tickets if ticket.num_left == len(ticket.jobs) and waiting.issuperset(ticket.request_ids)]
        for seq in (*scheduler.waiting, *scheduler.prefilling, *scheduler.running):
            if (live := self._live.get(seq.request_id)) and live.ticket not in kept:
                self._watch(self.observer.finished, seq, "error", live.ticket.tag)
        self._live.clear()
        self._deadlines.clear()
        for ticket in reversed(kept):
            ticket.request_ids.clear()
            self._commands.appendleft(partial(self._add, ticket))
        self._watch(self.observer.crashed)
        self._tell(self._settle, "restarting", None, None)
        self._outbox.send([(ticket, EngineCrashed()) for ticket in tickets if ticket not in kept])

    def _watch(self, call: Callable[..., None], *arguments: Any) -> None:
        """Whoever watches may fail without harm to the requests."""
        try:
            call(*arguments)
        except Exception:
            log.exception("an observer failed")

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the event loop; nothing when it has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


def _renewed(llm: LLM) -> LLM:
    """The same weights with an empty cache, a new drafter and a new engine."""
    cache = llm.target.cache
    llm.target.allocate_cache(cache.num_rows, cache.max_len)
    llm.use_drafter(llm.config.drafter, num_drafted=llm.config.num_drafted)
    return llm


def _answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], function: Callable[[LLM], Any], llm: LLM) -> None:
    def settle(result: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        loop.call_soon_threadsafe(settle, function(llm), None)
    except Exception as error:  # noqa: BLE001  (it is raised again where `call` was awaited)
        loop.call_soon_threadsafe(settle, None, error)
