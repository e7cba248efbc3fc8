"""State of one API request in the worker: its jobs and events, and the queue of events to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.serve.http.clock import Clock
from paceline.types import Constraint, Route, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from paceline.engine.engine import Chunk


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to generate: token ids of its prompt, sampling parameters and compiled grammar."""

    prompt_ids: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    """Compiled grammar of `params`."""
    grammar_field: str | None = None
    """Request field that contained the grammar; named in errors."""
    clock: Clock = field(default_factory=Clock)
    """Clock of the API request, shared by its jobs."""


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens of one answer (one job), from one engine step."""

    index: int
    """Index of the job in its ticket."""
    chunk: Chunk
    """New text and tokens. Read `chunk.sequence`, which the engine modifies, only after `finish_reason` is set."""
    num_accepted: int
    """Number of the new tokens that count as accepted drafts: all but the last."""
    logprobs: list[TokenLogprob]


class Ticket:
    """The answers to one API request. A single task of the event loop reads the events, and must close the ticket.
    `deadline`: time (time.perf_counter) at which the worker aborts unfinished answers."""

    def __init__(
        self,
        jobs: list[Job],
        abort: Callable[[Ticket], None],
        *,
        deadline: float,
        tag: str | None = None,
        route: Route | None = None,
    ) -> None:
        self.jobs, self.tag, self.route, self.deadline = jobs, tag, route, deadline
        self.num_left = len(jobs)
        self.request_ids: list[int] = []
        """Request ids in the engine; for the engine's thread only."""
        self._abort = abort
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    async def read(self) -> list[Event]:
        """Wait for new events and return them; once all answers have ended, return []. Raises the error that ended the
        request."""
        while not self._events:
            if self._error:
                raise self._error
            if self.num_left == 0:
                return []
            self._arrived.clear()
            await self._arrived.wait()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Abort unfinished answers. Their rows of the KV cache are free before the engine's next step."""
        if self.num_left:
            self._abort(self)

    def put(self, event: Event) -> None:
        """Add an event, which `read` returns."""
        self.num_left -= event.chunk.finish_reason is not None
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End all answers with an error. `read` first returns the events that were already added, and then raises the
        error."""
        self.num_left, self._error = 0, error
        self._arrived.set()


Addressed = tuple[Ticket, Event | Exception]


class Outbox:
    """Passes events from the engine's thread to the event loop. Waking the loop costs CPU time, so the events of
    several rounds are delivered together. First tokens, ends of answers and errors are urgent: they are delivered at
    once, with all held events. Other events are held until the next round ends, unless an event would then have waited
    for `interval_s` seconds or more. The next round is assumed to take as long as the last one."""

    def __init__(self, deliver: Callable[[list[Addressed]], None], interval_s: float) -> None:
        """`deliver` is called with the events, in order. `interval_s`: longest time that events wait; 0 delivers every
        round at once."""
        self._deliver, self._interval_s = deliver, interval_s
        self._held: list[Addressed] = []
        self._oldest_s = 0.0

    def put(self, events: list[Addressed], now: float, step_s: float, *, is_urgent: bool) -> None:
        """Add the events of one engine step. `now`: time at which the step ended; `step_s`: its duration. Both are in
        seconds, by any clock. `is_urgent`: deliver all held events now."""
        if not self._held:
            self._oldest_s = now
        self._held += events
        if is_urgent or now + step_s - self._oldest_s >= self._interval_s:
            self.flush()

    def send(self, events: list[Addressed]) -> None:
        """Deliver all held events at once, followed by `events`."""
        self._held += events
        self.flush()

    def flush(self) -> None:
        """Deliver all held events."""
        if self._held:
            events, self._held = self._held, []
            self._deliver(events)
