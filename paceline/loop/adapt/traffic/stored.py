"""Reads stored traces (records of served requests): as hourly sums for a policy, and as requests to score a drafter
with. Unusable traces are counted.

    hours, left_out = read_hours(Path("traces"))
    requests, left_out = read_requests(Path("traces"), cluster="tickets", since=hour)

A trace's cluster (group of similar requests) is its `cluster`, else its tag, else "default". Only rounds in which
drafts were verified count. A prompt counts at most MOST_REPEATS times an hour, so that no client dominates."""

from __future__ import annotations

import json
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.tags import check_tags, has_tag
from paceline.errors import ConfigError, PacelineError, needing
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums
from paceline.plan.clusters import OTHER
from paceline.types import GrammarSpec, SamplingParams

with needing(ConfigError, "traces are Parquet, which needs pyarrow: pip install 'paceline[adapt]'"):
    import pyarrow as pa
    from pyarrow import parquet

MOST_REPEATS = 3
"""Maximum number of answers to one prompt that count within an hour."""
DEFAULT = "default"
_NEEDED = ("key", "ended", "drafted", "accepted")
_OPTIONAL = ("cluster", "tag")
_REQUEST = ("temperature", "prompt_ids", "answer_ids", "sampling", "seed", "finish_reason")
FIRST_YEAR, _AHEAD_S = 1_577_836_800, 3600.0
"""Earliest valid time of a trace (2020), and seconds that it may be in the future; others come from a wrong clock."""


@dataclass(frozen=True, slots=True)
class Request:
    """A finished request, read from its trace. `hour` counts from 1970; a cluster is a group of similar requests."""

    key: str
    cluster: str
    hour: int
    prompt_ids: list[int]
    answer_ids: list[int]
    params: SamplingParams
    seed: int
    finish_reason: str
    knows_temperature: bool = True
    """False if the trace has no temperature: other servers may use a default of their own."""

    @property
    def prompt(self) -> str:
        """Identifier of the prompt; equal prompts have the same one."""
        return _prompt_of(self.key)


def read_hours(
    folder: Path, since: int = 0, now: float | None = None
) -> tuple[dict[int, dict[str, Sums]], Counter[str]]:
    """Reads the traces in a folder as hourly sums. Returns ({hour: {cluster: sums of tokens and rounds}}, {reason:
    number of traces left out}) from the hour `since` on, in hours since 1970.

    `now`: current time in seconds since 1970 [default: the clock's]. Traces that ended more than an hour later are left
    out, because a wrong clock wrote them. Damaged files are left out and counted, too. Raises ConfigError if the folder
    does not exist."""
    rounds: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    left_out, seen = Counter[str](), Counter[tuple[int, str]]()
    for row in _rows(folder, (), left_out, since * HOUR_S):
        if (hour := _hour_of(row, since, now, seen, left_out)) is not None:
            rounds[hour][_cluster(row)].append(_figures(row))
    return {hour: {name: Sums.of(pairs) for name, pairs in by.items()} for hour, by in rounds.items()}, left_out


def read_span(folder: Path, begin_s: float, end_s: float) -> dict[str, Sums]:
    """Reads the traces in a folder. Returns {cluster: sums of tokens and rounds} of the requests that ended in
    [`begin_s`, `end_s`), in seconds since 1970. Raises ConfigError if the folder does not exist."""
    rounds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    left_out, seen = Counter[str](), Counter[tuple[int, str]]()
    for row in _rows(folder, (), left_out, begin_s):
        is_within = row["ended"] is not None and begin_s <= row["ended"] < end_s
        if is_within and _hour_of(row, 0, end_s, seen, left_out) is not None:
            rounds[_cluster(row)].append(_figures(row))
    return {name: Sums.of(pairs) for name, pairs in rounds.items()}


