"""SIGTERM handling: training finishes its step and writes a checkpoint; every other stage stops immediately.

with stopped_by_signal(progress.say) as stop:
    ...                                     # SIGTERM raises SystemExit(143); finished answers and features are kept
    with stop.later():                      # SIGTERM sets `stop.is_asked`, which training checks after every step
        ...
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

STATUS = 143
"""Exit status of a process ended by SIGTERM: 128 + 15."""


class Stop:
    """Handler of the signal SIGTERM, which ends the process. In a `later` block the process goes on; SIGTERM only sets
    the attribute `is_asked`, so that the caller can save its state before it ends."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_asked = False
        self._say, self._waits = say, False

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Context manager in which SIGTERM only sets `is_asked`. The caller checks this attribute regularly; if it is
        set, the caller saves its state and calls `end`."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def ask(self, *_: Any) -> None:
        """Handle SIGTERM: set `is_asked`. Also ends the process by raising SystemExit, except in a `later` block."""
        self.is_asked = True
        if not self._waits:
            self.end("what is finished is kept")

    def end(self, state: str) -> None:
        """End the process after SIGTERM: print that the same command resumes the run, and raise SystemExit (status
        143). `state`: text for the user that says what was saved."""
        self._say(f"stopped by SIGTERM, {state}: the same command goes on from there")
        raise SystemExit(STATUS)


@contextlib.contextmanager
def stopped_by_signal(say: Callable[[str], None]) -> Iterator[Stop]:
    """Context manager that yields a Stop, which handles SIGTERM within the block. Outside the main thread SIGTERM is
    not handled. `say`: function that prints a line, called when the process is ended."""
    stop = Stop(say)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
