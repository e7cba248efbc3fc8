"""Puts a drafter on a server, judges it by what the server counts, and keeps it or takes it back.

Every method may raise UnreachableError and can be called again then: nothing is done twice, and nothing is forgotten.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import DeployError, DownloadError, UnreachableError
from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.rollout.stage import LEAST_ROUNDS, Stage
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.servers.deploy import Deployment
from paceline.loop.adapt.traffic.hours import HOUR_S

MOST_READINGS = 120
"""Readings of the server's counters that are kept: what acceptance was before a swap."""


@dataclass(slots=True)
class Canary:
    """One server, or several with one drafter each."""

    deployment: Deployment
    traces: Path
    counted: CountedHours | None = None
    """Hours of servers whose rounds no trace tells."""
    known: dict[str, str] | None = None
    """Name -> drafter of the members that were loaded by us, or have been seen."""
    readings: deque[tuple[float, Counts]] = field(default_factory=lambda: deque(maxlen=MOST_READINGS))

    def read(self, now: float) -> Counts:
        """Read the server's counters."""
        counts = self.deployment.counts()
        if self.counted:
            self.counted.read(now, counts)
        return counts

    def _read_or_wait(self, now: float, stage: Stage | None = None) -> Counts:
        """Read the counters, and the drafts of a stage's member. Raises UnreachableError where the page cannot be read.

        A page says nothing about a drafter: labelled counters of a server that was just started appear with its traffic."""
        try:
            if stage is not None:
                stage.drafts = self.deployment.drafts(stage.member)
            return self.read(now)
        except DownloadError as error:
            raise UnreachableError(str(error)) from error

    def look(self, now: float) -> Stage | None:
        """Take a reading; returns a probation for a drafter that somebody else has loaded, in its first minute."""
        self.readings.append((now, self.read(now)))
        members, known = self.deployment.members(), self.known
        new = sorted(name for name, drafter in members.items() if known is not None and known.get(name) != drafter)
        if known is None or not new:
            self.known = members
            return None
        name = new[0]  # the others when this one is decided about
        stage = Stage("found", "probation", int(now // HOUR_S), (), name, drafter=members[name], served=members[name])
        stage.drafts = self.deployment.drafts(name)
        stage.begin_probation(self.traces, self.readings[0][1], self.readings[-1][1], now)
        self.deployment.found(name, known.get(name))
        stage.undo, self.known = self.deployment.undo, {**known, name: members[name]}
        return stage

    def put_in(self, stage: Stage, now: float, save: Callable[[], None]) -> None:
        """Load the drafter, or send its cluster to it, and begin its probation.

        `save` writes down what is to be undone, before the server is asked: a load takes minutes, in which this process may
        be killed. Raises DownloadError when the server refuses the drafter, DeployError when something else hinders it, and
        what `save` raises."""
        counts = self._read_or_wait(now)
        if self.deployment.undo:  # tried before: if that answer was lost, the new drafter may have served since
            stage.begin_counting(counts, now)
        else:
            stage.begin_probation(self.traces, self.readings[0][1] if self.readings else None, counts, now)
        stage.name, began_s = "swap", time.monotonic()

        def noted() -> None:
            stage.undo = self.deployment.undo
            save()

        try:
            if stage.kind != "route":
                self.deployment.load(stage.member, Path(stage.drafter), noted)
            with _blameless():
                if stage.kind in ("route", "propose"):
                    self.deployment.route(stage.clusters[0], stage.member, noted)
                stage.served = self.deployment.members().get(stage.member, "")
            counts = self._read_or_wait(now, stage)  # anew: what was counted during the load is not of this drafter
        finally:
            stage.undo = self.deployment.undo
        if self.known is not None and stage.served:
            self.known[stage.member] = stage.served
        stage.begin_counting(counts, now + time.monotonic() - began_s)

    def judge(self, stage: Stage, now: float, config: WatchConfig) -> tuple[str, str] | None:
        """Judges a probation; returns how it ended (kept, rolled back, unproven, gone) and why, or None so far."""
        counts = self.read(now)
        if not self.deployment.is_well():
            return "unproven", "the server is not well"
        if stage.served and not self.deployment.holds(stage.member, stage.served):
            return "gone", f"{stage.member} drafts there no more: the server was started again, or somebody replaced it"
        if not self._is_sent_there(stage):
            return "unproven", f"{stage.clusters[0]} is not sent to {stage.member} any more"
        drafts = self.deployment.drafts(stage.member)
        stage.look(counts, drafts)
        if wrong := stage.wrong(self.traces, counts, now, config):
            return "rolled back", wrong
        ending, rounds = stage.is_over(now, config, drafts), stage.rounds(drafts)
        if ending == "unproven":
            hours = stage.lasted(now) / HOUR_S
            why = f"not enough traffic to judge it: {rounds:g} rounds in {hours:.3g} hours, {LEAST_ROUNDS} are needed"
            if rounds >= LEAST_ROUNDS:
                why = "the clock was set back, so traces do not tell when it served, and no metrics of before are known"
            return ("kept" if stage.kind == "found" or config.unproven == "keep" else "unproven"), why
        return ("kept", f"nothing fell in {rounds:g} rounds") if ending else None

    def _is_sent_there(self, stage: Stage) -> bool:
        if stage.kind not in ("route", "propose"):
            return True
        try:
            return self.deployment.pinned(stage.clusters[0]) == stage.member
        except UnreachableError:
            raise
        except DownloadError:
            return False  # a server that was started again knows no clusters yet

    def keep(self) -> None:
        self.deployment.keep()
        self.readings.clear()

    def take_back(self, stage: Stage) -> None:
        """Give back what was there before; other members that somebody has loaded meanwhile stay unknown."""
        self.deployment.roll_back()
        self.readings.clear()  # they reach into its time
        self._knows(stage.member, self.deployment.members().get(stage.member))

    def let_go(self, stage: Stage) -> None:
        """Forget a drafter that has left the server; `look` reports what serves there now, if that is new."""
        before = next((each[2] for each in stage.undo if each[:2] == ["drafter", stage.member]), None)
        self.deployment.keep()
        self.readings.clear()
        self._knows(stage.member, stage.served if stage.kind == "route" else before)

    def _knows(self, name: str, drafter: str | None) -> None:
        if self.known is not None:
            self.known = {key: value for key, value in self.known.items() if key != name}
            self.known |= {name: drafter} if drafter is not None else {}


@contextlib.contextmanager
def _blameless() -> Iterator[None]:
    """Raises a refusal that says nothing about the drafter as DeployError."""
    try:
        yield
    except UnreachableError:
        raise
    except DownloadError as error:
        raise DeployError(str(error)) from error
