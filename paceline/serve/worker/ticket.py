"""One API request on its way through the worker: its jobs, the events that come back and how."""

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
    """One answer to be made."""

    prompt_ids: list[int]
    params: SamplingParams
    constraint: Constraint | None = None
    """The grammar of `params`, compiled where nobody waits for it."""
    grammar_field: str | None = None
    """The request's field that the grammar comes from."""
    clock: Clock = field(default_factory=Clock)
    """Has followed the API request so far; the same for all its jobs."""


@dataclass(frozen=True, slots=True)
class Event:
    """What one step added to one answer."""

    index: int
    """Which of the ticket's jobs."""
    chunk: Chunk
    """Its `sequence` is the engine's own: to be read only when `finish_reason` is set."""
    num_accepted: int
    """How many of the tokens, the first ones, are drafts that stood."""
    logprobs: list[TokenLogprob]


class Ticket:
    """The answers to one API request as they grow. Read by one task of the event loop, which closes it in any case."""

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
        """The engine's ids; for the engine's thread only."""
        self._abort = abort
        self._events: list[Event] = []
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    async def read(self) -> list[Event]:
        """All that is new, at least one event; an empty list at the end. Raises what ended the request."""
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
        """Nobody reads any more: what is unfinished is aborted, its rows are free before the next step."""
        if self.num_left:
            self._abort(self)

    def put(self, event: Event) -> None:
        self.num_left -= event.chunk.finish_reason is not None
        self._events.append(event)
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """End it; events that came before are still read."""
        self.num_left, self._error = 0, error
        self._arrived.set()


Addressed = tuple[Ticket, Event | Exception]


class Outbox:
    """What the engine's thread has for the event loop, several rounds' together: to wake the loop costs time on its cores.

    A first token, an end and an error go at once. What lies between goes when waiting for another round would make it later
    than the interval, so that rounds which take longer than that are handed over one by one.
    """

    def __init__(self, deliver: Callable[[list[Addressed]], None], interval_s: float) -> None:
        """`deliver` gets events in their order; `interval_s` 0 holds nothing back."""
        self._deliver, self._interval_s = deliver, interval_s
        self._held: list[Addressed] = []
        self._oldest_s = 0.0

    def put(self, events: list[Addressed], now: float, step_s: float, *, is_urgent: bool) -> None:
        """Events of a step that ended at `now` and took `step_s`, as the next one may."""
        if not self._held:
            self._oldest_s = now
        self._held += events
        if is_urgent or now + step_s - self._oldest_s >= self._interval_s:
            self.flush()

    def send(self, events: list[Addressed]) -> None:
        """At once, after what is held."""
        self._held += events
        self.flush()

    def flush(self) -> None:
        """Hand over what is held."""
        if self._held:
            events, self._held = self._held, []
            self._deliver(events)
