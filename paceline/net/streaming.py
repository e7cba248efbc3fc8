"""A client of streaming HTTP APIs that costs next to nothing: it shares the processor with the server that it measures.

One thread a request. While an answer comes in, its bytes are only kept, each piece with its time; sense is made of them when
the pass is over. Connections stay open and are used again, as those of other clients are.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from urllib.parse import urlsplit

from paceline.errors import ConfigError, reraised

BOM = b"\xef\xbb\xbf"
"""A stream of events may begin with it (HTML, 9.2.6)."""


@dataclass(slots=True)
class Stream:
    """A response as it came. Times are of time.perf_counter."""

    due_s: float
    """When it should have been sent; with a closed loop, when it was."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Of the body."""
    failure: str | None = None
    """What went wrong below HTTP."""
    connected_s: float = 0.0
    """When there was a connection: at once where an open one was used again."""
    written_s: float = 0.0
    """When the whole request had been given to the system."""
    headers_s: float = 0.0
    """When the answer's first bytes had come."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Server-sent events: when each was complete, and its data."""
        rest, is_first = b"", True
        for when, piece in self.pieces:
            rest += piece
            if is_first and len(rest) >= len(BOM):
                rest, is_first = rest.removeprefix(BOM), False
            *ended, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in ended:
                lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
                if data := b"\n".join(lines):
                    yield when, data


class Client:
    """HTTP/1.1 to one server, from any number of threads."""

    def __init__(
        self, url: str, key: str | None = None, timeout_s: float = 600.0, option: str = "--url", *, keeps: bool = True
    ) -> None:
        """`url` with or without /v1; `keeps` connections open and uses them again.

        Raises ConfigError, which names `option`, when it is none."""
        self._timeout_s, self._keeps = timeout_s, keeps
        with reraised(ConfigError, f"{option} {url!r} is no address", "write it as http://127.0.0.1:8000", ValueError):
            parts = urlsplit(url)
            self._port = parts.port
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{option} {url!r} is no address of a server: write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.has_key = key is not None
        self._headers = {"User-Agent": "paceline-bench", "Content-Type": "application/json"}
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise ConfigError("the API key must be printable ASCII text: HTTP headers carry nothing else")
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: list[HTTPConnection] = []
        self._made: list[HTTPConnection] = []

    def get(self, path: str) -> Stream:
        """Raises OSError when the server cannot be reached, or answers something that is not HTTP."""
        stream = self.ask("GET", path)
        if stream.failure:
            raise ConnectionError(stream.failure)
        return stream

    def post(self, path: str, body: bytes, due_s: float | None = None) -> Stream:
        """Send JSON and wait for the whole answer; what goes wrong is in `Stream.failure`."""
        return self.ask("POST", path, body, due_s)

    def close(self) -> None:
        """Hang up; what is under way fails."""
        for connection in self._made:
            with contextlib.suppress(OSError, AttributeError):  # there is no socket yet, or none any more
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def ask(self, method: str, path: str, body: bytes | None = None, due_s: float | None = None) -> Stream:
        """As `post`, for any method."""
        sent_s = time.perf_counter()
        stream, connection = Stream(sent_s if due_s is None else due_s, sent_s), self._connection()
        try:
            if connection.sock is None:
                connection.connect()
            stream.connected_s = time.perf_counter()
            connection.request(method, self._prefix + path, body, self._headers)
            stream.written_s = time.perf_counter()
            response = connection.getresponse()
            stream.headers_s = time.perf_counter()
            stream.status = response.status
            while piece := response.read1():
                stream.pieces.append((time.perf_counter(), piece))
                if stream.pieces[-1][0] > sent_s + self._timeout_s:
                    raise TimeoutError
            if response.length:
                raise IncompleteRead(b"", response.length)
            response.close()
        except TimeoutError:
            stream.failure = f"no whole answer within {self._timeout_s:g} s"
        except (ConnectionError, IncompleteRead) as error:
            stream.failure = getattr(error, "strerror", None) or "the server hung up"
        except (HTTPException, ValueError):
            stream.failure = "the answer was not HTTP"
        except OSError as error:
            stream.failure = error.strerror or str(error) or type(error).__name__
        stream.ended_s = stream.pieces[-1][0] if stream.pieces and not stream.failure else time.perf_counter()
        if stream.failure or connection.sock is None or not self._keeps:
            connection.close()
        else:
            self._idle.append(connection)
        return stream

    def _connection(self) -> HTTPConnection:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                connection = self._idle.pop()
                if _is_open(connection.sock):
                    return connection
                connection.close()
        if self._ssl:
            connection = HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._ssl)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._made.append(connection)
        return connection


def _is_open(idle: socket.socket) -> bool:
    """Whether the server has not hung up meanwhile: nothing to read, neither the end nor bytes that nobody asked for."""
    waiting = select.poll()
    waiting.register(idle, select.POLLIN)
    return not waiting.poll(0)
