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
    """Signal handler for SIGTERM: sets `is_asked` to True, and ends the process unless a `later` block is active."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.is_asked = False
        self._say, self._waits = say, False

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Within the block, SIGTERM only sets `is_asked`; the caller checks it, saves its state and then calls
        `end`."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def ask(self, *_: Any) -> None:
        """Handle the signal: set `is_asked`, and raise SystemExit unless a `later` block is active."""
        self.is_asked = True
        if not self._waits:
            self.end("what is finished is kept")

    def end(self, state: str) -> None:
        """Print how to continue the run, and raise SystemExit. `state`: text on what was saved."""
        self._say(f"stopped by SIGTERM, {state}: the same command goes on from there")
        raise SystemExit(STATUS)


@contextlib.contextmanager
def stopped_by_signal(say: Callable[[str], None]) -> Iterator[Stop]:
    """Within the block, the yielded Stop handles SIGTERM; `say` prints its message. Outside the main thread no handler
    is installed."""
    stop = Stop(say)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
