"""SIGTERM ends a run in good order: a training step is finished and written down, every other stage stops where it is.

with stopped_by_signal(progress.say) as stop:
    ...                                     # elsewhere: SystemExit(143) at once, answers and features so far are kept
    with stop.later():                      # while it trains: `stop.is_asked` is looked at after every step
        ...
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STATUS = 143
"""Exit status of a process that SIGTERM ended: 128 + 15."""
HOW_TO_GO_ON = "the same command goes on from there"


class Stop:
    """Whether somebody asked this process to end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_asked = False
        self._say, self._waits = say, False

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Within, being asked to end only sets `is_asked`."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def ask(self, *_: Any) -> None:
        """The handler of the signal. Raises SystemExit outside of `later`."""
        self.is_asked = True
        if not self._waits:
            self.end("what is finished is kept")

    def end(self, state: str) -> None:
        """Say how to go on, and raise SystemExit."""
        self._say(f"stopped by SIGTERM, {state}: {HOW_TO_GO_ON}")
        raise SystemExit(STATUS)


@contextlib.contextmanager
def stopped_by_signal(say: Callable[[str], None]) -> Iterator[Stop]:
    """Within, SIGTERM goes to the Stop given; in a thread that is not the main one nothing changes."""
    stop = Stop(say)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
