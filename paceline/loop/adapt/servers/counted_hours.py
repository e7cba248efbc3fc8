"""Hourly sums of tokens and rounds from a server's counters, for servers whose traces have no rounds: vLLM and SGLang
behind `paceline record`.

The tokens and rounds between two readings count as one request in `Sums`; all traffic is one cluster, ALL. A completed
hour is appended to `counted.jsonl`, where a restarted daemon reads it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, reraised
from paceline.loop.adapt.config import StoreConfig
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums
from paceline.loop.adapt.traffic.stored import read_hours
from paceline.runs.folder import RunFolder, append_lines

ALL = "all"
"""Cluster of all traffic, for servers that do not distinguish clusters."""
FILE = "counted.jsonl"
"""Name of the file of completed hours in the state folder."""


@dataclass(slots=True)
class CountedHours:
    """Computes hourly sums of tokens and rounds from readings of a server's counters, for servers whose traces contain
    no rounds. Stores them in counted.jsonl in `folder`."""

    folder: Path
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of lines of counted.jsonl that the latest call of `hours` left out."""
    _before: tuple[float, Counts] | None = None
    _pairs: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def read(self, now: float, counts: Counts) -> None:
        """Add a reading of the counters, taken at `now` (seconds since 1970). `counts`: totals that continue over
        restarts of the server, as `Meter` computes them. Intervals in which a counter fell are left out."""
        if self._before is not None and (pairs := pairs_of([self._before[1], counts])):
            self._pairs[int(self._before[0] // HOUR_S)] += pairs
        self._before = now, counts

    def hours(self, until: int, since: int = 0) -> dict[int, dict[str, Sums]]:
        """Returns the sums of each hour in [since, until), counted from 1970, as {hour: {"all": sums of tokens and
        rounds}}. All traffic is one cluster, named "all". First writes new hours before `until` to counted.jsonl.
        Raises CacheError on a write error."""
        file, self.left_out = self.folder / FILE, Counter()
        with reraised(CacheError, f"cannot write {file}", "free space, or choose another --state", OSError):
            for hour in sorted(number for number in self._pairs if number < until):
                append_lines(file, [{"hour": hour, "sums": astuple(Sums.of(self._pairs[hour]))}])
                del self._pairs[hour]
            hours: dict[int, dict[str, Sums]] = {}
            for line in RunFolder(self.folder).lines(file.name):
                if not _is_hour(line):
                    self.left_out["damaged hour"] += 1
                elif since <= line["hour"] < until:
                    hours[line["hour"]] = {ALL: hours.get(line["hour"], {}).get(ALL, Sums()) + Sums(*line["sums"])}
            return hours


def pairs_of(readings: Iterable[Counts]) -> list[tuple[float, float]]:
    """Returns the (tokens, rounds) that were counted between each reading and the next. Intervals without a round, or
    in which a counter fell, are left out."""
    gains = [(now.rounds - then.rounds, now.accepted - then.accepted) for then, now in pairwise(readings)]
    return [(rounds + accepted, rounds) for rounds, accepted in gains if rounds > 0 and accepted >= 0]


def stored_hours(store: StoreConfig) -> tuple[dict[int, dict[str, Sums]], Counter[str], str]:
    """Reads the recorded traffic: from the traces, or from counted.jsonl in the state folder if no trace has rounds.
    Returns three values:
    - {hour since 1970: {cluster: sums of tokens and rounds}}
    - {reason: number of requests or hours that were left out}
    - the source: "traces" or "counted.jsonl"; "" if there is no traffic

    Raises ConfigError if the folder of traces does not exist."""
    hours, left_out = read_hours(store.traces)
    if hours:
        return hours, left_out, "traces"
    counted = CountedHours(store.state)
    hours = counted.hours(sys.maxsize)
    return hours, left_out + counted.left_out, FILE if hours else ""


def missing(store: StoreConfig, left_out: Counter[str]) -> str:
    """Returns a text that says why `stored_hours` found no traffic, and what to do. `left_out`: from `stored_hours`."""
    number, unknown = left_out.total() - left_out["damaged hour"], left_out["no rounds"]
    if not number:
        return f"there is no traffic yet in {store.traces}"
    if not unknown:
        return f"{number} requests, none that can be judged"
    file = store.state / FILE
    state = "has no hour yet" if file.exists() else "is missing"
    return (
        f"{unknown} of {number} requests have no rounds, and {file} {state}: "
        f"paceline adapt watch --server URL --engine vllm|sglang --state {store.state} writes it from the server's "
        "metrics; if it is in another folder, name that with --state"
    )


def _is_hour(line: dict[str, Any]) -> bool:
    sums = line.get("sums")
    is_whole = isinstance(sums, list) and len(sums) == len(astuple(Sums()))
    return type(line.get("hour")) is int and is_whole and all(type(value) in (int, float) for value in sums or ())
