"""One HTTP connection: uvicorn's, which in addition waits for no one for ever and speaks of errors as the API does.

A request line and its headers must have arrived, and what is written must be read, within some seconds each; bodies have their
own limit in `security.py`. Whoever is slower is hung up on, and the answer it asked for is aborted.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.serve.failures import ApiError, RequestRefused, dump
from paceline.serve.settings import ServeConfig

BEGINNING = b"HTTP/1.1 "
"""How every answer begins."""
PROBE_SECONDS = 0.1


class Probing:
    """The transport of a client that sends nothing more. Has it left for good, or does it wait for its answer?

    Only writing tells: the system of a client that has left refuses what is written, and asyncio then reports the connection
    as lost. So the answer's beginning, the same for all, is written ahead byte by byte, at intervals that double.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._num_ahead, self._wait_s = 0, PROBE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._probe()

    def write(self, data: bytes) -> None:
        """What has been written ahead is left out of the first piece."""
        if self._timer:
            self._timer.cancel()
        self._transport.write(data[self._num_ahead :])
        self._num_ahead, self._timer = 0, None

    def close(self) -> None:
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _probe(self) -> None:
        if self._transport.is_closing() or self._num_ahead == len(BEGINNING):
            return
        self._transport.write(BEGINNING[self._num_ahead : self._num_ahead + 1])
        self._num_ahead += 1
        self._timer = self._loop.call_later(self._wait_s, self._probe)
        self._wait_s *= 2


class Connection(H11Protocol):
    """Hangs up on peers that are slow. `transport.abort` makes the application see that the client has left."""

    def __init__(self, limits: ServeConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._headers_due: asyncio.TimerHandle | None = None
        self._writing_due: asyncio.TimerHandle | None = None
        self._has_ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._writing_due):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more, but may wait for the answer to what it has sent whole: True keeps the connection."""
        self._has_ended = True
        if not self._is_answering or self.cycle.more_body:
            return False
        if not self.cycle.response_started:
            self.cycle.transport = cast(Any, Probing(self.transport, self.loop))
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_ended and not self._is_answering:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_headers(self) -> None:
        """The clock runs from the connection, or the first byte of a later request, to the end of its headers."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            if self._headers_due:
                self._headers_due.cancel()
            self._headers_due = None
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(self._limits.header_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._headers_due = None
        if self.conn.their_state is h11.IDLE:
            self._hang_up(ApiError(408, f"no request came within {self._limits.header_seconds:g} s", code="header_timeout"))

    def send_400_response(self, msg: str) -> None:
        self._hang_up(RequestRefused("this is no HTTP request", code="invalid_http"))

    def _hang_up(self, error: ApiError) -> None:
        if not self._is_answering or not self.cycle.response_started:
            body = dump(error.body)
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing_due = self.loop.call_later(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing_due:
            self._writing_due.cancel()
        self._writing_due = None
