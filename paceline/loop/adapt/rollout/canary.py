"""Deploys a drafter on a server, judges it during a probation (trial period) by the server's counters, and keeps it or
rolls it back.

Every method may raise UnreachableError and can then be called again: no step is repeated or skipped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import DeployError, DownloadError, RejectedError, UnreachableError
from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.decide.members import route_of
from paceline.loop.adapt.rollout.stage import LEAST_ROUNDS, Stage
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.traffic.hours import HOUR_S

MOST_READINGS = 120
"""Maximum number of stored readings of the server's counters; they are the baseline of a later swap."""


@dataclass(slots=True)
class Canary:
    """Tries a new drafter on running servers. Loads it for a trial period (probation), judges it by the servers'
    counters, and keeps it or rolls it back. The servers are one paceline server, or one or more vLLM or SGLang servers.
    With several servers, at first only one loads the drafter, and is compared with the others."""

    deployment: Deployment
    traces: Path
    counted: CountedHours | None = None
    """Hourly sums computed from counters, for servers whose traces contain no rounds; else None."""
    known: dict[str, str] | None = None
    """Name -> drafter, for the drafters on the server that the daemon knows. None: not read yet."""
    readings: deque[tuple[float, Counts]] = field(default_factory=lambda: deque(maxlen=MOST_READINGS))
    """(time in seconds since 1970, counters) of the latest calls of `look`: the baseline of the next trial."""
    before: dict[str, float] = field(default_factory=dict)
    """Acceptance lengths before the latest trial, if its drafter was rolled back: by cluster, and of the whole server
    (""). If a user loads a drafter before new values are known, it is compared with these."""
    before_variances: dict[str, float] = field(default_factory=dict)

    def read(self, now: float) -> Counts:
        """Read the counters of all servers at `now` (seconds since 1970); returns their sums. Also adds the reading to
        the hourly sums in the field `counted`, unless that is None."""
        counts = self.deployment.counts()
        if self.counted:
            self.counted.read(now, counts)
        return counts

    def _read_or_wait(self, now: float, stage: Stage | None = None) -> Counts:
        """Read the counters, and the draft count of a stage's drafter. Raises UnreachableError if the page cannot be
        read.

        An unreadable page says nothing about the drafter: the labelled counters of a new server appear with its
        traffic."""
        try:
            if stage is not None:
                stage.drafts = self.deployment.drafts(stage.member)
            return self.read(now)
        except DownloadError as error:
            raise UnreachableError(str(error)) from error

    def look(self, now: float) -> Stage | None:
        """Read the counters, and check whether a user has loaded a drafter by hand since the last call. If so, begin
        the trial period of this drafter and return it as a new `Stage` in the step "probation"; else return None. If
        there are several new drafters, each call returns one. `now`: seconds since 1970."""
        self.readings.append((now, self.read(now)))
        members, known = self.deployment.members(), self.known
        new = sorted(name for name, drafter in members.items() if known is not None and known.get(name) != drafter)
        if known is None or not new:
            self.known = members
            return None
        name = new[0]  # the others follow when this one has been judged
        stage = Stage("by hand", "probation", int(now // HOUR_S), (), name, drafter=members[name], served=members[name])
        stage.drafts = self.deployment.drafts(name)
        stage.begin_probation(self.traces, [counts for _, counts in self.readings], self.readings[-1][1], now)
        stage.before = {**self.before, **stage.before}
        stage.before_variances = {**self.before_variances, **stage.before_variances}
        self.deployment.loaded_by_hand(name, known.get(name))
        if len(new) == 1 and (apart := self.deployment.counts_apart()):
            stage.begin_counting(self.readings[-1][1], now, apart)
        stage.undo, self.known = self.deployment.undo, {**known, name: members[name]}
        return stage

    def swap_in(self, stage: Stage, now: float, save: Callable[[], None]) -> None:
        """Put the drafter of `stage` into service, and begin its trial period (probation) at `now`, in seconds since
        1970. `stage.kind` determines what is changed on the server:
        - "propose": the drafter is loaded, and the stage's cluster is routed to it.
        - "route": the stage's cluster is routed to the drafter, which the server has already.
        - any other kind: the drafter is loaded.

        `save`: function of the caller that writes `stage` to disk. It is called before each change of the server, so
        that a restarted process can roll the change back. If it raises an error, the change is not made and the error
        is re-raised.

        Raises RejectedError if the server refuses the drafter, DeployError if anything else prevents the change,
        UnreachableError if the server does not answer."""
        counts = self._read_or_wait(now)
        if self.deployment.undo:  # retry: if the earlier response was lost, the new drafter may have served since
            stage.begin_counting(counts, now)
        else:
            stage.begin_probation(self.traces, [counts for _, counts in self.readings], counts, now)
        stage.name, began_s = "swap", time.monotonic()
        save_undo = self._saving(stage, save)
        try:
            if stage.kind != "route":
                self.deployment.load(stage.member, Path(stage.drafter), save_undo)
            try:
                if stage.kind in ("route", "propose"):
                    self.deployment.route(stage.clusters[0], stage.member, save_undo)
                stage.served = self.deployment.members().get(stage.member, "")
            except RejectedError as error:  # a refusal here says nothing about the drafter
                raise DeployError(str(error)) from error
            counts = self._read_or_wait(now, stage)  # again: counts during the load do not belong to this drafter
        finally:
            stage.undo = self.deployment.undo
        if self.known is not None and stage.served:
            self.known[stage.member] = stage.served
        stage.begin_counting(counts, now + time.monotonic() - began_s, self.deployment.counts_apart())

    def spread(self, stage: Stage, save: Callable[[], None]) -> None:
        """Load the stage's drafter on the remaining servers, after the trial on the first one. `save`: function of the
        caller that writes `stage` to disk. It is called before each server gets the drafter; its errors are re-raised.
        Raises DownloadError if a server refuses the drafter or does not answer."""
        save_undo = self._saving(stage, save)
        try:
            self.deployment.load_others(stage.member, Path(stage.drafter), save_undo)
        finally:
            stage.undo = self.deployment.undo

    def judge(self, stage: Stage, now: float, config: WatchConfig) -> tuple[str, str] | None:
        """Judge the drafter on trial (probation) at `now`, in seconds since 1970. Returns None while the trial
        continues, else (result, reason as text). Changes nothing on the server; the caller acts on the result:
        - "kept": keep the drafter.
        - "rolled back": roll it back, because its server is worse than before, or than the other servers.
        - "unproven": roll it back, because it could not be judged: the server is unhealthy, the stage's cluster is no
          longer routed to the drafter, or the traffic was too little.
        - "gone": the drafter has left the server, so there is nothing to roll back.

        If the traffic was too little to judge the drafter, the result is "kept" if a user loaded it by hand or
        `config.unproven` is "keep". Otherwise it is "unproven"."""
        counts = self.read(now)
        if not self.deployment.is_well():
            return "unproven", "the server is not well"
        if stage.served and not self.deployment.holds(stage.member, stage.served):
            return "gone", f"{stage.member} drafts there no more: the server was started again, or somebody replaced it"
        if stage.kind in ("route", "propose") and route_of(self.deployment, stage.clusters[0]) != stage.member:
            return "unproven", f"{stage.clusters[0]} is not sent to {stage.member} any more"
        drafts = self.deployment.drafts(stage.member)
        if stage.others and (apart := self.deployment.counts_apart()):
            stage.look_apart(apart)
            fault = stage.fault_of_canary(config)
            if stage.kind == "by hand":  # a user may have loaded it on the other servers meanwhile
                fault = fault or stage.fault(self.traces, counts, now, config)
        else:
            stage.look(counts, drafts)
            fault = stage.fault(self.traces, counts, now, config)
        if fault:
            return "rolled back", fault
        ending, rounds = stage.is_over(now, config, drafts), stage.rounds(drafts)
        if ending == "unproven":
            hours = stage.lasted(now) / HOUR_S
            why = f"not enough traffic to judge it: {rounds:g} rounds in {hours:.3g} hours, {LEAST_ROUNDS} are needed"
            if rounds >= LEAST_ROUNDS:
                why = "the clock was set back, so traces do not tell when it served, and no metrics of before are known"
            return ("kept" if stage.kind == "by hand" or config.unproven == "keep" else "unproven"), why
        return ("kept", stage.kept_why(drafts)) if ending else None

    def keep(self) -> None:
        self.deployment.keep()
        self.readings.clear()
        self.before, self.before_variances = {}, {}

    def roll_back(self, stage: Stage, save: Callable[[], None]) -> None:
        """Restore the drafters and routes that the servers had before the swap of `stage`. A drafter that a user has
        loaded under another name meanwhile stays; the next `look` begins a trial of it. `save`: function of the caller
        that writes `stage` to disk."""
        self.deployment.roll_back(self._saving(stage, save))
        self.readings.clear()  # they reach into the probation
        self.before, self.before_variances = stage.before, stage.before_variances
        self._set_known(stage.member, self.deployment.members().get(stage.member))

    def forget(self, stage: Stage) -> None:
        """Stop watching the drafter of `stage`, after `judge` found that it has left the server ("gone"). The stage's
        changes can no longer be rolled back. If the server has an unknown drafter under the same name, the next `look`
        begins a trial of it."""
        before = next((change[2] for change in stage.undo if change[:2] == ["drafter", stage.member]), None)
        self.deployment.keep()
        self.readings.clear()
        self._set_known(stage.member, stage.served if stage.kind == "route" else before)

    def _saving(self, stage: Stage, save: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that copies the deployment's `undo` to the stage and saves the stage."""

        def save_undo() -> None:
            stage.undo = self.deployment.undo
            save()

        return save_undo

    def _set_known(self, name: str, drafter: str | None) -> None:
        if self.known is not None:
            self.known = {key: value for key, value in self.known.items() if key != name}
            self.known |= {name: drafter} if drafter is not None else {}
