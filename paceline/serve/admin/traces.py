"""Writes traces (token ids of prompts and answers) as Parquet files that `paceline train` reads.

    traces/traces-20261103T101112-5f0c22d1-00000.parquet     columns: SCHEMA; one row per answer

    paceline train --init default --answers traces     train on the recorded answers
    paceline train --init default --prompts traces     let the target answer the recorded prompts again, and train on
                                                       that

A `Trace` is one answer of the server's engine (`offer`), or of another server that `paceline record` observes. `put`
takes microseconds: it puts a function into a bounded queue, or counts a loss if the queue is full. A background thread
calls it to build the traces, redacts them (`redaction.py`) and writes them. Disk errors lose traces, never requests.
API keys and client addresses are never recorded. An answer without known token ids leaves only its prompt, for use with
`--prompts`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from paceline.data.prompts import digest
from paceline.errors import ConfigError, needing
from paceline.model.text.tokenizer import Tokenizer
from paceline.plan.clusters import label
from paceline.runs.folder import whole_file
from paceline.serve.admin.redaction import Redactor
from paceline.serve.settings import TraceConfig
from paceline.types import SamplingParams, Sequence

with needing(ConfigError, "traces are kept as Parquet, which needs pyarrow: pip install 'paceline[data]'"):
    import pyarrow as pa
    from pyarrow import parquet

    from paceline.data.answers import SCHEMA as ANSWERS

TIMES = ("queue", "prefill", "first_token", "draft", "verify", "host", "total")
_IDS, _TEXT, _SECONDS = pa.list_(pa.int32()), pa.string(), pa.float32()
SCHEMA = pa.schema(
    [
        *ANSWERS,
        # columns that regenerated answers do not have
        ("model", _TEXT),
        ("tag", _TEXT),
        ("ended", pa.timestamp("ms", "UTC")),
        ("sampling", _TEXT),
        ("seed", pa.int64()),
        ("drafted", _IDS),
        ("accepted", _IDS),
        ("num_reused", pa.int32()),
        ("drafter", _TEXT),
        ("cluster", _TEXT),
        *((f"{name}_s", _SECONDS) for name in TIMES),
    ]
)
"""Columns of a trace file. `sampling` is JSON of the parameters that differ from their defaults. `drafted` and
`accepted` list all rounds, even if redaction cut the answer. Times are in seconds, `first_token_s` and `total_s` since
arrival. Unknown values, as of other servers, are null."""
SOURCE = "traces"
SHARD = re.compile(r"traces-\d{8}T\d{6}-[0-9a-f]{8}-\d{5,}\.parquet(\.[0-9a-f]{16}\.part)?")
"""File names of shards, and of parts left by killed writers; other files in the folder are never deleted."""
log = logging.getLogger("paceline.serve")


@dataclass(frozen=True, slots=True)
class Trace:
    """Record of one request for training: its prompt, answer and statistics. Unknown values are None."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """Token ids of the answer; empty if they are unknown."""
    finish_reason: str
    ended: float | None
    """End of the answer, in seconds since 1970."""
    temperature: float | None
    sampling: dict[str, Any]
    """Sampling parameters that differ from their defaults, by name."""
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    tag: str | None = None
    model: str | None = None
    """Name of the model that answered; None for the model that the writer was created with."""
    drafted: list[int] | None = None
    """Number of drafted tokens in each round."""
    accepted: list[int] | None = None
    """Number of accepted drafts in each round."""
    num_reused: int | None = None
    """Prompt tokens reused from the prefix cache."""
    drafter: str | None = None
    """Name of the drafter in the pool."""
    cluster: str | None = None
    """Name of the request class; a client's tag in it is replaced by a hash (`clusters.label`)."""
    seconds: dict[str, float | None] = field(default_factory=dict)
    """Durations in seconds, by phase (queue, prefill, first_token, draft, verify, host, total)."""
    mark: str | None = None
    """Last part of the trace's key. A trace that may be imported again gets the same mark each time; None: a unique one
    is generated."""


class Lost(Exception):
    """Raised if a trace cannot be built. `reason`: key under which the writer counts the loss."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


Maker = Callable[[], Iterable[Trace]]
"""Function that builds traces, called in the writer's thread."""