def read_requests(
    folder: Path,
    cluster: str | None = None,
    since: int = 0,
    until: int | None = None,
    now: float | None = None,
    *,
    exact: bool = True,
    usual: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    tracked: Sequence[str] = (),
) -> tuple[list[Request], Counter[str]]:
    """Reads stored requests from the traces in a folder. Returns (requests, {reason: number of traces left out}), for
    hours [since, until) since 1970 and `cluster` (None: all clusters).

    - `now`: current time in seconds since 1970 [default: the clock's]; traces that ended more than an hour later are
      left out.
    - `tags`: only requests with one of these tags (empty: all requests). Raises ConfigError for a tag that no trace
      has.
    - `tracked`: clusters that stay separate; all others are read as one cluster named "other" (empty: every cluster
      stays separate).
    - `usual`: sampling settings to assume for requests whose trace has no temperature, such as {"temperature": 0.6}.
    - `exact`: True leaves out requests whose temperature is unknown: it is missing in the trace, and `usual` is None.
      False returns them, but they can only be used for training."""
    check_tags(folder, tags)
    requests: list[Request] = []
    left_out, seen = Counter[str](), Counter[tuple[int, str]]()
    for row in _rows(folder, _REQUEST, left_out, since * HOUR_S):
        if not has_tag(row, tags):
            continue
        hour, own_cluster = _hour_of(row, since, now, seen, left_out, needs_rounds=False), _cluster(row)
        own_cluster = OTHER if tracked and own_cluster not in tracked else own_cluster
        if hour is None or (until is not None and hour >= until) or cluster not in (None, own_cluster):
            continue
        has_temperature = row["temperature"] is not None
        try:
            params = params_of(row["sampling"], None if has_temperature else usual)
        except (PacelineError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            left_out["unknown sampling"] += 1
            continue
        if exact and not has_temperature and usual is None:
            left_out["unknown temperature"] += 1
            continue
        if not row["answer_ids"] or not row["prompt_ids"] or row["finish_reason"] not in ("stop", "length"):
            left_out["cut short"] += 1
            continue
        key, prompt_ids, answer_ids, seed = row["key"], row["prompt_ids"], row["answer_ids"], row["seed"] or 0
        about = (params, seed, row["finish_reason"], has_temperature)
        requests.append(Request(key, own_cluster, hour, prompt_ids, answer_ids, *about))
    return requests, left_out


def params_of(text: str | None, usual: Mapping[str, Any] | None = None) -> SamplingParams:
    """Converts the `sampling` column of a trace to sampling settings. `text`: JSON with the settings that differ from
    the defaults; None if all are defaults. `usual`: defaults to use in place of paceline's, for traces of another
    server. Raises ValueError or a PacelineError if the JSON is invalid."""
    values: dict[str, Any] = {**(usual or {}), **json.loads(text or "{}")}
    if bias := values.get("logit_bias"):
        values["logit_bias"] = {int(token): float(number) for token, number in bias.items()}
    if grammar := values.get("grammar"):
        values["grammar"] = GrammarSpec(**grammar)
    return SamplingParams(**values)


def _rows(folder: Path, more: tuple[str, ...], left_out: Counter[str], since_s: float) -> Iterator[dict[str, Any]]:
    """Yields rows of every readable shard not written before `since_s`, oldest shard first.

    `ended` is in seconds since 1970. Damaged shards, and those of other formats, are left out and counted."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder of traces at {folder}: keep some with paceline serve --traces")
    for path in sorted(folder.glob("traces-*.parquet")):
        try:
            if path.stat().st_mtime < since_s:
                continue
            file = parquet.ParquetFile(path)
            names = file.schema_arrow.names
            wanted = [name for name in (*_NEEDED, *more, *_OPTIONAL) if name in names]
            if not {*_NEEDED, *more} <= set(wanted):
                left_out["shard without the columns of traces"] += 1
                continue
            if not all(_TYPES[name](file.schema_arrow.field(name).type) for name in wanted):
                left_out["shard whose columns have other types"] += 1
                continue
            rows = _rows_of(file.read(wanted))
        except (pa.ArrowException, OSError, ValueError, OverflowError):
            left_out["damaged shard"] += 1
            continue
        for row in rows:
            if _is_sound(row):
                yield row
            else:
                left_out["damaged row"] += 1


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)


def _is_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return pa.types.is_null(kind) or (
        is_list and (pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))
    )


_TYPES: Mapping[str, Callable[[pa.DataType], bool]] = {
    **dict.fromkeys(("key", "cluster", "tag", "sampling", "finish_reason"), _is_text),
    **dict.fromkeys(("drafted", "accepted", "prompt_ids", "answer_ids"), _is_list),
    "ended": lambda kind: pa.types.is_timestamp(kind) or pa.types.is_null(kind),
    "seed": lambda kind: pa.types.is_integer(kind) or pa.types.is_null(kind),
    "temperature": lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind),
}


def _rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Converts to rows with `ended` in seconds: datetime cannot hold the year 292,277,026, which a column may have."""
    at, kind = table.schema.get_field_index("ended"), table.schema.field("ended").type
    if not pa.types.is_timestamp(kind):
        return table.to_pylist()
    rows = table.set_column(at, "ended", table["ended"].cast(pa.int64())).to_pylist()
    return [row | {"ended": None if row["ended"] is None else row["ended"] / _PER_S[kind.unit]} for row in rows]


_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def _is_sound(row: Mapping[str, Any]) -> bool:
    """True if a row is consistent: no null or negative numbers, no more drafts accepted than drafted."""
    lists = [row[name] for name in ("drafted", "accepted", "prompt_ids", "answer_ids") if row.get(name) is not None]
    if row["key"] is None or any(number is None or number < 0 for numbers in lists for number in numbers):
        return False
    return not _has_rounds(row) or all(map(operator.le, row["accepted"], row["drafted"]))


def _hour_of(
    row: Mapping[str, Any],
    since: int,
    now: float | None,
    seen: Counter[tuple[int, str]],
    left_out: Counter[str],
    *,
    needs_rounds: bool = True,
) -> int | None:
    """Returns the hour of a row that counts, else None."""
    stamp = row["ended"] if row["ended"] is not None else 0.0
    if not FIRST_YEAR <= stamp <= (time.time() if now is None else now) + _AHEAD_S:
        left_out["impossible time"] += 1
        return None
    hour = int(stamp // HOUR_S)
    if hour < since:
        return None
    if needs_rounds and not _has_rounds(row):
        left_out["no rounds"] += 1
        return None
    mark = hour, _prompt_of(row["key"])
    seen[mark] += 1
    if seen[mark] > MOST_REPEATS:
        left_out["repeats itself"] += 1
        return None
    return hour


def _cluster(row: Mapping[str, Any]) -> str:
    return row.get("cluster") or row.get("tag") or DEFAULT


def _has_rounds(row: Mapping[str, Any]) -> bool:
    return bool(row["drafted"]) and row["accepted"] is not None and len(row["drafted"]) == len(row["accepted"])


def _figures(row: Mapping[str, Any]) -> tuple[float, float]:
    """Returns (tokens, rounds) of rounds that verified drafts; zeros if unknown."""
    if not _has_rounds(row):
        return 0.0, 0.0
    drafted, accepted = np.array(row["drafted"]), np.array(row["accepted"])
    checked = drafted > 0
    rounds = int(checked.sum())
    return float(accepted[checked].sum() + rounds), float(rounds)


def _prompt_of(key: str) -> str:
    return key.rsplit("@", 1)[0]
