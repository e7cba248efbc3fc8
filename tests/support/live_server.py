"""A real server on a free port, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import openai
import uvicorn.server
from small_llm import Talker, fake_llm

from paceline.engine.llm import LLM
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.serve.admin.metrics import Metrics
from paceline.serve.run import Server, listen, make_server
from paceline.serve.settings import ServeConfig
from paceline.serve.worker import worker
from paceline.serve.worker.worker import EngineWorker
from paceline.types import FinishReason

HURRIED: Any = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 20)})
"""What uvicorn's server sees of asyncio: it looks every 0.1 s whether to end, and waits as long for connections to
close."""
IDLE = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
PATIENCE_S = 20.0
"""A caller that is left alone fails a test after so long; none takes a tenth of it."""
LONG = {"max_tokens": 200, "temperature": 0}


class SlowTalker(Talker):
    """Never ends by itself, and takes a while for each pass."""

    def __init__(self, seconds: float = 0.01, **options: Any) -> None:
        self.seconds = seconds
        super().__init__(eos_bonus=-60.0, **options)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        time.sleep(self.seconds)
        return super().forward(batch)


class Gated(Talker):
    """Computes some passes, then waits for the gate before each."""

    def __init__(self, num_free: int = 20, **options: Any) -> None:
        super().__init__(**options)
        self.num_passes, self.num_free, self.gate = 0, num_free, threading.Event()

    @property
    def is_waiting(self) -> bool:
        return self.num_passes > self.num_free and not self.gate.is_set()

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.num_passes += 1
        if self.num_passes > self.num_free:
            self.gate.wait(PATIENCE_S)
        return super().forward(batch)


class Counting(Metrics):
    """Counts what happened."""

    def __init__(self) -> None:
        super().__init__("test")
        self.outcomes: list[str] = []
        self.refusals: list[str] = []
        self.tags: list[str | None] = []
        self.num_crashes = 0

    def finished(self, sequence: Any, outcome: FinishReason, tag: str | None = None) -> None:
        self.outcomes.append(outcome)
        self.tags.append(tag)
        super().finished(sequence, outcome, tag)

    def refused(self, reason: str) -> None:
        super().refused(reason)
        self.refusals.append(reason)

    def crashed(self) -> None:
        super().crashed()
        self.num_crashes += 1


class Live:
    """A server that runs: its address, and its insides for a test to look at."""

    def __init__(self, factory: Callable[[], Any], config: ServeConfig) -> None:
        self.seen = Counting()
        self.llms: list[LLM] = []
        self._factory = factory
        self.worker = EngineWorker(self._make, config, self.seen)
        self.config = config
        self._bound = listen(config)
        self.port: int = self._bound.getsockname()[1]
        self.server: Server = make_server(self.worker)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="test-server")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def llm(self) -> LLM:
        """The engine now at work."""
        return self.llms[-1]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=120)

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self.worker.state == "ready" and self.server.started)

    def drain(self) -> None:
        """Stop the server like SIGTERM does."""
        assert self._loop
        self._loop.call_soon_threadsafe(self.server.drain)

    def stop(self) -> None:
        if self._thread.is_alive():
            self.drain()
        self._thread.join(120)
        self._bound.close()
        assert not self._thread.is_alive()

    def is_idle(self) -> bool:
        """True if no connection is open, the engine is empty, and every row is free."""
        cache = self.llm.target.cache
        is_settled = not self.worker._live  # the engine's thread forgets a request after its client has the end
        return (
            self.worker.num_open == 0
            and is_settled
            and not self.llm.engine.has_work
            and cache.num_free == cache.num_rows
        )

    def _make(self) -> LLM:
        self.llms.append(self._factory())
        return self.llms[-1]

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self.worker.start()
            await self.server.serve(sockets=[self._bound])

        asyncio.run(main())

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers of a request; `body` is JSON or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"content-type": "application/json"} | (headers or {}))

    def request(
        self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            text = answer.read()
            is_json = (answer.getheader("content-type") or "").startswith("application/json")
            return answer.status, json.loads(text) if is_json else text, {k.lower(): v for k, v in answer.getheaders()}

    def open_stream(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """A raw connection on which a streamed answer was asked for, unless `body` says otherwise."""
        data = json.dumps({"stream": True} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection


def read_to_end(stream: socket.socket, text: bytes = b"") -> bytes:
    """The streamed answer up to its end, after the part `text` that was read before; closes the connection."""
    while b"[DONE]" not in text:
        text += stream.recv(4096)
    stream.close()
    return text


@contextlib.contextmanager
def serving(factory: Callable[[], Any] | None = None, **settings: Any) -> Iterator[Live]:
    """A server over a fake engine, or over what `factory` makes; settings are ServeConfig's."""
    live = Live(factory or talker(), ServeConfig(port=0, **settings))
    with idle_collector(), quick_end():
        try:
            live.start()
            yield live
        finally:
            live.stop()


@contextlib.contextmanager
def idle_collector() -> Iterator[None]:
    """Keeps workers from collecting garbage for their latency: that would walk all that other tests imported."""
    cast(Any, worker).gc = IDLE
    try:
        yield
    finally:
        cast(Any, worker).gc = gc  # the module itself: servers may end in another order than they began


@contextlib.contextmanager
def quick_end() -> Iterator[None]:
    """Has uvicorn's servers end soon after they were told to, not up to 0.3 s later."""
    uvicorn.server.asyncio = HURRIED
    try:
        yield
    finally:
        uvicorn.server.asyncio = asyncio


def talker(seconds: float | None = None, **options: Any) -> Callable[[], LLM]:
    """Makes fake engines; with `seconds` each pass takes so long and no answer ends by itself."""
    sizes = {"num_rows": 2, "max_len": 256} | options
    return lambda: fake_llm(Talker(**sizes) if seconds is None else SlowTalker(seconds, **sizes))


def wait_until(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    """Fails when it does not become true in time. A pause of the whole process counts little."""
    waited, last = 0.0, time.monotonic()
    while not is_true():
        time.sleep(0.005)
        now = time.monotonic()
        waited, last = waited + min(now - last, 0.25), now
        assert waited < seconds, "it did not happen in time"


def chat_body(text: str = "hello", **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"messages": [{"role": "user", "content": text}], **more}


def break_engine(live: Live) -> None:
    """The engine's next step fails."""

    def broken() -> Any:
        raise RuntimeError("out of luck")

    cast(Any, live.llm.engine).step = broken


def in_threads(number: int, call: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    return threads


def in_engine(live: Live, function: Any) -> Any:
    """Run a function in the engine's thread and return its result."""
    assert live._loop
    return asyncio.run_coroutine_threadsafe(live.worker.call(function), live._loop).result(30)
