"""An HTTP client for streamed responses that uses little CPU time, because benchmarks run it on the server's machine.

Each request runs in a thread of the caller. Response bytes are only buffered with their arrival times and parsed after
the run. Connections are kept alive and reused. `served_model` asks an OpenAI-compatible server for its model.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from urllib.parse import urlsplit

from paceline.bounds import MAX_TIMEOUT_S
from paceline.errors import ConfigError, DownloadError, ModelNotFoundError, shown

BOM = b"\xef\xbb\xbf"
"""Byte order mark that may begin a stream of server-sent events (HTML standard, 9.2.6)."""
TOO_LONG = 413
"""Status of a `Stream` whose body exceeded the caller's limit."""


@dataclass(slots=True)
class Stream:
    """One HTTP response with the arrival time of each part. All times are values of time.perf_counter, in seconds."""

    due_s: float
    """Scheduled send time; equals `sent_s` in a closed loop."""
    sent_s: float = 0.0
    """Time at which `Client.ask` was called."""
    ended_s: float = 0.0
    """Time of the last body bytes, or of the failure."""
    status: int = 0
    """HTTP status; 0 if no response arrived."""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """(arrival time, bytes) of each part of the body."""
    failure: str | None = None
    """Error message of the connection or of a broken response; None for a complete response of any status."""
    connected_s: float = 0.0
    """Time at which the connection was open; close to `sent_s` for a reused one."""
    written_s: float = 0.0
    """Time at which the whole request was handed to the operating system."""
    headers_s: float = 0.0
    """Time at which the response headers had arrived."""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Parse the body as server-sent events; yields (time at which the event was complete, its data)."""
        rest, is_first = b"", True
        for arrived_s, piece in self.pieces:
            rest += piece
            if is_first and len(rest) >= len(BOM):
                rest, is_first = rest.removeprefix(BOM), False
            *events, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
                if data := b"\n".join(lines):
                    yield arrived_s, data


class Client:
    """HTTP/1.1 client of one server, which records when each part of a response arrived (`Stream`). Reuses its
    connections, unless it was created with keeps=False. Threads may share it."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout_s: float = 600.0,
        option: str = "--url",
        *,
        keeps: bool = True,
        key_name: str = "the API key",
    ) -> None:
        """`url`: the server's address, with or without /v1. `timeout_s`: seconds that a whole response may take.
        `keeps`: reuse connections. `option`, `key_name`: names of address and key in error messages.

        Raises ConfigError for an invalid address, timeout or key."""
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S} seconds, not {shown(timeout_s)}")
        self._timeout_s, self._keeps = timeout_s, keeps
        no_address = f"{option} {without_secrets(url)!r} is no address"
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"{no_address}{reason_of(url, error)}: write it as http://127.0.0.1:8000") from error
        if parts.username or parts.password:
            raise ConfigError(
                f"{option} holds a password: write it as http://127.0.0.1:8000, and give {key_name} instead"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"{no_address} of a server: write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.has_key = key is not None
        self._headers = {"User-Agent": "paceline", "Content-Type": "application/json"}
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise ConfigError(f"{key_name} must be printable ASCII text: HTTP headers carry nothing else")
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: list[HTTPConnection] = []
        self._open: set[HTTPConnection] = set()

    def get(self, path: str) -> Stream:
        """Send a GET request and wait for the whole response. Raises ConnectionError if there is no complete response;
        an HTTP error status raises no exception."""
        stream = self.ask("GET", path)
        if stream.failure:
            raise ConnectionError(stream.failure)
        return stream

    def post(self, path: str, body: bytes, due_s: float | None = None) -> Stream:
        """Send a POST request with the JSON `body`, and wait for the whole response. Errors are reported in
        `Stream.failure`. `due_s`: time for which the request was scheduled (time.perf_counter); it is only stored in
        the result [default: now]."""
        return self.ask("POST", path, body, due_s)

    def close(self) -> None:
        """Close all connections; requests in flight fail."""
        for connection in list(self._open):
            with contextlib.suppress(OSError, AttributeError):  # it has no socket yet, or no longer
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        due_s: float | None = None,
        *,
        most: float = float("inf"),
    ) -> Stream:
        """Send a request and wait for the whole response. Errors are reported in `Stream.failure`. `due_s`: time for
        which the request was scheduled (time.perf_counter); it is only stored in the result [default: now]. A response
        body of more than `most` bytes is cut off, and the result gets the status 413 (TOO_LONG)."""
        sent_s = time.perf_counter()
        stream, connection = Stream(sent_s if due_s is None else due_s, sent_s), self._connection()
        num_bytes = 0
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
                num_bytes += len(piece)
                if num_bytes > most:
                    stream.status, stream.failure = TOO_LONG, f"the answer has more than {most} bytes"
                    break
            else:
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
            self._discard(connection)
        else:
            self._idle.append(connection)
        return stream

    def _discard(self, connection: HTTPConnection) -> None:
        connection.close()
        self._open.discard(connection)

    def _connection(self) -> HTTPConnection:
        """Return an idle connection that is still open, or a new one."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                connection = self._idle.pop()
                if _is_open(connection.sock):
                    return connection
                self._discard(connection)
        if self._ssl:
            connection = HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._ssl)
        else:
            connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._open.add(connection)
        return connection


def served_name(client: Client, wanted: str | None) -> str:
    """Return the name of the model to use on an OpenAI-compatible server: `wanted` or, if it is None, the first model
    that the server lists. Raises DownloadError if the server does not answer, ModelNotFoundError if it does not list
    `wanted`, and ConfigError if it rejects the API key, or lists no model and `wanted` is None."""
    return served_model(client, wanted)[0]


def served_model(client: Client, wanted: str | None, option: str = "--served-name") -> tuple[str, str]:
    """Return (name of the model to use on an OpenAI-compatible server, its "owned_by" in the server's list of models).
    The name is `wanted` or, if it is None, the first one in the list. `option`: command-line option for the name, for
    error messages. If the server has no list of models, the result is (`wanted`, "").

    Raises DownloadError if the server does not answer, ModelNotFoundError if its list does not have `wanted`, and
    ConfigError if it rejects the API key, or has no list and `wanted` is None."""
    try:
        reply = client.get("/v1/models")
    except OSError as error:
        raise DownloadError(f"there is no server at {client.url} ({error}): start it, or check the address") from error
    check_key(client.url, reply.status, client.has_key)
    try:
        owners = {str(model["id"]): str(model.get("owned_by") or "") for model in json.loads(reply.body)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        owners = {}
    if not wanted and not owners:
        raise ConfigError(
            f"{client.url}/v1/models answered with status {reply.status} and no model: is it an OpenAI-compatible "
            f"server? If so, name its model with {option}"
        )
    if wanted and owners and wanted not in owners:
        raise ModelNotFoundError(f"{client.url} does not serve {wanted!r}: choose {option} from {', '.join(owners)}")
    name = wanted or next(iter(owners))
    return name, owners.get(name, "")


def check_key(url: str, status: int, has_key: bool) -> None:
    """Raise ConfigError if a server rejected the API key: its HTTP status is 401 or 403. `url`: the server's address,
    for the message. `has_key`: True if a key was sent."""
    if status in (401, 403):
        had = "does not take this API key" if has_key else "wants an API key"
        raise ConfigError(f"{url} {had}: give the right one with --api-key-file, or set PACELINE_API_KEY")


def _is_open(idle: socket.socket) -> bool:
    """Return True if the server has not closed the idle connection: then its socket has nothing to read."""
    waiting = select.poll()
    waiting.register(idle, select.POLLIN)
    return not waiting.poll(0)


def without_secrets(url: str) -> str:
    """Returns an address without its secrets, for messages: "***" replaces everything before an "@" (user name and
    password) and everything after a "?" (query)."""
    text = re.sub(r"^(\w+://)?.*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"\?.*", "?***", text, flags=re.DOTALL)


def reason_of(url: str, error: ValueError) -> str:
    """Returns the reason why an address is invalid, in parentheses, for an error message. Returns "" for an address
    with an "@", because the reason may quote a part of its password. `error`: error from parsing the address."""
    return "" if "@" in url else f" ({error})"


def error_text(body: bytes) -> str:
    """Return the message of an error response as one line of at most 200 characters. If `body` is not an error in
    OpenAI's format, return the body itself in this form; "no message" if there is no text."""
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
        text = text if message is None else str(message)
    return " ".join(text.split())[:200] or "no message"
