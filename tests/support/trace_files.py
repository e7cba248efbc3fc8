"""Requests of bytes that are over, and what a writer makes of them; for the tests of traces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

from doubles import ByteTokenizer
from pyarrow import parquet

from paceline.serve.admin.traces import TraceWriter
from paceline.serve.settings import TraceConfig
from paceline.types import Round, SamplingParams, Sequence, Timings

MAIL = r"[\w.+-]+@[\w-]+\.[\w.-]+"
BYTES = ByteTokenizer()


def sequence(prompt: str = "Say it.", answer: str = "It.", **changes: Any) -> Sequence:
    """A finished request of bytes."""
    prompt_ids = BYTES.encode(prompt)
    params = SamplingParams(**({"seed": 5} | changes))
    seq = Sequence(0, prompt_ids + list(answer.encode()) + [257], len(prompt_ids), params, eos_token_ids=(257,))
    seq.timings = Timings(arrival_s=time.perf_counter() - 1.0, first_token_s=time.perf_counter() - 0.75, draft_s=0.125)
    seq.rounds = [Round(3, 2), Round(3, 0), Round(1, 1)]
    return seq


def writer(folder: Path, **options: Any) -> TraceWriter:
    config = {name: options.pop(name) for name in ("sample", "redact", "max_bytes", "max_days") if name in options}
    one = TraceWriter(TraceConfig(folder, **config), "tiny", **options)
    one.begin(cast(Any, BYTES))
    return one


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        row for path in sorted(folder.glob("traces-*.parquet")) for row in parquet.ParquetFile(path).read().to_pylist()
    ]


def written(folder: Path, *sequences: Sequence, **options: Any) -> list[dict[str, Any]]:
    """Traces that one writer writes for these requests."""
    one = writer(folder, **options)
    for seq in sequences:
        one.offer(seq, "stop", "a tag")
    one.close()
    return rows(folder)
