"""A client of streaming HTTP APIs that costs next to nothing: it shares the processor with the server that it measures.

While an answer comes in, its bytes are only kept, each piece with its time; `read_reply` makes sense of them when the pass is
over. Connections stay open and are used again, as those of other clients are.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""Ends a chunked body, and stands nowhere else in server-sent events: their lines begin with a word."""


@dataclass(slots=True)
class Stream:
    """A response as it came. Times are of time.perf_counter."""

    due_s: float
    """When it should have been sent; with a closed loop, when it was."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    """What went wrong below HTTP."""


@dataclass(slots=True)
class Reply:
    """A response, read."""

    status: int
    events: list[tuple[float, bytes]]
    """Server-sent events: when each was complete, and its data."""
    body: bytes
    """The whole body."""


class Client:
    """HTTP/1.1 to one server. Use it within one event loop."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        """`url` with or without /v1. Raises ConfigError when it is none."""
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r} is no address ({error}): write it as http://127.0.0.1:8000") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"--url {url!r} is no address of a server: write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port or (443 if self._ssl else 80)
        name = f"[{self._host}]" if ":" in self._host else self._host
        self._common = f"Host: {name}:{self._port}\r\nUser-Agent: paceline-bench\r\n"
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise ConfigError("the API key must be printable ASCII text: HTTP headers carry nothing else")
            self._common += f"Authorization: Bearer {key}\r\n"
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Reply:
        """Raises OSError when the server cannot be reached, or answers something that is not HTTP."""
        stream = await self._ask(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._common}\r\n".encode(), time.perf_counter())
        reply = None if stream.failure else read_reply(stream)
        if reply is None:
            raise ConnectionError(stream.failure or "it does not speak HTTP/1.1")
        return reply

    async def post(self, path: str, body: bytes, due_s: float | None = None) -> Stream:
        """Send JSON and wait for the whole answer; what goes wrong is in `Stream.failure`."""
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._common}Content-Type: application/json\r\nContent-Length: {len(body)}"
        )
        return await self._ask(head.encode() + b"\r\n\r\n" + body, time.perf_counter() if due_s is None else due_s)

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.hang_up()
        self._idle.clear()

    async def _ask(self, request: bytes, due_s: float) -> Stream:
        stream = Stream(due_s, sent_s=time.perf_counter())
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                await connection.ask(request, stream)
        except TimeoutError:
            stream.failure = f"no whole answer within {self._timeout_s:g} s"
        except OSError as error:
            stream.failure = error.strerror or str(error) or type(error).__name__
        stream.ended_s = stream.pieces[-1][0] if stream.pieces and not stream.failure else time.perf_counter()
        if connection is not None:
            if stream.failure or not connection.is_open:
                connection.hang_up()
            else:
                self._idle.append(connection)
        return stream

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl))[1]


class _Connection(asyncio.Protocol):
    """Keeps what comes in; knows just enough of HTTP to tell when a response is whole."""

    is_open = False

    def connection_made(self, transport: Any) -> None:
        self._transport, self.is_open = transport, True
        self._done: asyncio.Future[None] | None = None

    def ask(self, request: bytes, stream: Stream) -> Awaitable[None]:
        self._done = asyncio.get_running_loop().create_future()
        self._pieces, self._head, self._tail = stream.pieces, b"", b""
        self._length: int | None = None
        """Bytes of head and body; None when chunked, or when the server hangs up at the end."""
        self._num_bytes, self._has_head, self._is_chunked = 0, False, False
        self._transport.write(request)
        return self._done

    def hang_up(self) -> None:
        self.is_open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.hang_up()  # nobody asked
            return
        self._pieces.append((time.perf_counter(), data))
        self._num_bytes += len(data)
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if not self._has_head:
            self._head += data
            self._read_head()
        if (self._is_chunked and self._tail == LAST_CHUNK) or self._num_bytes == self._length:
            self._done.set_result(None)

    def _read_head(self) -> None:
        head, blank, _ = self._head.partition(b"\r\n\r\n")
        if not blank:
            return
        self._has_head = True
        headers = _headers(head)
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = headers.get(b"content-length", b"")
        if not self._is_chunked and length.isdigit():
            self._length = len(head) + len(blank) + int(length)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._has_head and not self._is_chunked and self._length is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(exc if isinstance(exc, OSError) else ConnectionError("the server hung up"))


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def read_reply(stream: Stream) -> Reply | None:
    """Status, events and body of a whole response; None when it is not HTTP."""
    whole = b"".join(piece for _, piece in stream.pieces)
    head, blank, _ = whole.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if not blank or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    is_chunked = _headers(head).get(b"transfer-encoding", b"").lower() == b"chunked"
    try:
        body = list(_body(stream.pieces, len(head) + len(blank), is_chunked))
    except ValueError:
        return None
    rest, events = b"", []
    for when, piece in body:
        *ended, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        events += [(when, data) for event in ended if (data := _data(event))]
    return Reply(int(words[1]), events, b"".join(piece for _, piece in body))


def _body(pieces: list[tuple[float, bytes]], head_length: int, is_chunked: bool) -> Iterator[tuple[float, bytes]]:
    """Without the head and the lengths of chunks. Raises ValueError when a length is none."""
    unread = b""
    for when, piece in pieces:
        piece, head_length = piece[head_length:], max(head_length - len(piece), 0)
        if is_chunked:
            piece, unread = _dechunk(unread + piece)
        if piece:
            yield when, piece


def _dechunk(data: bytes) -> tuple[bytes, bytes]:
    """The bytes of the chunks that are whole, and what comes after them."""
    whole, at = [], 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end].partition(b";")[0] or b"0", 16)
        if len(data) < end + 2 + size + 2:
            break
        whole.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(whole), data[at:]


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
