"""The log of `paceline adapt`: a line an hour, and a line for everything that was done. JSON Lines, only appended to.

{"hour": 494500, "time": "...", "seen": {...}, "mix": {...}, "decision": {"action": "none", "why": ..., "declined": {...}}}
{"hour": 494500, "time": "...", "event": "swapped", "clusters": ["tickets"], "drafter": "...", "why": ...}
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, reraised
from paceline.loop.adapt.decide.policy import Line, SeasonalPolicy
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums
from paceline.loop.adapt.traffic.stored import FIRST_YEAR
from paceline.runs.folder import RunFolder, append_lines, plain

FIRST_HOUR = int(FIRST_YEAR // HOUR_S)
"""An event of an earlier hour was stamped by a clock that was wrong; from there on all hours are gone through."""


@dataclass(frozen=True, slots=True)
class AdaptLog:
    """The file `log.jsonl` of a folder."""

    folder: Path
    late: list[dict[str, Any]] = field(default_factory=list)
    """Lines that the disk has refused so far; they are written with the next one."""

    @property
    def file(self) -> Path:
        return self.folder / "log.jsonl"

    def hour(self, line: Line) -> dict[str, Any]:
        """Write an hour; returns what was written."""
        return self.append(told(line))

    def event(self, hour: int, event: str, **figures: Any) -> dict[str, Any]:
        """Write what was done, one of metrics.EVENTS."""
        return self.append(event_line(hour, event, **figures))

    def lines(self) -> list[dict[str, Any]]:
        """All of them; a last one that a crash cut is left out."""
        if not self.file.exists():
            return []
        run = RunFolder(self.folder)
        return run.lines(self.file.name)

    def num_odd(self) -> int:
        """Events that say nothing: without an hour, of one before 2020, or damaged."""
        return sum("event" in line and not is_event(line) for line in self.lines())

    def append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Write a line, after those that are late. Raises CacheError; then it is late itself."""
        self.late.append(line)
        with reraised(CacheError, f"cannot write {self.file}", "free space, or choose another --state", OSError):
            append_lines(self.file, self.late)
        self.late.clear()
        return line


def event_line(hour: int, event: str, **figures: Any) -> dict[str, Any]:
    """Builds the line of an event: what was done in an hour."""
    return plain({**_stamped(hour), "event": event, **figures})


def told(line: Line) -> dict[str, Any]:
    """An hour as JSON."""
    return plain({**_stamped(line.hour), **{key: getattr(line, key) for key in ("seen", "mix", "decision", "notes")}})


def _stamped(hour: int) -> dict[str, Any]:
    return {"hour": hour, "time": time.strftime("%Y-%m-%dT%H:00Z", time.gmtime(hour * HOUR_S))}


def rebuilt(policy: SeasonalPolicy, hours: Mapping[int, Mapping[str, Sums]], log: AdaptLog, until: int) -> list[Line]:
    """Feed the hours before `until` to a fresh policy, and at their hours what the log says was done; the lines it makes.

    So a daemon that was stopped, and `check`, know what one that ran on would know.
    """
    events: dict[int, list[dict[str, Any]]] = {}
    for line in log.lines():
        if "event" in line and is_event(line):
            events.setdefault(line["hour"], []).append(line)
    known = [hour for hour in (*hours, *events) if hour < until]
    lines = []
    for number in range(min(known), until) if known else ():
        lines.append(policy.hour(number, hours.get(number, {})))
        for event in events.get(number, ()):
            apply(policy, event)
    return lines


def is_event(line: Mapping[str, Any]) -> bool:
    """Whether an event's line is one that can be: of an hour since 2020, about clusters by name."""
    hour, cost, clusters = line.get("hour"), line.get("cost_hours"), line.get("clusters", [])
    return (
        (type(hour) is int and hour >= FIRST_HOUR and isinstance(line["event"], str))
        and (cost is None or type(cost) in (int, float))
        and (isinstance(clusters, list) and all(isinstance(each, str) for each in clusters))
    )


def apply(policy: SeasonalPolicy, event: Mapping[str, Any]) -> None:
    """What an event means for the policy."""
    name, hour, clusters = event["event"], event["hour"], tuple(event.get("clusters", ()))
    if name == "training":
        policy.training(hour)
    elif name in ("swapped", "refused", "failed"):
        policy.trained(hour, clusters if name == "swapped" else (), event.get("cost_hours"))
    elif name in ("routed", "rolled back"):
        policy.routed(hour, clusters)
