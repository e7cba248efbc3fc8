"""Stored requests, and traces of them, for the tests of `paceline.loop.adapt`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from paceline.loop.adapt.traffic.stored import Request
from paceline.serve.admin.traces import SCHEMA
from paceline.types import SamplingParams


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "key": "traces/a@0#1",
        "cluster": "x",
        "hour": 1,
        "prompt_ids": [1, 2],
        "answer_ids": [3, 4, 5],
    }
    values |= {"params": SamplingParams(), "seed": 1, "finish_reason": "length"}
    return Request(**(values | changes))


NOON = datetime.datetime(2026, 11, 3, 12, tzinfo=datetime.UTC)
HOUR = int(NOON.timestamp()) // 3600


def row(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "key": f"traces/{id(changes)}@0#x", "source": "traces", "turn": 0, "temperature": 0.0, "prompt_ids": [1, 2],
        "answer_ids": [3, 4, 5, 6], "finish_reason": "stop", "text": "", "model": "m", "tag": "tickets", "ended": NOON,
        "sampling": "{}", "seed": 1, "drafted": [3, 0, 3], "accepted": [1, 0, 2], "num_reused": 0,
    }  # fmt: skip
    return values | changes


def store(folder: Path, rows: list[dict[str, Any]], name: str = "traces-1.parquet") -> Path:
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(rows):
        each.setdefault("key", f"traces/{number}@0#x")
    parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), folder / name)
    return folder


def keyed(number: int, **changes: Any) -> dict[str, Any]:
    return row(key=f"traces/{number}@0#x", **changes)
