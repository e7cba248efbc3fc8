"""What the engine's thread has for the event loop, several rounds' together: to wake the loop costs time on the engine's cores.

A first token, an end and an error go at once. What lies between goes when waiting for another round would make it later than
the interval, so that rounds which take longer than that are handed over one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.serve.ticket import Event, Ticket

Addressed = tuple[Ticket, Event | Exception]


class Outbox:
    """For one thread."""

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
