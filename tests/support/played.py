"""A daemon whose trainings and gates are only played, for the tests of `paceline.loop.adapt.watch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, cast

from adapt_requests import HOUR, NOON, keyed, store

from paceline.config import EngineConfig
from paceline.loop.adapt.config import CandidateConfig, DeployConfig, RetrainConfig, StoreConfig, WatchConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import Line, SeasonalPolicy
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.watch import Watcher


class HasUrl(Protocol):
    @property
    def url(self) -> str: ...


NOW = NOON.timestamp() + 3600 + 130
"""The hour that began at noon is over."""
PASSED = {"passed": True, "reason": "+80%", "gains": {"drifted": {"low": 0.5, "incumbent": 2.0, "candidate": 4.0}}}


class Alarmed(SeasonalPolicy):
    """Wants a training at noon, whatever it sees."""

    def hour(self, number: int, seen: Any) -> Line:
        line = super().hour(number, seen)
        if number == HOUR and not self.is_training:
            return Line(number, line.seen, line.mix, Decision("retrain", ("tickets",), why="it fell"))
        return line


class Played:
    """Jobs that end as they are told to."""

    def __init__(self, *ends: tuple[int, dict[str, Any] | str]) -> None:
        self.ends, self.commands = list(ends), list[list[str]]()

    def __call__(self, command: list[str], log: Path) -> Job:
        self.commands.append(command)
        status, line = self.ends.pop(0)

        class Ended:
            last_line = line if isinstance(line, str) else json.dumps(line)
            last_error = "out of memory"

            def poll(self) -> int:
                return status

            def stop(self) -> None: ...

        return cast(Any, Ended())


def traffic(folder: Path, number: int = 120, **changes: Any) -> Path:
    rows = [keyed(each, answer_ids=[3, 4, each], **changes) for each in range(number)]
    return store(folder / "traces", rows)


def watcher(folder: Path, server: HasUrl | None, jobs: Played, **changes: Any) -> Watcher:
    deploy: dict[str, Any] = changes.pop("deploy", {})
    deployment = open_deployment(DeployConfig(**{"servers": (server.url,), **deploy})) if server else None
    messages: list[str] = []
    retrain = changes.pop("retrain", RetrainConfig())
    one = Watcher(
        StoreConfig(folder / "traces", folder / "state"),
        EngineConfig(),
        deployment,
        changes.pop("policy", None) or Alarmed(),
        changes.pop("candidate", None) or CandidateConfig(),
        retrain,
        WatchConfig(probation_minutes=10.0, **changes),
        messages.append,
        jobs,
    )
    one._next = HOUR
    return one


def events(one: Watcher) -> list[str]:
    return [line["event"] for line in one.log.lines() if "event" in line]


class Deciding(SeasonalPolicy):
    """Wants what it is told to, hour by hour; asks for scores as the real one does."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__()
        self.decisions = list(decisions)

    def hour(self, number: int, seen: Any) -> Line:
        line = super().hour(number, seen)
        decision = self.decisions.pop(0) if self.decisions and not self.is_training else Decision()
        self.proposed |= set(decision.clusters) if decision.action == "propose" else set()
        return Line(number, line.seen, line.mix, decision)


def ticked(one: Watcher, hour: int, number: int = 6) -> None:
    """Tick this many times within an hour after noon."""
    for minute in range(number):
        one.tick(NOW + 3600 * hour + 60 * minute)
