"""Traces: what was asked and answered, token by token, as Parquet that `paceline train` reads as it is.

    traces/traces-20261103T101112-5f0c22d1-00000.parquet     columns: SCHEMA; one row per answer

    paceline train --init default --answers traces     learn from the answers themselves
    paceline train --init default --prompts traces     ask the target the same prompts again, and learn from that

`offer` costs the engine's thread microseconds: it drops a reference into a bounded queue, or counts a loss when that is full.
A thread of its own decodes, redacts and writes. A disk that refuses loses traces, never requests. No API key and no address of
a client ever comes here. The first columns are those of `train/answers.py`; neither part imports the other, a test compares.

What the patterns of `--trace-redact` match never reaches the disk, and what is kept is still sound to learn from. A drafter
learns what its target says after exactly these tokens. So a redacted answer is not patched but ends before the first match, and
when the prompt itself is redacted the answer, which was given to something else, is left out whole: such a trace is one more
prompt for `paceline train --prompts`, which asks the target anew, and no answer for `--answers`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import random
import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError, needing, reraised
from paceline.model.tokenizer import Tokenizer
from paceline.runlog import whole_file
from paceline.serve.settings import TraceConfig
from paceline.types import SamplingParams, Sequence

with needing(ConfigError, "traces are kept as Parquet, which needs pyarrow: pip install 'paceline[data]'"):
    import pyarrow as pa
    from pyarrow import parquet

_IDS, _TEXT, _SECONDS = pa.list_(pa.int32()), pa.string(), pa.float32()
SCHEMA = pa.schema(
    [
        ("key", _TEXT),
        ("source", _TEXT),
        ("turn", pa.int32()),
        ("temperature", pa.float32()),
        ("prompt_ids", _IDS),
        ("answer_ids", _IDS),
        ("finish_reason", _TEXT),
        ("text", _TEXT),
        # what regenerated answers do not have
        ("model", _TEXT),
        ("tag", _TEXT),
        ("ended", pa.timestamp("ms", "UTC")),
        ("sampling", _TEXT),
        ("seed", pa.int64()),
        ("drafted", _IDS),
        ("accepted", _IDS),
        ("num_reused", pa.int32()),
        *((f"{name}_s", _SECONDS) for name in ("queue", "prefill", "first_token", "draft", "verify", "host", "total")),
    ]
)
"""`sampling` is JSON of the parameters that differ from their defaults; `drafted` and `accepted` are by round, whole even where
redaction cut the answer; times are seconds, `first_token_s` and `total_s` from arrival."""
SOURCE, PLACEHOLDER = "traces", "[redacted]"
Redacted = tuple[list[int], list[int]]
"""A trace's tokens of prompt and answer without what was matched."""
log = logging.getLogger("paceline.serve")


@dataclass(frozen=True, slots=True)
class _Trace:
    """A finished request on its way to the disk."""

    sequence: Sequence
    outcome: str
    tag: str | None
    ended: float
    """Seconds since 1970."""
    total_s: float


