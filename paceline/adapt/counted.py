"""Hours as a server counts them, for servers whose rounds no trace tells: vLLM and SGLang behind `paceline record`.

Each pair of readings of the counters stands for a request in `Sums`; all traffic is one cluster, ALL. An hour that is over is a
line in `counted.jsonl`, so that a daemon that was stopped knows it again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import astuple, dataclass, field
from pathlib import Path

from paceline.adapt.counts import Counts
from paceline.adapt.hours import HOUR_S, Sums
from paceline.errors import CacheError, reraised
from paceline.runlog import RunFolder, drop_cut_line

ALL = "all"
"""The cluster of traffic that is not told apart."""


@dataclass(slots=True)
class CountedHours:
    """Readings go in, hours come out."""

    folder: Path
    _before: tuple[float, Counts] | None = None
    _pairs: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def read(self, now: float, counts: Counts) -> None:
        """A reading of the counters. One across a restart of the server, which sets them back, says nothing."""
        if self._before is not None:
            rounds, accepted = counts.rounds - self._before[1].rounds, counts.accepted - self._before[1].accepted
            if rounds > 0 and accepted >= 0:
                self._pairs[int(self._before[0] // HOUR_S)].append((rounds + accepted, rounds))
        self._before = now, counts

    def hours(self, until: int, since: int = 0) -> dict[int, dict[str, Sums]]:
        """{hour: {ALL: sums}} of the hours [since, until), which are over and are written down. Raises CacheError."""
        file = self.folder / "counted.jsonl"
        with reraised(CacheError, f"cannot write {file}", "free space, or choose another --state", OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            drop_cut_line(file)
            for hour in sorted(each for each in self._pairs if each < until):
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"hour": hour, "sums": astuple(Sums.of(self._pairs[hour]))}) + "\n")
                del self._pairs[hour]
            found: dict[int, dict[str, Sums]] = {}
            for line in RunFolder(self.folder).lines(file.name):
                if since <= line["hour"] < until:
                    found[line["hour"]] = {ALL: found.get(line["hour"], {}).get(ALL, Sums()) + Sums(*line["sums"])}
            return found