class TraceWriter:
    """Writes traces to Parquet files in a folder. Several writers and readers may use the folder at once. `begin`
    starts the background thread that writes, `close` ends it."""

    def __init__(
        self,
        config: TraceConfig,
        model: str,
        *,
        queue_size: int = 1024,
        rows_per_file: int = 512,
        flush_s: float = 30.0,
    ) -> None:
        """A file is written after `rows_per_file` traces or `flush_s` seconds. If that fails, traces are lost and
        counted."""
        assert config.folder is not None
        self.folder = config.folder
        self.written = self.num_answers = 0
        """Traces written, and the number of them with an answer."""
        self.dropped = {"queue": 0, "disk": 0, "redaction": 0, "error": 0, "lossy": 0}
        """Reason -> lost traces: full queue, disk error, a match that could not be redacted, an exception, a lossy
        rule, and the reasons of `Lost`."""
        self._config, self._model = config, model
        self._rows_per_file, self._flush_s = rows_per_file, flush_s
        self._random = random.Random()
        self._run_id = os.urandom(4).hex()
        self._num_rows = self._num_shards = 0
        self._is_failing = self._is_closing = False
        self._is_pruned = True
        self._queue: queue.Queue[Maker | None] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None

    def begin(self, tokenizer: Tokenizer) -> None:
        """Start the writer's thread, if it is not running yet. Raises ConfigError for invalid redaction patterns."""
        if self._thread is None:
            self._tokenizer = tokenizer
            self._redactor = Redactor(self._config.redact, tokenizer) if self._config.redact else None
            self._thread = threading.Thread(target=self._run, name="paceline-traces", daemon=True)
            self._thread.start()

    def offer(self, sequence: Sequence, outcome: str, tag: str | None = None) -> None:
        """Record a finished request. `outcome`: finish reason; `tag`: the client's label. Never waits or raises. Skips
        requests with mocked acceptance, whose text is meaningless. Counts lossy requests as lost, because drafters must
        not be trained on text that the target would reject."""
        if sequence.ledger:
            self.lose("lossy")
        elif sequence.lossless:
            ended, total_s = time.time(), time.perf_counter() - sequence.timings.arrival_s
            self.put(lambda: [_served(sequence, outcome, tag, ended, total_s)])

    def put(self, maker: Maker, *, wait: bool = False, is_full: bool = False) -> bool:
        """Queue a request's traces, to be built and written in the writer's thread. Returns True if they were queued.
        Never raises. Only a random share of the calls (`TraceConfig.sample`) is used, all others return False.

        `maker`: function that builds the traces. `wait`: if the queue is full, True waits until it has room, False
        drops the traces. `is_full`: True drops the traces, because a limit of the caller is reached. After `close`, all
        traces are dropped. A drop is counted as one lost trace.
        """
        if self._random.random() >= self._config.sample:
            return False
        try:
            if self._is_closing or is_full:
                raise queue.Full
            self._queue.put(maker, block=wait)
        except queue.Full:
            self.lose("queue")
            return False
        return True

    def lose(self, reason: str) -> None:
        """Count a trace as lost. `reason`: key of `dropped`, such as "queue" or "disk"."""
        if reason == "queue" and not self.dropped.get(reason):
            log.warning("traces are lost: answers come faster than they can be read")
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def close(self, timeout_s: float = 30.0) -> None:
        """Write the queued traces and end the thread; waits at most `timeout_s` seconds."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes the thread, as a full queue does
        if self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        rows: list[dict[str, Any]] = []
        due = time.monotonic()
        while not (self._is_closing and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                maker = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                rows += self._rows(maker) if maker else []
            if len(rows) >= self._rows_per_file or time.monotonic() >= due:
                self._flush(rows)
                rows, due = [], time.monotonic() + self._flush_s
        self._flush(rows)

    def _rows(self, maker: Maker) -> list[dict[str, Any]]:
        """Build rows of the traces that can be recorded; counts the others as lost."""
        rows: list[dict[str, Any]] = []
        try:
            for trace in maker():
                if row := self._row(trace):
                    rows.append(row)
                else:
                    self.lose("redaction")
        except Lost as lost:
            self.lose(lost.reason)
        except Exception:  # one broken trace must not end the recording of all others
            log.exception("a trace is lost")
            self.lose("error")
        return rows

    def _row(self, trace: Trace) -> dict[str, Any] | None:
        """Build one row; returns None if it cannot be redacted."""
        prompt_ids, answer_ids, outcome = trace.prompt_ids, trace.answer_ids, trace.finish_reason
        tag, sampling = trace.tag, trace.sampling
        if redactor := self._redactor:
            redacted = redactor.tokens(prompt_ids, answer_ids)
            if redacted is None:
                return None
            outcome = outcome if len(redacted[1]) == len(answer_ids) else "redacted"
            prompt_ids, answer_ids = redacted
            tag, sampling = redactor.value(tag), redactor.value(sampling)
        self._num_rows += 1
        is_ended = bool(answer_ids) and answer_ids[-1] in trace.eos_token_ids
        temperature = "unknown" if trace.temperature is None else f"{trace.temperature:g}"
        return {
            # The part before the @ identifies the prompt, so that repeated prompts are on the same side of a held-out
            # split.
            "key": f"{SOURCE}/{digest(prompt_ids)}@{temperature}#{trace.mark or f'{self._run_id}-{self._num_rows}'}",
            "source": SOURCE,
            "turn": 0,
            "temperature": trace.temperature,
            "prompt_ids": np.array(prompt_ids, np.int32),
            "answer_ids": np.array(answer_ids, np.int32),
            "finish_reason": outcome,
            "text": self._tokenizer.decode(answer_ids[:-1] if is_ended else answer_ids),  # the end token is no text
            "model": trace.model or self._model,
            "tag": tag and tag.encode(errors="replace").decode(),
            "ended": None if trace.ended is None else int(trace.ended * 1000),
            "sampling": json.dumps(sampling),
            "seed": trace.seed,
            "drafted": trace.drafted,
            "accepted": trace.accepted,
            "num_reused": trace.num_reused,
            "drafter": trace.drafter,
            "cluster": trace.cluster if tag == trace.tag else None,  # the digest would identify a redacted tag
            **{f"{name}_s": trace.seconds.get(name) for name in TIMES},
        }

    def _flush(self, rows: list[dict[str, Any]]) -> None:
        """Write one shard atomically, then delete old ones. Rows that cannot be written are counted as lost."""
        try:
            if rows:
                self._write(rows)
        except (OSError, pa.ArrowException, MemoryError) as error:
            self.dropped["disk"] += len(rows)
            if not self._is_failing:
                log.warning("traces are lost, %s", error)
            self._is_failing = True
            return
        if self._is_failing and rows:
            log.warning("traces are written again; %d were lost", self.dropped["disk"])
            self._is_failing = False
        try:
            self._prune()
            self._is_pruned = True
        except OSError as error:
            if self._is_pruned:
                log.warning("old traces are not deleted, %s: delete them, or give them to this user", error)
            self._is_pruned = False

    def _write(self, rows: list[dict[str, Any]]) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self.folder / f"traces-{stamp}-{self._run_id}-{self._num_shards:05d}.parquet"
        table, rows = self._table(rows)
        if not rows:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # users' texts are private
        with whole_file(path, "free space, or make it writable", mode=0o600) as scratch, scratch.open("wb") as file:
            parquet.write_table(table, file, compression="zstd")
        self._num_shards += 1
        self.written += len(rows)
        self.num_answers += sum(len(row["answer_ids"]) > 0 for row in rows)

    def _table(self, rows: list[dict[str, Any]]) -> tuple[pa.Table, list[dict[str, Any]]]:
        """Return the rows as a table, and the rows in it; rows that do not fit the schema are counted as lost."""
        unfit = (pa.ArrowException, OverflowError, TypeError, ValueError)
        with contextlib.suppress(*unfit):
            return pa.Table.from_pylist(rows, SCHEMA), rows
        valid: list[dict[str, Any]] = []
        for row in rows:
            try:
                pa.Table.from_pylist([row], SCHEMA)
                valid.append(row)
            except unfit as error:
                log.warning("a trace is lost, as it fits no column: %s", " ".join(str(error).split()))
                self.lose("error")
        return pa.Table.from_pylist(valid, SCHEMA), valid

    def _prune(self) -> None:
        """Delete the oldest shards and parts until age and total size are within their limits. Continues after a file
        that cannot be deleted, and raises the first such OSError at the end."""
        shards = sorted(
            filter(None, (_aged(path) for path in self.folder.glob("traces-*") if SHARD.fullmatch(path.name)))
        )
        num_bytes, oldest = sum(size for _, _, size in shards), time.time() - 86400 * self._config.max_days
        refusals = list[OSError]()
        for changed, path, size in shards:
            if num_bytes <= self._config.max_bytes and changed >= oldest:
                break
            try:
                path.unlink(missing_ok=True)  # another writer may have deleted it
                num_bytes -= size
            except OSError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]


def _served(seq: Sequence, outcome: str, tag: str | None, ended: float, total_s: float) -> Trace:
    """Return the trace of a request that the engine answered."""
    times = seq.timings
    seconds: dict[str, float | None] = {name: getattr(times, f"{name}_s") for name in TIMES if name != "total"}
    seconds |= {"first_token": times.first_token_s - times.arrival_s if times.first_token_s else None, "total": total_s}
    return Trace(
        prompt_ids=seq.tokens[: seq.prompt_len],
        answer_ids=seq.output_ids,
        finish_reason=outcome,
        ended=ended,
        temperature=seq.params.temperature,
        sampling=given(seq.params),
        eos_token_ids=tuple(seq.eos_token_ids),
        seed=seq.seed,
        tag=tag,
        drafted=[one.num_drafted for one in seq.rounds],
        accepted=[one.num_accepted for one in seq.rounds],
        num_reused=seq.num_reused,
        drafter=seq.drafter or None,
        cluster=label(seq.cluster) if seq.cluster else None,
        seconds=seconds,
    )


def given(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that a trace records, as name -> value: those that differ from their defaults, but
    not `prediction`. The numbers in logit_bias become strings, because JSON has no -inf."""
    defaults = asdict(SamplingParams())
    values = {name: value for name, value in asdict(params).items() if value != defaults[name]}
    values.pop("prediction", None)
    if bias := values.get("logit_bias"):
        values["logit_bias"] = {str(token): str(number) for token, number in bias.items()}
    return values


def _aged(path: Path) -> tuple[float, Path, int] | None:
    """Return (modification time, path, bytes); None for a folder or a deleted file."""
    try:
        stat = path.lstat()
    except FileNotFoundError:
        return None
    if not S_ISREG(stat.st_mode):
        return None
    return stat.st_mtime, path, stat.st_size
