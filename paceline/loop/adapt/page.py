"""Renders report.html of `paceline adapt`: acceptance length over time for each cluster (group of similar requests),
and the decisions. The page loads nothing from the network.

paceline adapt log --state runs/adapt --page
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.loop.adapt.decide.decide import IDLE
from paceline.loop.adapt.traffic.hours import DAY
from paceline.report.pages import Block, Mark, Plot, Series, curves, render
from paceline.report.tables import Column, Table

MARKED = ("swapped", "routed", "rolled back", "training", "kept", "refused", "failed", "reported", "waiting")
COLUMNS = (
    Column("when", lambda line: line["time"]),
    Column("what", lambda line: line.get("event") or line["decision"]["action"]),
    Column(
        "clusters", lambda line: ", ".join(line.get("clusters") or line.get("decision", {}).get("clusters", ())) or None
    ),
    Column("why", lambda line: line.get("why") or line.get("decision", {}).get("why")),
)


def page(lines: Sequence[dict[str, Any]]) -> str:
    """Renders the daemon's log (lines from `AdaptLog.shown`) as an HTML page. Raises ConfigError if matplotlib is
    missing."""
    hours = [line for line in lines if "seen" in line]
    done = [line for line in lines if "event" in line or line["decision"]["action"] not in IDLE]
    last = {"seen": {}, "decision": {"why": "nothing has been seen yet", "declined": {}}} if not hours else hours[-1]
    sections: dict[str, list[Block]] = {
        "Acceptance by cluster": [],
        "Decisions": [Table(COLUMNS, done[::-1])] if done else [],
        "Now": [[f"{name}: {_state(seen)}" for name, seen in last["seen"].items()]],
        "Why not the other things": [[f"no {action}: {why}" for action, why in last["decision"]["declined"].items()]],
    }
    return render(
        "report.html",
        title="Acceptance over time",
        verdict=_verdict(last, done),
        tone="cost" if any(seen["state"] in ("held", "raised") for seen in last["seen"].values()) else "",
        explained=["adapting"],
        drawn=[_timeline(name, hours, done) for name in dict.fromkeys(name for line in hours for name in line["seen"])],
        sections=sections,
        settings=[],
    )


def _timeline(name: str, hours: Sequence[dict[str, Any]], done: Sequence[dict[str, Any]]) -> Plot:
    first = hours[0]["hour"]
    series = []
    for place, (key, label) in enumerate((("tokens_per_round", "seen"), ("expected", "usual at that hour"))):
        known = [(line["hour"], line["seen"].get(name, {}).get(key)) for line in hours]
        points = [((hour - first) / DAY, value) for hour, value in known if value is not None]
        series.append(Series(label, [x for x, _ in points], [y for _, y in points], place, is_faint=place == 1))
    marks = [
        Mark((line["hour"] - first) / DAY, line["event"])
        for line in done
        if line.get("event") in MARKED and name in (line.get("clusters") or [name])
    ]
    return curves(name, series, xlabel="days", ylabel="tokens per round", marks=marks)


def _state(seen: dict[str, Any]) -> str:
    words = {
        "learning": "no baseline yet: two days are needed, and a week to know weekends",
        "calm": "as usual",
        "raised": "lower than usual; it must last before anything is done",
        "held": "lower than usual for long enough",
    }
    loss = f" ({seen['loss']:.0%} below)" if seen.get("loss") else ""
    return words[seen["state"]] + loss


def _verdict(last: dict[str, Any], done: Sequence[dict[str, Any]]) -> str:
    held, raised = (
        ", ".join(name for name, seen in last["seen"].items() if seen["state"] == state) for state in ("held", "raised")
    )
    if held:
        now = f"Acceptance has fallen on {held}. "
    else:
        now = f"Acceptance is lower than usual on {raised}. " if raised else "Acceptance is as it usually is. "
    if not last["seen"]:
        now = ""
    elif all(seen["state"] == "learning" for seen in last["seen"].values()):
        now = "There is no baseline yet. "
    events = [line["event"] for line in done if "event" in line]
    counts = ", ".join(f"{events.count(name)} {name}" for name in MARKED if name in events)
    return f"{now}{counts.capitalize() or 'Nothing was done so far'}. Now: {last['decision']['why']}."
