"""Runs the server: one process, with the engine in its own thread and a graceful shutdown on SIGTERM or Ctrl-C.

The port answers at once (/health); /ready reports when the model is loaded. The first signal drains the server: it
rejects new requests and finishes running ones. A second signal ends it at once.

`Connection` adds timeouts and JSON errors to uvicorn's connections: request line and headers must arrive, and response
data must be read, within some seconds each (`security.py` limits bodies). Connections of slower clients are closed and
their answers aborted.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import ConfigError, reraised
from paceline.serve.http.app import create_app
from paceline.serve.http.failures import ApiError, RequestRefused, dump
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.worker import EngineWorker

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

SWITCH_SECONDS = 0.0005
"""Switch interval of Python's threads: the default of 5 ms would delay the engine's rounds when the event loop is
busy."""
CLOSE_SECONDS = 5
"""Least time to send answers that the engine has ended, after a signal."""
BEGINNING = b"HTTP/1.1 "
"""First bytes of every response."""
PROBE_SECONDS = 0.1


class Probing:
    """Transport for the response to a client that has closed its sending side; detects whether the client still reads.
    Only a write can detect this: if the client is gone, its operating system rejects the data. So the first bytes,
    "HTTP/1.1 ", are written before the response is ready: one at a time, at doubling intervals."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._num_ahead, self._wait_s = 0, PROBE_SECONDS
        self._timer: asyncio.TimerHandle | None = None
        self._probe()

    def write(self, data: bytes) -> None:
        """Write response data; leaves out those of its first bytes that were written to detect a lost client."""
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
    """HTTP connection that is closed if the client sends its headers or reads its response too slowly."""

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
        """Called when the client has closed its sending side. Returns True, which keeps the connection open, if a
        complete request is still being answered."""
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
        """Start or stop the header timeout, which runs from the connection, or a later request's first byte."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            if self._headers_due:
                self._headers_due.cancel()
            self._headers_due = None
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(self._limits.header_seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._headers_due = None
        if self.conn.their_state is h11.IDLE:
            self._hang_up(ApiError.known("header_timeout", seconds=self._limits.header_seconds))

    def send_400_response(self, msg: str) -> None:
        self._hang_up(RequestRefused("this is no HTTP request", code="invalid_http"))

    def _hang_up(self, error: ApiError) -> None:
        if not self._is_answering or not self.cycle.response_started:
            body = dump(error.body)
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            )
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


class Server(uvicorn.Server):
    """A uvicorn server that finishes running requests at the first SIGINT or SIGTERM; a second signal ends it at
    once."""

    def __init__(self, config: uvicorn.Config, worker: EngineWorker) -> None:
        super().__init__(config)
        self._worker = worker
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining:
            self.force_exit = self.should_exit = True
            self._captured_signals.append(sig)
        else:
            asyncio.get_running_loop().call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Reject new requests, let running ones finish for at most `drain_seconds` (ServeConfig), then exit."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        due = time.monotonic() + self._worker.config.drain_seconds
        await self._worker.drain(self._worker.config.drain_seconds)
        # Complete answers may still have to be sent: with --even-chunks at a steady rate, or to a slow client.
        self.config.timeout_graceful_shutdown = max(CLOSE_SECONDS, round(due - time.monotonic()))
        self.should_exit = True


def listen(config: ServeConfig) -> socket.socket:
    """Return a socket bound to the configured host and port. Raises ConfigError if the address is not available."""
    where, remedy = f"{config.host}:{config.port}", "choose another --host or --port"
    with reraised(ConfigError, f"cannot listen on {where}", remedy, OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if the protocol is given
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
        return bound


def settings_of(
    app: ASGIApp, config: ServeConfig, *, close_seconds: float = CLOSE_SECONDS, dated: bool = True
) -> uvicorn.Config:
    """Return the uvicorn settings of an application. `close_seconds`: seconds at shutdown after which unfinished
    responses are cut off. `dated`: add a Date header to responses."""
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=cast(Any, partial(Connection, config)),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=dated,
        timeout_graceful_shutdown=round(close_seconds),
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
    )


def make_server(worker: EngineWorker) -> Server:
    """Create the HTTP server of the worker; starts neither."""
    return Server(settings_of(create_app(worker), worker.config), worker)


def run(worker: EngineWorker, *, say: Callable[[str], None], introduce: Callable[[LLM], str]) -> None:
    """Load the model and serve until a signal arrives. `say`: function that prints a line. `introduce`: function that
    returns a description of the loaded model, to be printed. Raises ConfigError if the address is not available, and
    the error that prevented loading the model or restarting the engine."""

    async def serve(bound: socket.socket) -> None:
        server = make_server(worker)
        worker.start()
        tasks = [
            asyncio.create_task(_greet(worker, bound, say, introduce)),
            asyncio.create_task(_supervise(server, worker)),
        ]
        try:
            await server.serve(sockets=[bound])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    sys.setswitchinterval(SWITCH_SECONDS)
    with listen(worker.config) as bound:
        asyncio.run(serve(bound))
    if worker.failure:
        raise worker.failure


async def _greet(
    worker: EngineWorker, bound: socket.socket, say: Callable[[str], None], introduce: Callable[[LLM], str]
) -> None:
    """Print the address and, once the model is loaded, its description and an example request."""
    host, port = bound.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"listening on {address}, loading the model")
    await worker.loaded()
    say(await worker.call(introduce))
    say(f"ready: open {address}/ in a browser, or")
    key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if worker.config.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
    say(f"curl {address}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")


async def _supervise(server: Server, worker: EngineWorker) -> None:
    """End the server when its engine has failed for good, so that a supervisor can restart the process."""
    while worker.state != "failed":
        await asyncio.sleep(0.2)
    server.should_exit = True
