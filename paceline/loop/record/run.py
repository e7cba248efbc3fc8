"""The library calls of `paceline record`: `proxy` runs the proxy, `read` imports files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from types import FrameType

from paceline.config import short_name
from paceline.errors import CacheError, ConfigError, PromptError, needing, reraised
from paceline.hub import resolve
from paceline.loop.record import otlp, vllm_log
from paceline.loop.record.config import RecordConfig
from paceline.loop.record.defaults import defaults_of, described
from paceline.loop.record.exchange import Observed
from paceline.loop.record.reader import Reader
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import SILENT, Progress
from paceline.serve.admin.traces import Trace, TraceWriter
from paceline.serve.settings import ServeConfig, TraceConfig

with needing(ConfigError, "recording needs the libraries of a server: pip install 'paceline[serve,data]'"):
    import uvicorn
    from pyarrow import parquet

    from paceline.loop.record.metrics import RecordMetrics
    from paceline.loop.record.proxy import Proxy
    from paceline.serve.run import SWITCH_SECONDS, listen, settings_of

MAX_WAITING_BYTES = 256 * 2**20
"""Limit, in bytes, of exchanges waiting to be parsed; further exchanges are dropped and counted."""
CLOSE_S = 600.0
"""Longest wait, in seconds, for the last imported traces to be written."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Result of a recording: where the traces are, and how many requests were recorded or dropped."""

    folder: Path
    num_written: int
    num_answers: int = 0
    """Number of traces with an answer; the others have only a prompt."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of requests or answers that were not recorded. One reason is different: "rounds" counts recorded
    answers without their rounds, because the server's report on them was invalid."""


class Recorder:
    """Queues the requests and answers that the proxy has forwarded, until the trace writer's thread parses them. While
    more than 256 MiB (MAX_WAITING_BYTES) are queued, new ones are dropped. Never blocks or raises."""

    def __init__(self, reader: Reader, writer: TraceWriter) -> None:
        self._reader, self._writer = reader, writer
        self._num_taken = self._num_read = 0
        """Bytes queued and parsed; each counter is written by one thread only."""

    def waiting_bytes(self) -> int:
        return self._num_taken - self._num_read

    def keep(self, observed: Observed) -> None:
        is_full = self.waiting_bytes() > MAX_WAITING_BYTES
        if self._writer.put(partial(self._traces, observed), is_full=is_full):
            self._num_taken += observed.num_bytes

    def _traces(self, observed: Observed) -> Iterator[Trace]:
        self._num_read += observed.num_bytes
        yield from self._reader.traces(observed.exchange())


class Server(uvicorn.Server):
    """Uvicorn server of the proxy. On a signal it finishes the answers in flight; on a second one it stops at once."""

    def __init__(
        self, upstream: str, serving: ServeConfig, keep: Callable[[Observed], None], add_fields: str = "none"
    ) -> None:
        self.proxy = Proxy(upstream, serving, keep, add_fields)
        super().__init__(settings_of(self.proxy, serving, close_seconds=serving.drain_seconds, dated=False))

    async def run_on(self, bound: socket) -> None:
        """Serves on the bound socket until a signal (SIGINT, SIGTERM) stops it."""
        try:
            await self.serve(sockets=[bound])
        finally:
            await self.proxy.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit, self.should_exit = self.should_exit, True


