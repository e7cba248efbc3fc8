"""Queue of commands for the engine's thread: requests to add or drop, and functions to run.

`ticket.Outbox` passes events in the opposite direction. A caller of `call` always gets a result or an error, even if
the thread ends first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from paceline.serve.http.failures import ApiError

Command = Callable[[], None]


class Inbox:
    """FIFO queue of commands (functions without arguments) for one thread. Any thread may add commands; only that one
    thread takes and runs them."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._condition = threading.Condition()
        self._calls: set[Future[Any]] = set()
        """Futures without a result yet."""
        self._closed: str | None = None
        self.is_stopping = False

    def __len__(self) -> int:
        return len(self._commands)

    def post(self, command: Command) -> None:
        """Queue a command; a closed inbox drops it."""
        with self._condition:
            if self._closed is None:
                self._commands.append(command)
                self._condition.notify()

    def post_first(self, command: Command) -> None:
        """Queue a command before all others, such as one that has to be repeated. Only the thread that takes the
        commands may call this."""
        self._commands.appendleft(command)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue `function`. Returns a future with its result or exception, or with an ApiError if the inbox is closed
        before it has run."""
        future: Future[Any] = Future()
        with self._condition:
            if self._closed is not None:
                future.set_exception(ApiError.known(self._closed))
                return future
            self._calls.add(future)
            future.add_done_callback(self._calls.discard)  # first: once queued it may be done, and `close` called
            self._commands.append(partial(complete, future, function))
            self._condition.notify()
        return future

    def stop(self) -> None:
        """Ask the thread to end: `wait` returns False once the queue is empty."""
        with self._condition:
            self.is_stopping = True
            self._condition.notify()

    def wait(self) -> bool:
        """Sleep until a command is queued; returns False if the queue is empty and `stop` was called."""
        with self._condition:
            while not self._commands:
                if self.is_stopping:
                    return False
                self._condition.wait()
        return True

    def take(self) -> Command:
        """Return the oldest command. Raises IndexError if the queue is empty."""
        return self._commands.popleft()

    def close(self, code: str) -> None:
        """Close the inbox and drop all commands. Unfinished and later `call`s get the ApiError with this `code` in
        failures.json."""
        with self._condition:
            self._closed = code
            self._commands.clear()
        for future in list(self._calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(ApiError.known(code))


def complete(future: Future[Any], function: Callable[[], Any]) -> None:
    """Run `function` and set its result or exception in the future. Does nothing if the future is cancelled. SystemExit
    and KeyboardInterrupt are raised here, because they must end the thread; the future then gets an ApiError."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except Exception as error:  # noqa: BLE001  (it is raised again where the result is awaited)
        future.set_exception(error)
    except BaseException:
        future.set_exception(ApiError.known("engine_crashed"))
        raise
    else:
        future.set_result(result)
