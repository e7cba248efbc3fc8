"""A server that says what a test tells it, byte for byte, and a recording proxy in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from live_server import wait_until
from loopback import running

from paceline.loop.record.reader import Reader
from paceline.loop.record.run import Recorder, Server
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.traces import TraceWriter
from paceline.serve.run import listen
from paceline.serve.settings import ServeConfig, TraceConfig

HEAD = "HTTP/1.1 200 OK\r\nDate: today\r\nX-Odd-Case: kept\r\n"


@dataclass
class Asked:
    """A request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class CutOff(Exception):
    """Raised by an answer to end the connection in its middle."""


Answer = Callable[[Asked], Iterable[bytes]]
"""The bytes of an answer, head and framing included."""


class Upstream(http.server.ThreadingHTTPServer):
    """Keeps what it was asked in `asked`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, list[Asked]()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave in these tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(60)

    def _any(self) -> None:
        body = self._chunks() if "chunked" in self.headers.get("transfer-encoding", "") else self._whole()
        request = Asked(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        self.server.asked.append(request)
        try:
            for piece in self.server.answer(request):
                self.wfile.write(piece)
                self.wfile.flush()
        except CutOff:
            self.close_connection = True

    def _whole(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_POST = do_DELETE = do_HEAD = _any

    def log_message(self, format: str, *args: Any) -> None:
        pass


def whole(body: Any, more: str = "", status: str = "200 OK") -> Iterable[bytes]:
    """An answer at once; `body` is JSON, or bytes as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        HEAD.replace("200 OK", status) + f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    )
    yield head.encode() + data


def chunked(pieces: Iterable[bytes], more: str = "", end: bytes = b"0\r\n\r\n") -> Iterable[bytes]:
    """A stream of events."""
    yield (HEAD + f"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n{more}\r\n").encode()
    for piece in pieces:
        yield f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    yield end


def events(*chunks: Any, done: bool = True) -> list[bytes]:
    return [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks] + ([b"data: [DONE]\n\n"] if done else [])


def completion(text: str, reason: str | None = "stop", *, is_delta: bool = False, **more: Any) -> dict[str, Any]:
    """A chat completion, or a chunk of one."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "delta" if is_delta else "message": message, "finish_reason": reason}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [choice | more.pop("choice", {})],
    } | more


@dataclass
class Recording:
    """A proxy that runs, and its store."""

    port: int
    writer: TraceWriter
    folder: Path
    upstream: Upstream | None = None
    server: Server | None = None
    recorder: Recorder | None = None
    _stop: list[Callable[[], None]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=60)

    def stop(self) -> None:
        """Stop like a signal does: answers end, traces are written."""
        while self._stop:
            self._stop.pop()()

    def rows(self) -> list[dict[str, Any]]:
        """Stop the recording and return its traces."""
        from trace_files import rows

        self.stop()
        return rows(self.folder)

    def ask(
        self, body: Any, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read()


def answering(answer: Answer) -> contextlib.AbstractContextManager[Upstream]:
    return running(Upstream(answer))


@contextlib.contextmanager
def recording(
    url: str, model: Path, folder: Path, *, names: tuple[str, ...] = (), add_fields: str = "none", **tracing: Any
) -> Iterator[Recording]:
    """A proxy in front of `url`, in a thread of the test's process."""
    writer = TraceWriter(TraceConfig(folder, **tracing), "tiny")
    tokenizer = Tokenizer.from_path(model)
    writer.begin(tokenizer)
    serving = ServeConfig(port=0)
    recorder = Recorder(Reader(tokenizer, names, lose=writer.lose), writer)
    server = Server(url, serving, recorder.keep, add_fields)
    with listen(serving) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(server.run_on(bound)), name="test-proxy")

        def stop() -> None:
            server.should_exit = True
            thread.join(60)
            writer.close()
            assert not thread.is_alive()

        one = Recording(bound.getsockname()[1], writer, folder, server=server, recorder=recorder, _stop=[stop])
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield one
        finally:
            one.stop()


@contextlib.contextmanager
def recorded(answer: Answer, model: Path, folder: Path, **options: Any) -> Iterator[Recording]:
    """An upstream and its proxy."""
    with answering(answer) as upstream, recording(upstream.url, model, folder, **options) as one:
        one.upstream = upstream
        yield one