class TraceWriter:
    """Writes shards of traces into a folder, from a thread of its own that ends with `close`.

    The folder may be used by several writers, and by readers, at the same time.
    """

    def __init__(
        self,
        config: TraceConfig,
        model: str,
        *,
        queue_size: int = 1024,
        rows_per_file: int = 512,
        flush_s: float = 30.0,
    ) -> None:
        """Writes when `begin` has been called. A folder that cannot be written only costs traces."""
        assert config.folder is not None
        self.folder = config.folder
        self.written = 0
        self.dropped = {"queue": 0, "disk": 0, "redaction": 0, "error": 0}
        """Traces lost, by what lost them: a full queue, a disk that refused, a match that could not be taken out, an error."""
        self._config, self._model = config, model
        self._rows_per_file, self._flush_s = rows_per_file, flush_s
        self._random = random.Random()
        self._run_id = os.urandom(4).hex()
        self._num_rows = self._num_shards = 0
        self._is_failing = self._is_closing = False
        self._queue: queue.Queue[_Trace | None] = queue.Queue(queue_size)
        self._thread: threading.Thread | None = None

    def begin(self, tokenizer: Tokenizer) -> None:
        """Start writing, once. Raises ConfigError on patterns that cannot be used."""
        if self._thread is None:
            self._tokenizer = tokenizer
            self._redactor = Redactor(self._config.redact, tokenizer) if self._config.redact else None
            self._thread = threading.Thread(target=self._run, name="paceline-traces", daemon=True)
            self._thread.start()

    def offer(self, sequence: Sequence, outcome: str, tag: str | None = None) -> None:
        """Trace a finished request, whose sequence changes no more; never waits, never raises.

        Requests with mocked acceptance are left out: nobody would say such a text.
        """
        if self._random.random() >= self._config.sample or not sequence.lossless:
            return
        total_s = time.perf_counter() - sequence.timings.arrival_s
        try:
            if self._is_closing:
                raise queue.Full
            self._queue.put_nowait(_Trace(sequence, outcome, tag, time.time(), total_s))
        except queue.Full:
            self.dropped["queue"] += 1

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is queued and end the thread; gives up after `timeout_s` on a disk that hangs."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes it; a full queue does, too
        if self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        rows: list[dict[str, Any]] = []
        due = time.monotonic()
        while not (self._is_closing and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                trace = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                rows += filter(None, [trace and self._safe_row(trace)])
            if len(rows) >= self._rows_per_file or time.monotonic() >= due:
                self._flush(rows)
                rows, due = [], time.monotonic() + self._flush_s
        self._flush(rows)

    def _safe_row(self, trace: _Trace) -> dict[str, Any] | None:
        """The trace as a row; None, and counted, when it cannot be made into one."""
        try:
            row = self._row(trace)
            self.dropped["redaction"] += row is None
            return row
        except Exception:  # whatever is odd about one request must not end the tracing of all others
            log.exception("a trace is lost")
            self.dropped["error"] += 1
            return None

    def _row(self, trace: _Trace) -> dict[str, Any] | None:
        """None when what should be redacted cannot be taken out."""
        seq, times, redactor = trace.sequence, trace.sequence.timings, self._redactor
        prompt_ids, answer_ids, outcome = seq.tokens[: seq.prompt_len], seq.output_ids, trace.outcome
        tag, sampling = trace.tag, _given(seq.params)
        if redactor:
            redacted = redactor.tokens(prompt_ids, answer_ids)
            if redacted is None:
                return None
            outcome = outcome if len(redacted[1]) == len(answer_ids) else "redacted"
            prompt_ids, answer_ids = redacted
            tag, sampling = _redacted(tag, redactor), _redacted(sampling, redactor)
        self._num_rows += 1
        prompt = np.array(prompt_ids, np.int32)
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()
        is_ended = bool(answer_ids) and answer_ids[-1] in seq.eos_token_ids
        return {
            # Up to the @ it names the prompt: what is asked twice is held out twice, or not at all.
            "key": f"{SOURCE}/{digest}@{seq.params.temperature:g}#{self._run_id}-{self._num_rows}",
            "source": SOURCE,
            "turn": 0,
            "temperature": seq.params.temperature,
            "prompt_ids": prompt,
            "answer_ids": np.array(answer_ids, np.int32),
            "finish_reason": outcome,
            "text": self._tokenizer.decode(answer_ids[:-1] if is_ended else answer_ids),  # the end token is no text
            "model": self._model,
            "tag": tag and tag.encode(errors="replace").decode(),
            "ended": int(trace.ended * 1000),
            "sampling": json.dumps(sampling),
            "seed": seq.seed,
            "drafted": [one[0] for one in seq.rounds],
            "accepted": [one[1] for one in seq.rounds],
            "num_reused": seq.num_reused,
            **{f"{name}_s": getattr(times, f"{name}_s") for name in ("queue", "prefill", "draft", "verify", "host")},
            "first_token_s": times.first_token_s - times.arrival_s if times.first_token_s else None,
            "total_s": trace.total_s,
        }

    def _flush(self, rows: list[dict[str, Any]]) -> None:
        """Write one shard, whole or not at all, and keep to the limits. What cannot be written is counted, not kept."""
        num_unwritten = len(rows)
        try:
            if rows:
                self._write(rows)
                num_unwritten = 0
            self._prune()
        except (OSError, pa.ArrowException, MemoryError) as error:
            self.dropped["disk"] += num_unwritten
            if not self._is_failing:
                log.warning("traces are lost, %s", error)
            self._is_failing = True
            return
        if self._is_failing and rows:
            log.warning("traces are written again; %d were lost", self.dropped["disk"])
            self._is_failing = False

    def _write(self, rows: list[dict[str, Any]]) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = self.folder / f"traces-{stamp}-{self._run_id}-{self._num_shards:05d}.parquet"
        table = pa.Table.from_pylist(rows, SCHEMA)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what users said is for the owner alone
        with (
            whole_file(path, "free space, or make it writable") as scratch,
            open(scratch, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
        ):
            parquet.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())  # some disks say only now that they are full
        self._num_shards += 1
        self.written += len(rows)

    def _prune(self) -> None:
        """Delete the oldest shards, and what killed writers left, until age and size are within their limits."""
        found = sorted(filter(None, map(_aged, self.folder.glob("traces-*"))))
        num_bytes, oldest = sum(size for _, _, size in found), time.time() - 86400 * self._config.max_days
        for changed, path, size in found:
            if num_bytes <= self._config.max_bytes and changed >= oldest:
                break
            path.unlink(missing_ok=True)
            num_bytes -= size


def _given(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults; -inf of a bias as JSON's readers take it."""
    defaults = asdict(SamplingParams())
    values = {name: value for name, value in asdict(params).items() if value != defaults[name]}
    if bias := values.get("logit_bias"):
        values["logit_bias"] = {str(token): str(number) for token, number in bias.items()}
    return values


def _redacted(value: Any, redactor: Redactor) -> Any:
    """Every text within: stop strings, a grammar."""
    if isinstance(value, dict):
        return {key: _redacted(each, redactor) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(each, redactor) for each in value]
    return redactor.text(value) if isinstance(value, str) else value


def _aged(path: Path) -> tuple[float, Path, int] | None:
    """(last change, path, bytes), or None when another writer has just deleted it."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime, path, stat.st_size


class Redactor:
    """Takes what any of the patterns matches out of text and tokens.

    Raises ConfigError on a pattern that is no regular expression, or that matches nothing at all or the placeholder.
    """

    def __init__(self, patterns: Iterable[str], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._patterns = list[re.Pattern[str]]()
        for pattern in patterns:
            what = f"the redaction pattern {pattern!r}"
            with reraised(ConfigError, f"{what} is no regular expression", "correct it", re.error):
                compiled = re.compile(pattern)
            if compiled.search("") or compiled.search(PLACEHOLDER):
                raise ConfigError(f"{what} matches even {PLACEHOLDER!r} or nothing: make it narrower")
            self._patterns.append(compiled)

    def text(self, text: str) -> str:
        """The text with a placeholder for every match."""
        for pattern in self._patterns:
            text = pattern.sub(PLACEHOLDER, text)
        return text

    def tokens(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted | None:
        """The same lists when nothing matches; None when a match remains in what could be kept: then keep nothing."""
        if self._is_clean(prompt_ids, answer_ids):
            return prompt_ids, answer_ids
        redacted = self._cut(prompt_ids, answer_ids)
        return redacted if self._is_clean(*redacted) else None

    def _is_clean(self, prompt_ids: list[int], answer_ids: list[int]) -> bool:
        """With special tokens and without, together and apart: a reader may decode either way."""
        parts = [prompt_ids + answer_ids, prompt_ids, answer_ids] if answer_ids else [prompt_ids]
        texts = [self._tokenizer.decode(ids, skip) for ids in parts for skip in (True, False)]
        return not any(pattern.search(text) for text in texts for pattern in self._patterns)

    def _cut(self, prompt_ids: list[int], answer_ids: list[int]) -> Redacted:
        ids, border = prompt_ids + answer_ids, len(prompt_ids)
        text, ends = self._ends(ids)
        matches = _merged(match.span() for pattern in self._patterns for match in pattern.finditer(text))
        places = [_tokens_of(span, ends) for span in matches]
        if not places:
            return prompt_ids, answer_ids  # it matches only where special tokens are left out
        if places[0][0] >= border:
            return prompt_ids, ids[border : places[0][0]]
        kept, at = list[int](), 0
        for begin, end in _merged(place for place in places if place[0] < border):
            first, last = ends[begin], ends[end]
            middle = text[first:last]
            for start, stop in reversed(matches):
                if start < last and stop > first:
                    middle = middle[: start - first] + PLACEHOLDER + middle[stop - first :]
            kept += ids[at:begin] + self._tokenizer.encode(middle, add_special_tokens=False)
            at = end
        return kept + ids[at:border], []

    def _ends(self, ids: list[int]) -> tuple[str, list[int]]:
        """The text, special tokens spelled out, and where in it each token begins; one place more for the end."""
        stream = self._tokenizer.stream(False)
        pieces = [stream.push([token]) for token in ids]
        pieces.append(stream.flush())
        ends = [0, *accumulate(map(len, pieces))]
        ends[-2:] = [ends[-1]]  # what the flush gave belongs to the last token
        return "".join(pieces), ends


def _tokens_of(span: tuple[int, int], ends: list[int]) -> tuple[int, int]:
    """The tokens [begin, end) that may hold a part of the text's span.

    `ends[t]` is how much text was final before token t. Tokens that made nothing final wait for their character's rest, so
    they belong to what came next.
    """
    begun = ends[bisect_right(ends, span[0]) - 1]
    return bisect_left(ends, begun), bisect_left(ends, span[1])


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, and those that overlap as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
