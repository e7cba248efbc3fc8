"""One thread owns the engine; the event loop hands it requests and gets their answers.

Requests go in as commands through a queue, answers come back as one call of the event loop per engine step. Neither side
waits for the other: the engine sleeps only when it has nothing to do. A request that fails alone gets an error of its own. An
exception out of a step ends every answer that has begun as engine_crashed; the engine is then built anew, with the drafter
that it had, and goes on with the requests that wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from paceline.errors import PacelineError
from paceline.serve.admin.metrics import Metrics
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.engine import Engine, Model, ModelInfo
from paceline.serve.worker.inbox import Inbox
from paceline.serve.worker.ticket import Addressed, Event, Job, Outbox, Ticket
from paceline.types import Route

if TYPE_CHECKING:
    from paceline.engine.engine import Chunk

M = TypeVar("M", bound=Model)

State = Literal["loading", "ready", "restarting", "draining", "stopped", "failed"]
COMPILERS = 2
"""Grammars that are compiled at once: a large one takes seconds, which neither the engine nor other requests wait for."""
MAX_TAG = 128
"""Characters of a request's tag that are kept."""
MAX_LOADS = 3
"""Tries to build an engine after a crash before the worker gives up."""
STEADY_SECONDS = 10.0
"""Weights that served for so long are used again after a crash; of an engine that fails sooner nothing is kept."""
log = logging.getLogger("paceline.serve")


def _marks(model: Model) -> dict[str, Any]:
    """Equal as long as the model's drafters are the same."""
    return {name: (weakref.ref(member.drafter), member.is_open) for name, member in model.members.items()}


@dataclass(slots=True)
class _Live:
    """A request inside the engine, and what of it was handed over."""

    ticket: Ticket
    index: int
    num_tokens: int = 0


