"""Steps of the daemon's work: runs trainings and gates (tests of new drafters) as background jobs, then changes the
server.

A step that fails, for example because a disk is full or a server does not answer, is repeated at a later call of
`Watcher.tick`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import CacheError, DeployError, DownloadError, RejectedError
from paceline.loop.adapt.config import CandidateConfig, RetrainConfig, StoreConfig, WatchConfig
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.adapt.gate.retrain import Job, command_of, not_trained, unjudged, verdict_of
from paceline.loop.adapt.log import AdaptLog, apply, event_line
from paceline.loop.adapt.metrics import AdaptMetrics
from paceline.loop.adapt.rollout.canary import Canary
from paceline.loop.adapt.rollout.stage import AWAY_S, LONGEST_WAIT_S, ON_SERVER, Stage
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.traffic.hours import HOUR_S

Start = Callable[[list[str], Path], Job]
STOPPED = -1000
"""In place of an exit status: the training used its budget and was stopped."""


@dataclass(slots=True)
class Steps:
    """Base class of the daemon: holds its state, and carries out the steps of its current `Stage` (a piece of work,
    such as training a drafter and deploying it)."""

    store: StoreConfig
    engine: EngineConfig
    deployment: Deployment | None
    """Servers to change. None: only decide and log."""
    policy: SeasonalPolicy
    candidate: CandidateConfig
    retrain: RetrainConfig
    watch: WatchConfig
    say: Callable[[str], None] = lambda text: None
    start: Start = Job
    log: AdaptLog = field(init=False)
    metrics: AdaptMetrics = field(init=False)
    lineage: Lineage = field(init=False)
    stage: Stage | None = field(init=False, default=None)
    by_hand: Stage | None = field(init=False, default=None)
    """Probation of a drafter that a user loaded by hand; a training may run at the same time."""
    incumbent: str = field(init=False)
    _job: Job | None = field(init=False, default=None)
    _next: int | None = field(init=False, default=None)
    """Next hour to decide."""
    _canary: Canary | None = field(init=False, default=None)
    _counted: CountedHours | None = field(init=False, default=None)
    """Computes hourly sums for servers whose traces contain no rounds; else None."""
    _is_unsaved: bool = field(init=False, default=False)
    _earlier: list[Counts] = field(init=False, default_factory=list)
    """Counts before the latest restart of each server, as last saved in state.json."""
    _scored: dict[str, Any] = field(init=False, default_factory=dict)
    """Cluster -> latest results of a stage of the kind "score": {"hour": hour of the comparison, "members": {name of a
    drafter that passed: verdict as JSON}}."""

    def _event(self, hour: int, event: str, **figures: Any) -> None:
        line = event_line(hour, event, **figures)
        apply(self.policy, line)
        self.metrics.events[event] += 1
        self.say(f"adapt: {event} {figures.get('why', '')}".rstrip())
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        """Log a line; a full disk does not stop the daemon."""
        try:
            self.log.append(dict(line))
        except CacheError as error:
            self.say(f"adapt: {error}; the line is written with the next one")

    def _advance(self, now: float) -> None:
        if self.by_hand is not None:
            self._on_server(self.by_hand, now)
        stage = self.stage
        if stage is None or (self.by_hand is not None and stage.name in ON_SERVER):
            return
        if stage.name == "choose":
            self._choose(stage, now)
        elif stage.name in ON_SERVER:
            self._on_server(stage, now)
        elif self._job is None:
            out = self.store.state / "jobs" / f"{stage.kind}-{stage.name}-{stage.hour}-{stage.at}"
            same_shapes = self.deployment is not None and self.deployment.needs_same_shapes
            given = (stage, self.store, self.engine, self.candidate, self.retrain)
            self._job = self.start(command_of(*given, same_shapes=same_shapes), out)
            if isinstance(self._job, Job) and self._job.is_waiting:
                stage.pause(now)  # the job has run since `began`
                self.say(f"adapt: a {stage.name} of an earlier daemon goes on here: it is waited for, then taken up")
            stage.began, stage.skew, self._is_unsaved = now, 0.0, True
        elif (status := self._status(stage, self._job, now)) is not None:
            job, self._job, self._is_unsaved = self._job, None, True
            (self._trained if stage.name == "training" else self._judged)(stage, job, status, now)

    def _status(self, stage: Stage, job: Job, now: float) -> int | None:
        """Exit status of a job; None while it runs. A training that has used its budget is stopped."""
        status, budget = job.poll(), self.retrain.train_hours_budget
        if status is None and stage.name == "training" and budget is not None:
            if (stage.used + stage.lasted(now)) / HOUR_S * self._units() < budget:
                return None
            self.say(f"adapt: candidate {stage.at} has used its {budget:g} hours: its training is stopped")
            job.stop()
            return STOPPED
        return status

    def _trained(self, stage: Stage, job: Job, status: int, now: float) -> None:
        stage.pause(now)
        stage.seconds, stage.used = stage.seconds + stage.used, 0.0
        why = not_trained(status, job, Path(stage.candidates[stage.at]), self.retrain)
        if status == STOPPED:
            why = f"its training was stopped after {self.retrain.train_hours_budget:g} hours: raise train_hours_budget"
        if why is None:
            stage.name = "gate"
            return
        self.say(f"adapt: candidate {stage.at} was not trained ({why})")
        stage.verdicts.append(unjudged(why))
        self._next_candidate(stage, now)

    def _judged(self, stage: Stage, job: Job, status: int, now: float) -> None:
        verdict = verdict_of(job, status)
        stage.verdicts.append(verdict)
        if stage.kind != "score":
            stage.candidates[stage.at] = verdict.get("drafter") or stage.candidates[stage.at]
        self._next_candidate(stage, now)

    def _next_candidate(self, stage: Stage, now: float) -> None:
        stage.at += 1
        if stage.at < len(stage.candidates):
            stage.name = "gate" if stage.kind == "score" else "training"
        else:
            stage.name = "choose"
            self._choose(stage, now)

    def _scored_all(self, stage: Stage, now: float) -> None:
        """Store the verdicts for the policy, which decides again."""
        verdicts = dict(zip(stage.names, stage.verdicts, strict=True))
        passed = {name: verdict for name, verdict in verdicts.items() if verdict["passed"]}
        self._scored[stage.clusters[0]] = {"hour": hour_of(now), "members": passed}
        self._end(stage)
        why = "; ".join(f"{name}: {verdict['reason']}" for name, verdict in verdicts.items())
        self._event(hour_of(now), "scored", clusters=stage.clusters, why=why)

    def _choose(self, stage: Stage, now: float) -> None:
        """Choose the best candidate that passed, if any. Raises CacheError on a full disk; the next tick tries
        again."""
        if stage.kind == "score":
            self._scored_all(stage, now)
            return
        passed = []
        for at, (drafter, verdict) in enumerate(zip(stage.candidates, stage.verdicts, strict=True)):
            if verdict["passed"] and (before := self.lineage.is_known_bad(Path(drafter))):
                verdict |= {"passed": False, "reason": f"the very same weights were turned away before: {before}"}
            passed += [at] if verdict["passed"] else []
        self.lineage.add_all(_entries(stage))
        if not passed:
            self._refused(stage, now, "; ".join(verdict["reason"] for verdict in stage.verdicts))
            return
        stage.at = max(passed, key=lambda at: stage.verdicts[at]["gains"]["drifted"]["low"])
        stage.name = "swap"
        stage.drafter, stage.why = stage.candidates[stage.at], stage.verdicts[stage.at]["reason"]
        self._is_unsaved = True
        if self.by_hand is None:
            self._on_server(stage, now)

    def _refused(self, stage: Stage, now: float, why: str, event: str = "refused") -> None:
        self._end(stage)
        self._event(hour_of(now), event, clusters=stage.clusters, why=why, cost_hours=self._cost(stage))

    def _cost(self, stage: Stage) -> float:
        """Core- or GPU-hours of the stage's trainings."""
        return stage.seconds / HOUR_S * self._units()

    def _units(self) -> float:
        """Number of cores or GPUs that a training keeps busy."""
        return self.retrain.train_units or self.retrain.train_threads or os.cpu_count() or 1

    def _end(self, stage: Stage) -> None:
        self._is_unsaved = True
        if stage is self.by_hand:
            self.by_hand = None
        else:
            self.stage = None

    # On the server

    def _save_now(self) -> None:
        """Save the state. Raises CacheError."""
        raise NotImplementedError

    def _on_server(self, stage: Stage, now: float) -> None:
        """Take the next step of a stage that needs the server; retry later if it does not answer."""
        if 0 < stage.wait_until - now <= LONGEST_WAIT_S:  # if the clock went back, the wait would never end
            return
        try:
            steps = {"swap": self._swap, "probation": self._probation, "spread": self._spread, "undo": self._undo}
            steps[stage.name](stage, now)
        except DownloadError as error:
            self._wait(stage, now, error)
            return
        if self.deployment is not None:
            self.metrics.is_reached = True
        if stage.away_since:
            stage.reached()
            self._is_unsaved = True
            why = "the server answers again"
            self._event(hour_of(now), "answers", clusters=stage.clusters, drafter=stage.drafter, why=why)

    def _wait(self, stage: Stage, now: float, error: DownloadError) -> None:
        """Schedule a retry: a server that does not answer has not refused. A rollback is never given up."""
        self.metrics.is_reached = False
        self._is_unsaved, is_first = True, not stage.away_since
        stage.wait(now)
        away_s = now - stage.away_since
        if is_first:
            why = f"{stage.name} waits for the server: {error}"
            self._event(hour_of(now), "waiting", clusters=stage.clusters, drafter=stage.drafter, why=why)
        if stage.name in ("swap", "spread") and away_s >= self.watch.most_wait_hours * HOUR_S:
            why = f"given up after {away_s / HOUR_S:.3g} hours: {error}; {stage.drafter} is ready"
            self._to_undo(stage, "failed" if stage.name == "swap" else "unproven", why)
        elif stage.name == "probation" and away_s >= AWAY_S:
            self._to_undo(stage, "unproven", f"the server has not answered for {away_s:.0f} s: {error}")

    def _swap(self, stage: Stage, now: float) -> None:
        """Load the drafter in place of the serving one or next to it, or route its cluster to it."""
        if self._canary is None:
            self._refused(stage, now, f"no server was named; {stage.drafter} is ready: {stage.why}")
            return
        try:
            self._canary.swap_in(stage, now, self._save_now)
        except DeployError as error:
            self._to_undo(stage, "failed", f"not put in: {error}; {stage.drafter} is ready")
            self._undo(stage, now)
            return
        except RejectedError as error:
            self._to_undo(stage, "refused", f"the server refused it: {error}")
            self._undo(stage, now)
            return
        self._is_unsaved = True
        figures = {"clusters": stage.clusters, "drafter": stage.drafter, "member": stage.member, "why": stage.why}
        if stage.kind == "route":
            verdict = self._scored.get(stage.clusters[0], {}).get("members", {}).get(stage.member)
            self._event(hour_of(now), "routed", **figures)
            entry = {"drafter": stage.drafter, "parents": [], "state": "routed", "reason": stage.why}
            stage.pending.append(entry | {"member": stage.member, "clusters": list(stage.clusters), "gate": verdict})
        else:
            self._event(hour_of(now), "swapped", **figures, cost_hours=self._cost(stage))
            stage.pending.append({"drafter": stage.drafter, "state": "serving", "reason": stage.why})
        self._write_pending_or_say(stage)

    def _write_pending(self, stage: Stage) -> None:
        """Write pending lineage updates. Raises CacheError; a later tick tries again."""
        while stage.pending:
            entry = stage.pending[0]
            (self.lineage.add if "parents" in entry else self.lineage.mark)(**entry)
            stage.pending.pop(0)
            self._is_unsaved = True

    def _write_pending_or_say(self, stage: Stage) -> None:
        """Like `_write_pending`, but a full disk does not interrupt a probation."""
        try:
            self._write_pending(stage)
        except CacheError as error:
            self.say(f"adapt: {error}; what was done is written later")

    def _probation(self, stage: Stage, now: float) -> None:
        """Keep the drafter, or roll it back: more failures, lower acceptance, or too little data."""
        assert self._canary is not None
        self._write_pending_or_say(stage)
        ended = self._canary.judge(stage, now, self.watch)
        self._is_unsaved = True  # the reading: without it, a restart of both daemon and server would lose these counts
        if ended is None:
            return
        ending, why = ended
        if ending == "kept" and stage.others and stage.kind != "by hand":
            stage.name, stage.why = "spread", why
            self._event(hour_of(now), "spread", clusters=stage.clusters, drafter=stage.drafter, why=why)
            self._spread(stage, now)
        elif ending == "kept":
            self._accept(stage, now, why)
        elif ending == "gone":
            self._canary.forget(stage)
            self._canary.deployment.serves(self.incumbent)
            self._rolled_back(stage, now, "unproven", why)
        else:
            self._to_undo(stage, ending, why)
            self._undo(stage, now)

    def _spread(self, stage: Stage, now: float) -> None:
        """Load the drafter of a canary on the other servers, one by one; if one cannot get it, take it from all."""
        assert self._canary is not None
        try:
            self._canary.spread(stage, self._save_now)
        except RejectedError as error:
            self._to_undo(stage, "unproven", f"not put on all servers: {error}; {stage.drafter} is ready")
            self._undo(stage, now)
            return
        self._accept(stage, now, stage.why)

    def _accept(self, stage: Stage, now: float, why: str) -> None:
        assert self._canary is not None
        self._write_pending(stage)
        replaced = ["drafter", stage.member, self.incumbent] in stage.undo
        if (stage.kind == "retrain" and stage.incumbent == self.incumbent) or (stage.kind == "by hand" and replaced):
            self.incumbent = stage.drafter
        self._canary.keep()
        self._canary.deployment.serves(self.incumbent)
        self._end(stage)
        self._event(hour_of(now), "kept", clusters=stage.clusters, drafter=stage.drafter, why=why)

    def _to_undo(self, stage: Stage, ending: str, why: str) -> None:
        stage.name, stage.ending, stage.why = "undo", ending, why
        stage.num_tries, stage.wait_until = 0, 0.0
        self._is_unsaved = True

    def _undo(self, stage: Stage, now: float) -> None:
        """Roll back. Raises DownloadError and CacheError; a later tick tries again."""
        assert self._canary is not None
        try:
            if self._is_unsaved:  # the reason of the rollback: after a kill it cannot be recovered from the server
                self._save_now()
        except CacheError as error:  # a full disk does not delay a rollback
            self.say(f"adapt: {error}; the state is written later")
        self._canary.roll_back(stage, self._save_now)
        self._rolled_back(stage, now, stage.ending, stage.why)

    def _rolled_back(self, stage: Stage, now: float, ending: str, why: str) -> None:
        """Record a rollback. Only a drafter that was judged and failed is rejected for good."""
        self._write_pending(stage)
        if stage.kind == "route":
            self._scored.get(stage.clusters[0], {}).get("members", {}).pop(stage.member, None)
        state = "routed back" if stage.kind == "route" and ending == "rolled back" else ending
        self.lineage.mark(stage.drafter, "passed" if ending == "failed" else state, why)
        if ending in ("refused", "failed"):
            event = "reported" if stage.kind == "route" else ending
            self._refused(stage, now, why, event)
        else:
            self._end(stage)
            self._event(hour_of(now), "rolled back", clusters=stage.clusters, drafter=stage.drafter, why=why)


def _entries(stage: Stage) -> list[dict[str, Any]]:
    """Builds the candidates' lineage entries; a candidate that was not judged is not marked as refused."""
    window = {key: value for key, value in stage.window.items() if key != "folder"}
    entries = []
    for drafter, verdict in zip(stage.candidates, stage.verdicts, strict=True):
        state = "passed" if verdict["passed"] else "refused" if verdict.get("is_judged", True) else "not judged"
        figures = {"reason": verdict["reason"], "window": window, "gate": verdict}
        entries.append({"drafter": drafter, "parents": [stage.incumbent], "state": state, **figures})
    return entries


def hour_of(now: float) -> int:
    return int(now // HOUR_S)
