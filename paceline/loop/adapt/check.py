"""Decides once, from the stored traffic, without a daemon: `paceline adapt check`, and the tool `propose` of `paceline
mcp`."""

from __future__ import annotations

from typing import Any

from paceline.loop.adapt.config import PolicyConfig, PriceConfig, StoreConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.log import AdaptLog, hour_line, rebuilt
from paceline.loop.adapt.servers.counted_hours import missing, stored_hours


def decide_once(store: StoreConfig, policy: PolicyConfig, prices: PriceConfig) -> dict[str, Any]:
    """Decides, from all stored traffic, which action `paceline adapt` should take after the latest recorded hour. Does
    not execute the action. Returns the log line of this hour as a dict: what the policy observed, and its decision (key
    "decision"). Raises ConfigError if the folder of traces does not exist.

    Further keys:
    - "hours": number of hours from the first recorded one to the latest; "with_traffic": how many of them have traffic.
    - "source": "traces", or "counted.jsonl" if the hours come from the server's counters.
    - "left_out": reason -> number of requests or hours that were not used.

    Without any traffic the decision is "too little", and "source" is missing."""
    hours, left_out, source = stored_hours(store)
    lines = rebuilt(SeasonalPolicy(policy, prices), hours, AdaptLog(store.state), max(hours, default=-1) + 1)
    if not lines:
        decision = Decision("too little", why=missing(store, left_out))
        return {"decision": decision, "hours": 0, "with_traffic": 0, "left_out": dict(left_out)}
    known = {"hours": len(lines), "with_traffic": len(hours), "source": source, "left_out": dict(left_out)}
    return {**hour_line(lines[-1]), "decision": lines[-1].decision, **known}
