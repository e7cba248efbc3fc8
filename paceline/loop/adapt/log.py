"""Log of `paceline adapt`: JSON Lines, append-only, with one line per hour and one per event.

{"hour": 494500, "time": "...", "seen": {...}, "mix": {...},
 "decision": {"action": "none", "why": ..., "declined": {...}}}
{"hour": 494500, "time": "...", "event": "swapped", "clusters": ["tickets"], "drafter": "...", "why": ...}
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from paceline.errors import CacheError, reraised
from paceline.loop.adapt.decide.policy import Line, SeasonalPolicy
from paceline.loop.adapt.traffic.drift import State
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums
from paceline.loop.adapt.traffic.stored import FIRST_YEAR
from paceline.runs.folder import RunFolder, append_lines, plain

FIRST_HOUR = int(FIRST_YEAR // HOUR_S)
"""First valid hour of an event (in 2020). A wrong clock gives earlier ones, and a replay would iterate over all hours
since."""


@dataclass(frozen=True, slots=True)
class AdaptLog:
    """Reads the log of `paceline adapt` and appends to it: the file `log.jsonl` in `folder`."""

    folder: Path
    late: list[dict[str, Any]] = field(default_factory=list)
    """Lines that could not be written yet; the next `append` writes them first."""

    @property
    def file(self) -> Path:
        return self.folder / "log.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        """Returns all lines; a last line truncated by a crash is left out. The event "told" of older logs is returned
        as "reported", its present name."""
        lines = RunFolder(self.folder).lines(self.file.name)
        return [{**line, "event": "reported"} if line.get("event") == "told" else line for line in lines]

    def num_odd(self) -> int:
        """Number of event lines in the log that a restarted daemon ignores: those with a missing or damaged field, or
        an hour before 2020."""
        return sum("event" in line and not is_event(line) for line in self.lines())

    def shown(self) -> tuple[list[dict[str, Any]], int]:
        """Returns (lines that can be shown to users, number of lines left out). Lines of events and hours with a
        missing or damaged field are left out."""
        every = self.lines()
        whole = [line for line in every if isinstance(line.get("time"), str) and (is_event(line) or is_hour(line))]
        return whole, len(every) - len(whole)

    def append(self, line: dict[str, Any]) -> dict[str, Any]:
        """Append a line to the file; returns the line. If the file cannot be written, raises CacheError and remembers
        the line; the next call writes it first."""
        self.late.append(line)
        with reraised(CacheError, f"cannot write {self.file}", "free space, or choose another --state", OSError):
            append_lines(self.file, self.late)
        self.late.clear()
        return line


def event_line(hour: int, event: str, **figures: Any) -> dict[str, Any]:
    """Builds the log line of an event. `hour`: when it happened, counted from 1970; `event`: its name, such as
    "training" or "swapped". Further keyword arguments (`figures`) become further JSON fields of the line."""
    return plain({**_stamped(hour), "event": event, **figures})


def hour_line(line: Line) -> dict[str, Any]:
    """Converts an hour's observations and decision to a line of the log, with the hour's time (UTC) added."""
    return plain({**_stamped(line.hour), **{key: getattr(line, key) for key in ("seen", "mix", "decision", "notes")}})


def _stamped(hour: int) -> dict[str, Any]:
    return {"hour": hour, "time": time.strftime("%Y-%m-%dT%H:00Z", time.gmtime(hour * HOUR_S))}


def rebuilt(policy: SeasonalPolicy, hours: Mapping[int, Mapping[str, Sums]], log: AdaptLog, until: int) -> list[Line]:
    """Restores the policy's state after a restart, by replaying the recorded traffic and the logged events of all hours
    before `until`. `policy` must be new. `hours`: hour since 1970 -> cluster -> sums of tokens and rounds.

    Returns the `Line` (observations and decision) of every replayed hour, with or without traffic: from the first
    recorded one to the last before `until`."""
    events: dict[int, list[dict[str, Any]]] = {}
    for line in log.lines():
        if "event" in line and is_event(line):
            events.setdefault(line["hour"], []).append(line)
    known = [hour for hour in (*hours, *events) if hour < until]
    lines = []
    for number in range(min(known, default=until), until):
        lines.append(line := policy.hour(number, hours.get(number, {})))
        if line.decision.action == "propose":
            policy.proposed -= set(line.decision.clusters)  # unless an event shows that it was carried out
        for event in events.get(number, ()):
            apply(policy, event)
    return lines


def is_event(line: Mapping[str, Any]) -> bool:
    """True if a log line is a valid event: its name is a string, its hour not before 2020, its cost (if given) a
    number, and its clusters a list of strings."""
    hour, cost, clusters = line.get("hour"), line.get("cost_hours"), line.get("clusters", [])
    return (
        (type(hour) is int and hour >= FIRST_HOUR and isinstance(line.get("event"), str))
        and (cost is None or type(cost) in (int, float))
        and (isinstance(clusters, list) and all(isinstance(name, str) for name in clusters))
    )


def is_hour(line: Mapping[str, Any]) -> bool:
    """True if a log line is a valid line of an hour, not of an event: it has the hour, the state of each cluster, and
    the decision with its reasons."""
    seen, decision = line.get("seen"), line.get("decision")
    return (
        (type(line.get("hour")) is int and "event" not in line and isinstance(seen, dict))
        and all(isinstance(each, dict) and each.get("state") in get_args(State) for each in seen.values())
        and (isinstance(decision, dict) and isinstance(decision.get("declined"), dict))
        and {"action", "why"} <= decision.keys()
    )


def apply(policy: SeasonalPolicy, event: Mapping[str, Any]) -> None:
    """Updates the policy with a logged event: a training began or ended, or clusters got another drafter. Other events
    have no effect."""
    name, hour, clusters = event["event"], event["hour"], tuple(event.get("clusters", ()))
    if event.get("action") == "propose" and name in ("training", "failed"):
        policy.proposed |= set(clusters)
    if name == "training":
        policy.is_training = True
    elif name in ("swapped", "refused", "failed"):
        policy.trained(hour, clusters if name == "swapped" else (), event.get("cost_hours"))
    elif name in ("routed", "rolled back"):
        policy.routed(hour, clusters)
