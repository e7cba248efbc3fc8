"""Runs the engine in its own thread and connects it to the event loop.

Requests are passed as commands through a queue (`Inbox`); events of several steps are batched into one call of the
event loop (`Outbox`). Neither side waits for the other: the engine sleeps only without work. A failed request gets its
own error. An exception of a step ends all running answers with engine_crashed; the engine is then rebuilt with the same
drafters, and continues with the waiting requests.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import PacelineError
from paceline.serve.admin.metrics import Metrics
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.engine import ModelInfo, marks_of
from paceline.serve.worker.inbox import Inbox
from paceline.serve.worker.ticket import Addressed, Event, Job, Outbox, Ticket
from paceline.types import Route

if TYPE_CHECKING:
    from paceline.engine.engine import Chunk, Engine
    from paceline.engine.llm import LLM

State = Literal["loading", "ready", "restarting", "draining", "stopped", "failed"]
COMPILERS = 2
"""Threads that compile grammars; a large grammar takes seconds, which must not delay other requests."""
MAX_TAG = 128
"""Longest tag of a request, in characters; longer ones are cut."""
MAX_LOADS = 3
"""Tries to rebuild the engine after a crash before the worker gives up."""
STEADY_SECONDS = 10.0
"""If the engine crashes after more seconds than this, it is rebuilt with the loaded weights; if earlier, the model is
reloaded."""
log = logging.getLogger("paceline.serve")


@dataclass(slots=True)
class _Live:
    """A request in the engine."""

    ticket: Ticket
    index: int
    num_tokens: int = 0
    """Tokens delivered so far."""


class EngineWorker:
    """Runs the engine in a thread of its own, and queues requests for it. Call its public methods from the event
    loop."""

    def __init__(
        self,
        factory: Callable[[], LLM],
        config: ServeConfig,
        metrics: Metrics,
        *,
        warm_up: Callable[[LLM], None] | None = None,
    ) -> None:
        """`factory` loads the model in the engine's thread, at the start and after an early crash. `warm_up` is called
        with each new engine."""
        self.config, self.metrics = config, metrics
        self.state: State = "loading"
        self.info: ModelInfo | None = None
        self.failure: Exception | None = None
        self._factory, self._warm_up = factory, warm_up
        self._compiling = ThreadPoolExecutor(COMPILERS, "paceline-grammar")
        self._open: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._has_started = asyncio.Event()
        """Set when the model is loaded, or failed to load."""
        self._mean_s = 1.0
        self._model: LLM | None = None
        """For the engine's thread only, like all attributes below."""
        self._own_members: Any = None
        """Marks of the drafters that the model was loaded with; holds weak references only."""
        self._grammars: Any = None
        self._inbox = Inbox()
        self._outbox = Outbox(partial(self._on_loop, self._deliver), 1e-3 * config.stream_interval_ms)
        self._live: dict[int, _Live] = {}
        """Request id -> request, ordered by deadline, because all requests have the same time limit."""
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # Methods for the event loop

    def start(self) -> None:
        """Start the thread, which loads the model; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    async def loaded(self) -> None:
        """Wait until the model is loaded. Raises the error that prevented it, or ApiError if the worker was stopped
        before."""
        await self._has_started.wait()
        if self.failure:
            raise self.failure
        if self.info is None:
            raise ApiError.known("stopped")

    def serving(self) -> ModelInfo:
        """Return the model's properties. Raises ApiError unless the server accepts requests."""
        if self.state not in ("ready", "restarting") or self.info is None:
            raise ApiError.known(self.state)
        return self.info

    @property
    def num_open(self) -> int:
        """Number of answers that are waiting or running."""
        return sum(ticket.num_left for ticket in self._open)

    async def compiled(self, jobs: list[Job]) -> list[Job]:
        """Compile the grammar of one API request's jobs, in a thread; returns copies of the jobs with it. Jobs without
        a grammar are returned unchanged. Raises RequestRefused for an invalid grammar."""
        spec = jobs[0].params.grammar
        if spec is None:
            return jobs
        compile_one = self.serving().compile
        try:
            grammars = await self._loop.run_in_executor(self._compiling, lambda: [compile_one(spec) for _ in jobs])
        except PacelineError as error:
            raise RequestRefused.of(error, jobs[0].grammar_field) from error
        return [replace(job, constraint=grammar) for job, grammar in zip(jobs, grammars, strict=True)]

    def submit(self, jobs: list[Job], tag: str | None = None, route: Route | None = None) -> Ticket:
        """Queue all jobs of one API request; returns a ticket, which delivers their events. `tag`: the client's label,
        for traces; `route`: selects the drafter. Raises ApiError if the queue has too little room for all jobs, or the
        server accepts no requests."""
        num_rows, num_open = self.serving().num_rows, self.num_open
        if num_open + len(jobs) > num_rows + self.config.max_queue:
            raise ApiError.known("queue_full", seconds=max(1, round(self._mean_s * (num_open - num_rows) / num_rows)))
        deadline = time.perf_counter() + (self.config.deadline or math.inf)
        ticket = Ticket(jobs, self.abort, tag=tag[:MAX_TAG] if tag else None, route=route, deadline=deadline)
        self._open.add(ticket)
        self._idle.clear()
        self._inbox.post(partial(self._add, ticket))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Abort the unfinished answers of a ticket."""
        self._inbox.post(partial(self._drop, ticket, ApiError.known("aborted")))

    async def call(self, function: Callable[[LLM], Any]) -> Any:
        """Run `function(model)` in the engine's thread between two steps; returns its result. Raises the function's
        error, or ApiError if the thread ends first."""

        def run() -> Any:
            assert self._model is not None
            return function(self._model)

        return await asyncio.wrap_future(self._inbox.call(run))

    async def drain(self, seconds: float) -> None:
        """Reject new requests, let running ones finish for at most `seconds`, abort the rest, and end the thread."""
        if self.state != "failed":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("%d answers were not finished within %g s and are cut off", self.num_open, seconds)
            for ticket in list(self._open):
                self._fail(ticket, ApiError.known("draining"))
                self.abort(ticket)
        self._inbox.stop()
        while self._thread.is_alive():
            await asyncio.sleep(0.005)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self.state = "stopped"

    def _deliver(self, events: list[Addressed]) -> None:
        for ticket, event in events:
            if ticket not in self._open:
                continue
            if isinstance(event, Exception):
                self._fail(ticket, event)
                continue
            ticket.put(event)
            if event.chunk.finish_reason is not None:
                self._mean_s += 0.1 * (time.perf_counter() - event.chunk.sequence.timings.arrival_s - self._mean_s)
            if ticket.num_left == 0:
                self._closed(ticket)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.fail(error)
        self._closed(ticket)

    def _closed(self, ticket: Ticket) -> None:
        self._open.discard(ticket)
        if not self._open:
            self._idle.set()

    def _set_state(self, state: State, info: ModelInfo | None = None, failure: Exception | None = None) -> None:
        self.info, self.failure = info or self.info, failure
        if self.state in ("loading", "ready", "restarting"):
            self.state = state
        if state == "failed":
            self.state = state
            for ticket in list(self._open):
                self._fail(ticket, ApiError.known("failed"))
        if state != "restarting":
            self._has_started.set()

    # Methods for the engine's thread

    def _run(self) -> None:
        """Main function of the thread. However it ends, pending calls fail and waiting tasks wake up."""
        failure: Exception | None = None
        try:
            failure = self._serve_on()
        except BaseException as error:
            log.exception("the engine's thread failed")
            failure = error if isinstance(error, Exception) else RuntimeError(f"the engine's thread ended: {error!r}")
        finally:
            self._inbox.close("failed" if failure else "stopped")
            if failure:
                self._on_loop(self._set_state, "failed", None, failure)
            else:
                self._on_loop(self._has_started.set)

    def _serve_on(self) -> Exception | None:
        """Load the model and serve, again after each crash; returns the error that ended it, if not stopped."""
        steady: LLM | None = None
        swapped: Any = None
        failures = 0
        while not self._inbox.is_stopping:
            try:
                model = self._load(steady, swapped)
            except Exception as error:
                steady, failures = None, failures + 1
                if self.info is None or failures == MAX_LOADS:
                    return error
                log.exception("the engine cannot be built anew, try %d of %d", failures, MAX_LOADS)
                if failures == MAX_LOADS - 1:
                    swapped = None  # the last try uses the original drafters
                time.sleep(0.2 * failures)
                continue
            steady, failures, self._model = None, 0, model
            self._on_loop(self._set_state, "ready", ModelInfo.of(model))
            began = time.monotonic()
            try:
                self._serve(model)
            except BaseException:
                log.exception("the engine failed and is built anew")
                self._crash(model)
                swapped = None if marks_of(model) == self._own_members else model.members
                steady = model if time.monotonic() - began >= STEADY_SECONDS else None
            del model
            self._model = None
            gc.unfreeze()
            gc.collect()
        return None

    def _load(self, steady: LLM | None, swapped: Any) -> LLM:
        """Return a warm model: `steady` with a new engine, or a newly loaded one with the drafters `swapped`."""
        if steady:
            steady.renew()
        model = steady or self._factory()
        self._grammars = model.engine.grammars = self._grammars or model.engine.grammars
        if not steady:
            self._own_members = marks_of(model)
            if swapped is not None:
                model.use_members(swapped)
        if self._warm_up:
            self._warm_up(model)
        gc.collect()
        gc.freeze()  # so that no full collection traverses all imported objects during a step
        return model

    def _serve(self, model: LLM) -> None:
        """Run commands and engine steps until the inbox is stopped."""
        engine, resumed = model.engine, time.perf_counter()
        while True:
            if not self._inbox and not engine.has_work:
                if not self._inbox.wait():
                    return
                resumed = time.perf_counter()
            if self._inbox:
                self._outbox.flush()
            while self._inbox:
                self._inbox.take()()
                engine = model.engine
            if engine.has_work:
                started = time.perf_counter()
                chunks = self._step(engine)
                now = time.perf_counter()
                self._watch(self.metrics.step, engine, now - resumed)
                resumed = now
                if chunks:
                    self._hand_over(chunks, now, now - started, is_prefilling=bool(engine.scheduler.prefilling))
            while self._live and (ticket := next(iter(self._live.values())).ticket).deadline <= time.perf_counter():
                self._drop(ticket, ApiError.known("deadline_exceeded", seconds=self.config.deadline))

    def _step(self, engine: Engine) -> list[Chunk]:
        """Runs one engine step. The endpoint of agents (`loop/rl/endpoint.py`) overrides it."""
        return engine.step()

    @property
    def _engine(self) -> Engine:
        assert self._model is not None
        return self._model.engine

    def _add(self, ticket: Ticket) -> None:
        """Add a ticket's jobs to the engine; if one is rejected, drop all of them."""
        try:
            for index, job in enumerate(ticket.jobs):
                request_id = self._engine.add(job.prompt_ids, job.params, job.constraint, ticket.route)
                ticket.request_ids.append(request_id)
                self._live[request_id] = _Live(ticket, index)
        except PacelineError as error:
            self._drop(ticket, RequestRefused.of(error))
        except Exception:
            log.exception("a request could not be queued")
            self._drop(ticket, ApiError.known("request_failed"))
            self._engine.check_integrity()  # raises for a corrupt engine, which is then rebuilt

    def _drop(self, ticket: Ticket, error: Exception) -> None:
        """Abort a ticket's unfinished answers with an error."""
        for request_id in ticket.request_ids:
            if (live := self._live.get(request_id)) and live.ticket is ticket:  # a new engine may reuse request ids
                del self._live[request_id]
                seq = self._engine.abort(request_id)
                if seq is not None:
                    self._watch(self.metrics.finished, seq, "abort", ticket.tag)
        self._outbox.send([(ticket, error)])

    def _hand_over(self, chunks: list[Chunk], now: float, step_s: float, *, is_prefilling: bool) -> None:
        """Pass a step's new tokens to the event loop and count them."""
        events: list[Addressed] = []
        failed: list[tuple[Ticket, Exception]] = []
        is_urgent = is_prefilling  # a prefill step may take far longer than this one
        for chunk in chunks:
            seq, num_tokens, reason = chunk.sequence, len(chunk.token_ids), chunk.finish_reason
            live = self._live.get(seq.request_id)
            if live is None:
                continue
            if reason == "error":
                log.error("a request failed: %s", seq.error)
                failed.append((live.ticket, ApiError.failed(seq.error)))
                continue
            before = live.num_tokens
            live.num_tokens = before + num_tokens
            logprobs = seq.logprobs[before : live.num_tokens] if seq.params.logprobs is not None else []
            events.append((live.ticket, Event(live.index, chunk, num_tokens - 1, logprobs)))
            is_urgent = is_urgent or not before or reason is not None
        self._outbox.put(events, now, step_s, is_urgent=is_urgent)
        for chunk in chunks:
            seq = chunk.sequence
            if (live := self._live.get(seq.request_id)) is None:
                continue  # a trial request
            if chunk.finish_reason != "error":
                self._watch(self.metrics.chunk, seq, len(chunk.token_ids), now)
            if chunk.finish_reason is not None:
                del self._live[seq.request_id]
                self._watch(self.metrics.finished, seq, chunk.finish_reason, live.ticket.tag)
        for ticket, error in failed:
            self._drop(ticket, error)

    def _crash(self, model: LLM) -> None:
        """Fail all requests that have started; queue those that have not for the next engine, in order."""
        requests = model.engine.scheduler
        waiting = {seq.request_id for seq in requests.waiting}
        tickets = list(dict.fromkeys(live.ticket for live in self._live.values()))
        unstarted = [one for one in tickets if one.num_left == len(one.jobs) and waiting.issuperset(one.request_ids)]
        for seq in (*requests.waiting, *requests.prefilling, *requests.running):
            if (live := self._live.get(seq.request_id)) and live.ticket not in unstarted:
                self._watch(self.metrics.finished, seq, "error", live.ticket.tag)
        self._live.clear()
        for ticket in reversed(unstarted):
            ticket.request_ids.clear()
            self._inbox.post_first(partial(self._add, ticket))
        self._watch(self.metrics.crashed)
        self._on_loop(self._set_state, "restarting")
        self._outbox.send([(ticket, ApiError.known("engine_crashed")) for ticket in tickets if ticket not in unstarted])

    def _watch(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the metrics; errors are only logged."""
        try:
            call(*arguments)
        except Exception:
            log.exception("the metrics failed")

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)