class EngineWorker(Generic[M]):
    """The engine's thread and the way in and out of it. All public methods belong to the event loop."""

    def __init__(
        self,
        factory: Callable[[], M],
        config: ServeConfig,
        metrics: Metrics,
        *,
        warm_up: Callable[[M], None] | None = None,
    ) -> None:
        """`factory` loads the model, in the engine's thread, at the start and when its engine fails soon after; `warm_up` is
        called with each engine before its first request."""
        self.config, self.metrics = config, metrics
        self.state: State = "loading"
        self.info: ModelInfo | None = None
        self.failure: Exception | None = None
        self._factory, self._warm_up = factory, warm_up
        self._compiling = ThreadPoolExecutor(COMPILERS, "paceline-grammar")
        self._open: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._mean_s = 1.0
        self._model: M | None = None
        """For the engine's thread only, as all below."""
        self._own_members: Any = None
        """Which drafters the model was loaded with; keeps none of them in memory."""
        self._grammars: Any = None
        self._inbox = Inbox()
        self._outbox = Outbox(partial(self._tell, self._deliver), 1e-3 * config.stream_interval_ms)
        self._live: dict[int, _Live] = {}
        """By the engine's id, the one with the earliest deadline first: all requests get the same time."""
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    # The event loop's side

    def start(self) -> None:
        """Begin to load the engine; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    async def loaded(self) -> None:
        """Wait for the model. Raises what kept it from loading."""
        await self._settled.wait()
        if self.failure:
            raise self.failure
        if self.info is None:
            raise ApiError.known("stopped")

    def serving(self) -> ModelInfo:
        """The model. Raises ApiError unless requests are taken now."""
        if self.state not in ("ready", "restarting") or self.info is None:
            raise ApiError.known(self.state)
        return self.info

    @property
    def num_open(self) -> int:
        """Answers that wait or are under way."""
        return sum(ticket.num_left for ticket in self._open)

    async def compiled(self, jobs: list[Job]) -> list[Job]:
        """The jobs of one API request with their grammar, if they have one. Raises RequestRefused when it is none."""
        spec = jobs[0].params.grammar
        if spec is None:
            return jobs
        compile_one = self.serving().compile
        try:
            grammars = await self._loop.run_in_executor(self._compiling, lambda: [compile_one(spec) for _ in jobs])
        except PacelineError as error:
            self.metrics.refused("invalid")
            raise RequestRefused.of(error, jobs[0].grammar_field) from error
        return [replace(job, constraint=grammar) for job, grammar in zip(jobs, grammars, strict=True)]

    def submit(self, jobs: list[Job], tag: str | None = None, route: Route | None = None) -> Ticket:
        """Queue the jobs of one API request, all or none; `route` says whose drafts they get. Raises ApiError."""
        num_rows, num_open = self.serving().num_rows, self.num_open
        if num_open + len(jobs) > num_rows + self.config.max_queue:
            self.metrics.refused("queue_full")
            raise ApiError.known("queue_full", seconds=max(1, round(self._mean_s * (num_open - num_rows) / num_rows)))
        deadline = time.perf_counter() + (self.config.deadline or math.inf)
        ticket = Ticket(jobs, self.abort, tag=tag[:MAX_TAG] if tag else None, route=route, deadline=deadline)
        self._open.add(ticket)
        self._idle.clear()
        self._inbox.post(partial(self._add, ticket))
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Drop what is unfinished of a ticket."""
        self._inbox.post(partial(self._drop, ticket, ApiError.known("aborted")))

    async def call(self, function: Callable[[M], Any]) -> Any:
        """Run a function in the engine's thread between two steps; returns its result, raises its exception.

        Raises ApiError when the thread ends before it comes to it."""

        def run() -> Any:
            assert self._model is not None
            return function(self._model)

        return await asyncio.wrap_future(self._inbox.call(run))

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what is in flight finish for at most this long, abort the rest, end the thread."""
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

    def _settle(self, state: State, info: ModelInfo | None = None, failure: Exception | None = None) -> None:
        self.info, self.failure = info or self.info, failure
        if self.state in ("loading", "ready", "restarting"):
            self.state = state
        if state == "failed":
            self.state = state
            for ticket in list(self._open):
                self._fail(ticket, ApiError.known("failed"))
        if state != "restarting":
            self._settled.set()

    # The thread's side

    def _run(self) -> None:
        """Whatever ends the thread, nobody is left waiting for it."""
        failure: Exception | None = None
        try:
            failure = self._serve_on()
        except BaseException as error:
            log.exception("the engine's thread failed")
            failure = error if isinstance(error, Exception) else RuntimeError(f"the engine's thread ended: {error!r}")
        finally:
            self._inbox.close("failed" if failure else "stopped")
            if failure:
                self._tell(self._settle, "failed", None, failure)
            else:
                self._tell(self._settled.set)

    def _serve_on(self) -> Exception | None:
        """Load and serve, again after each crash, until the inbox is stopped; returns what keeps it from going on."""
        steady: M | None = None
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
                    swapped = None  # the last try is made with the drafter from the start
                time.sleep(0.2 * failures)
                continue
            steady, failures, self._model = None, 0, model
            self._tell(self._settle, "ready", ModelInfo.of(model))
            began = time.monotonic()
            try:
                self._serve(model)
            except BaseException:
                log.exception("the engine failed and is built anew")
                self._crash(model)
                swapped = None if _marks(model) == self._own_members else model.members
                steady = model if time.monotonic() - began >= STEADY_SECONDS else None
            del model
            self._model = None
            gc.unfreeze()
            gc.collect()
        return None

    def _load(self, steady: M | None, swapped: Any) -> M:
        """A model that is ready to serve: `steady` with a new engine, else a new one, with the drafters that were put in."""
        if steady:
            steady.renew()
        model = steady or self._factory()
        self._grammars = model.engine.grammars = self._grammars or model.engine.grammars
        if not steady:
            self._own_members = _marks(model)
            if swapped is not None:
                model.use_members(swapped)
        if self._warm_up:
            self._warm_up(model)
        gc.collect()
        gc.freeze()  # a full collection would walk through all that was imported, in the middle of a step
        return model

    def _serve(self, model: M) -> None:
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
        return engine.step()

    @property
    def _engine(self) -> Engine:
        assert self._model is not None
        return self._model.engine

    def _add(self, ticket: Ticket) -> None:
        try:
            for index, job in enumerate(ticket.jobs):
                request_id = self._engine.add(job.prompt_ids, job.params, job.constraint, ticket.route)
                ticket.request_ids.append(request_id)
                self._live[request_id] = _Live(ticket, index)
        except PacelineError as error:
            self._watch(self.metrics.refused, "invalid")
            self._drop(ticket, RequestRefused.of(error))
        except Exception:
            log.exception("a request could not be queued")
            self._drop(ticket, ApiError.known("request_failed"))
            self._engine.check_integrity()  # an engine that was harmed is built anew

    def _drop(self, ticket: Ticket, error: Exception) -> None:
        """End what is unfinished of a ticket; nothing when all of it is done."""
        for request_id in ticket.request_ids:
            if (live := self._live.get(request_id)) and live.ticket is ticket:  # a new engine's numbers may begin anew
                del self._live[request_id]
                seq = self._engine.abort(request_id)
                if seq is not None:
                    self._watch(self.metrics.finished, seq, "abort", ticket.tag)
        self._outbox.send([(ticket, error)])

    def _hand_over(self, chunks: list[Chunk], now: float, step_s: float, *, is_prefilling: bool) -> None:
        events: list[Addressed] = []
        failed: list[tuple[Ticket, Exception]] = []
        is_urgent = is_prefilling  # the next step may take far longer
        for chunk in chunks:
            seq, num_tokens, reason = chunk.sequence, len(chunk.token_ids), chunk.finish_reason
            live = self._live.get(seq.request_id)
            if live is None:
                continue
            if reason == "error":
                log.error("a request failed: %s", seq.error)
                failed.append((live.ticket, ApiError.failed(seq.error)))
                continue
            # The first chunk is the prompt's own token, whatever the round behind it has already brought to the sequence.
            is_first, before = not live.num_tokens, live.num_tokens
            num_accepted = min(seq.rounds[-1].num_accepted, num_tokens) if seq.rounds and not is_first else 0
            live.num_tokens = before + num_tokens
            logprobs = seq.logprobs[before : live.num_tokens] if seq.params.logprobs is not None else []
            events.append((live.ticket, Event(live.index, chunk, num_accepted, logprobs)))
            is_urgent = is_urgent or is_first or reason is not None
        self._outbox.put(events, now, step_s, is_urgent=is_urgent)
        for chunk in chunks:
            seq = chunk.sequence
            if (live := self._live.get(seq.request_id)) is None:
                continue  # no client's
            if chunk.finish_reason != "error":
                self._watch(self.metrics.chunk, seq, len(chunk.token_ids), now)
            if chunk.finish_reason is not None:
                del self._live[seq.request_id]
                self._watch(self.metrics.finished, seq, chunk.finish_reason, live.ticket.tag)
        for ticket, error in failed:
            self._drop(ticket, error)

    def _crash(self, model: M) -> None:
        """What had begun is lost; requests of which nothing had begun go to the next engine, in their order."""
        requests = model.engine.scheduler
        waiting = {seq.request_id for seq in requests.waiting}
        tickets = list(dict.fromkeys(live.ticket for live in self._live.values()))
        kept = [ticket for ticket in tickets if ticket.num_left == len(ticket.jobs) and waiting.issuperset(ticket.request_ids)]
        for seq in (*requests.waiting, *requests.prefilling, *requests.running):
            if (live := self._live.get(seq.request_id)) and live.ticket not in kept:
                self._watch(self.metrics.finished, seq, "error", live.ticket.tag)
        self._live.clear()
        for ticket in reversed(kept):
            ticket.request_ids.clear()
            self._inbox.post_first(partial(self._add, ticket))
        self._watch(self.metrics.crashed)
        self._tell(self._settle, "restarting")
        self._outbox.send([(ticket, ApiError.known("engine_crashed")) for ticket in tickets if ticket not in kept])

    def _watch(self, call: Callable[..., None], *arguments: Any) -> None:
        """Counting may fail without harm to the requests."""
        try:
            call(*arguments)
        except Exception:
            log.exception("the metrics failed")

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the event loop; nothing when it has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)
