"""Commands for the engine's thread: requests to add or drop, functions to run there. `ticket.Outbox` is the way out.

A caller of `call` gets its result or an error in any case, also when the thread ends before it comes to it.
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
    """First in, first out. Any thread puts commands in, one thread takes them out until it calls `close`."""

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
        """Queue a command; once the inbox is closed it is dropped."""
        with self._condition:
            if self._closed is None:
                self._commands.append(command)
                self._condition.notify()

    def post_first(self, command: Command) -> None:
        """Queue a command before all others. For the thread that takes them out."""
        self._commands.appendleft(command)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Queue a function; the future gets its result or exception, or an ApiError once the inbox is closed."""
        future: Future[Any] = Future()
        with self._condition:
            if self._closed is not None:
                future.set_exception(ApiError.known(self._closed))
                return future
            self._calls.add(future)
            future.add_done_callback(self._calls.discard)  # first: once queued it may be done, and `close` called
            self._commands.append(partial(_answer, future, function))
            self._condition.notify()
        return future

    def stop(self) -> None:
        """Have `wait` return False once nothing is queued."""
        with self._condition:
            self.is_stopping = True
            self._condition.notify()

    def wait(self) -> bool:
        """Sleep until a command is queued; False when there is none and `stop` was called."""
        with self._condition:
            while not self._commands:
                if self.is_stopping:
                    return False
                self._condition.wait()
        return True

    def take(self) -> Command:
        """The oldest command. Raises IndexError when there is none."""
        return self._commands.popleft()

    def close(self, code: str) -> None:
        """Fail every call without a result, and every later one, with this error of failures.json."""
        with self._condition:
            self._closed = code
            self._commands.clear()
        for future in list(self._calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(ApiError.known(code))


def _answer(future: Future[Any], function: Callable[[], Any]) -> None:
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