def proxy(config: RecordConfig, serving: ServeConfig, tracing: TraceConfig, *, progress: Progress = SILENT) -> Recorded:
    """Runs a proxy that forwards requests to the server `config.upstream` and records them with their answers as traces
    (token ids). Returns when a signal (SIGINT, SIGTERM) stops it. `serving`: address and limits of the proxy;
    `tracing`: folder of the traces, and limits on their size and age.

    Raises ConfigError if the port is taken or no trace folder is set. If the model's tokenizer cannot be loaded, raises
    ModelNotFoundError, ModelFileError, UnsupportedModelError or DownloadError."""
    assert config.upstream is not None
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # hides errors on answers truncated by the upstream
    sys.setswitchinterval(SWITCH_SECONDS)
    with listen(serving) as bound:
        writer, reader = _store(config, tracing)
        host, port = bound.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        progress.say(f"recording: ask {address} in place of {config.upstream}")
        progress.say(f"requests that name no temperature: {described(reader.defaults)}")
        recorder = Recorder(reader, writer)
        try:
            server = Server(config.upstream, serving, recorder.keep, config.add_fields)
            with _metrics(config, server, recorder, writer):
                asyncio.run(server.run_on(bound))
        finally:
            writer.close()
    return _done(writer)


@contextlib.contextmanager
def _metrics(config: RecordConfig, server: Server, recorder: Recorder, writer: TraceWriter) -> Iterator[None]:
    """Serves the proxy's metrics if `config.metrics_port` is set. Raises ConfigError if the port is taken."""
    if config.metrics_port is None:
        yield
        return
    what, advice = f"port {config.metrics_port} cannot be opened", "choose another --metrics-port"
    with reraised(ConfigError, what, advice, OSError):
        serving = RecordMetrics(server.proxy, recorder.waiting_bytes, writer).serve(config.metrics_port)
    try:
        yield
    finally:
        serving.shutdown()
        serving.server_close()


def read(config: RecordConfig, tracing: TraceConfig, *, progress: Progress = SILENT) -> Recorded:
    """Converts the log files in `config.imports` to traces (token ids of requests and answers) in `tracing.folder`.
    Requests that an earlier import has already written to this folder are skipped.

    Raises PromptError if a file is damaged, of an unknown format or without usable requests; the error names the file.
    No trace of this file is written then; traces of earlier files are kept."""
    writer, reader = _store(config, tracing)
    known = _known(writer.folder)
    try:
        for path in config.imports:
            exchanges = otlp.exchanges if _is_json(path) else partial(vllm_log.exchanges, tokenizer=reader.tokenizer)
            deque(exchanges(path), maxlen=0)  # raises on a damaged file before any of its traces is written
            progress.say(f"reading {path}")
            for exchange in exchanges(path):
                if exchange.mark in known:
                    writer.lose("known")
                    continue
                known.add(str(exchange.mark))
                writer.put(partial(reader.traces, exchange), wait=True)
    finally:
        writer.close(CLOSE_S)
    return _done(writer)


def _store(config: RecordConfig, tracing: TraceConfig) -> tuple[TraceWriter, Reader]:
    if tracing.folder is None:
        raise ConfigError("give the folder that keeps the traces: --out STORE")
    with reraised(CacheError, f"cannot write {tracing.folder}", "choose another --out", OSError):
        tracing.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    model = resolve(config.model)
    tokenizer, defaults = Tokenizer.from_path(model), defaults_of(config.sampling_defaults, model)
    writer = TraceWriter(tracing, config.served_names[0] if config.served_names else short_name(config.model))
    writer.begin(tokenizer)
    return writer, Reader(tokenizer, config.served_names, defaults, writer.lose)


def _known(folder: Path) -> set[str]:
    """Returns the marks of the exchanges that the folder has traces of; skips unreadable files."""
    marks = set[str]()
    for path in folder.glob("traces-*.parquet"):
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            keys = parquet.ParquetFile(path).read(["key"])["key"].to_pylist()
            marks.update(key.rpartition("#")[2].rpartition("-")[0] for key in keys if key)
    return marks


def _done(writer: TraceWriter) -> Recorded:
    dropped = {reason: number for reason, number in writer.dropped.items() if number}
    return Recorded(writer.folder, writer.written, writer.num_answers, dropped)


def _is_json(path: Path) -> bool:
    """True if the file is JSON lines rather than a log: its first character is "{"."""
    with reraised(PromptError, f"cannot read {path}", "check --import", OSError), path.open("rb") as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"{")
