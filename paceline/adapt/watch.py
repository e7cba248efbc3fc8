"""The daemon beside a server: reads traces, decides every hour, trains, gates, swaps, watches, rolls back.

    watcher = Watcher(...)
    while True: watcher.tick(time.time()); time.sleep(60)

One thing is under way at a time, a `Stage`, and it is written down (`state.json`) before it begins: a daemon that was killed
goes on with it. The server is touched in three places only: `_swap` and `_route`, after a verdict that passed, and
`_give_back`. What goes wrong anywhere else is a line in the log, and the server goes on as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.adapt.config import CandidateConfig, RetrainConfig, StoreConfig, WatchConfig
from paceline.adapt.counted import CountedHours
from paceline.adapt.counts import Counts
from paceline.adapt.decide import Decision
from paceline.adapt.deploy import Deployment
from paceline.adapt.hours import HOUR_S, Sums
from paceline.adapt.lineage import Lineage
from paceline.adapt.log import AdaptLog, apply, rebuilt
from paceline.adapt.members import others, scores, serving
from paceline.adapt.metrics import AdaptMetrics
from paceline.adapt.policy import SeasonalPolicy
from paceline.adapt.retrain import Job, command_of, verdict_of, write_window
from paceline.adapt.stage import Stage, word_of
from paceline.adapt.stored import read_hours
from paceline.config import EngineConfig
from paceline.errors import ConfigError, PacelineError, reraised
from paceline.runlog import plain, write_whole

MOST_READINGS = 120
"""Of the server's counters: what acceptance was before a swap."""
Start = Callable[[list[str], Path], Job]


@dataclass(slots=True)
class Watcher:
    """All it knows is in `store.state` and in the traces."""

    store: StoreConfig
    engine: EngineConfig
    deployment: Deployment | None
    """None: decide and say, touch no server."""
    policy: SeasonalPolicy
    candidate: CandidateConfig
    retrain: RetrainConfig
    watch: WatchConfig
    say: Callable[[str], None] = lambda text: None
    start: Start = Job
    metrics: AdaptMetrics | None = None
    log: AdaptLog = field(init=False)
    lineage: Lineage = field(init=False)
    stage: Stage | None = field(init=False, default=None)
    incumbent: str = field(init=False)
    _job: Job | None = field(init=False, default=None)
    _next: int | None = field(init=False, default=None)
    """The next hour to decide about."""
    _readings: deque[tuple[float, Counts]] = field(init=False, default_factory=lambda: deque(maxlen=MOST_READINGS))
    _known: dict[str, str] | None = field(init=False, default=None)
    """Members that the server had when it was last looked at."""
    _counted: CountedHours | None = field(init=False, default=None)
    """Of servers whose rounds no trace tells."""
    _scored: dict[str, Any] = field(init=False, default_factory=dict)
    """By cluster: the hour in which its other members were judged, and the verdicts of those that passed."""

    def __post_init__(self) -> None:
        self.log, self.lineage = AdaptLog(self.store.state), Lineage(self.store.state / "lineage.json")
        incumbent = Path(self.candidate.incumbent)
        self.incumbent = str(incumbent.resolve()) if incumbent.is_dir() else self.candidate.incumbent
        if self.deployment is not None and not self.deployment.traces_rounds:
            self._counted = CountedHours(self.store.state)
        self._read_state()
        self.policy.scores = self._scores

    def tick(self, now: float) -> None:
        """One look at everything; `now` in seconds since 1970. Raises nothing of ours: what goes wrong is said and logged."""
        for part in (self._hours, self._look, self._advance):
            try:
                part(now)
            except (PacelineError, OSError) as error:
                self.say(f"adapt: {error}")
        if self.metrics is not None:
            self.metrics.stage = self.stage.name if self.stage else ""
            self.metrics.hour = (self._next or 1) - 1

    def _hours(self, now: float) -> None:
        """Decide about every hour that is over, but not about the last few minutes: traces are written late."""
        over = int((now - 120) // HOUR_S)
        if self._next is None:
            hours, _ = self._seen(over, 0, now)
            rebuilt(self.policy, hours, self.log, over)
            self.policy.is_training = self.stage is not None and self.stage.trains
            self._next = over
        if over > self._next:
            hours, left_out = self._seen(over, self._next, now)
            for number in range(max(self._next, over - 7 * 24), over):
                self._hour(number, hours.get(number, {}), left_out, now)
            self._next = over

    def _seen(self, over: int, since: int, now: float) -> tuple[Mapping[int, Mapping[str, Sums]], Mapping[str, int]]:
        """Hours from `since` on, of which all is known, and what was left out."""
        return (self._counted.hours(over, since), {}) if self._counted else read_hours(self.store.traces, since, now)

    def _read(self, now: float) -> Counts:
        """The server's counters."""
        assert self.deployment is not None
        counts = self.deployment.counts()
        if self._counted:
            self._counted.read(now, counts)
        return counts

    def _hour(self, number: int, seen: Mapping[str, Sums], left_out: Mapping[str, int], now: float) -> None:
        line = self.policy.hour(number, seen)
        self.log.hour(line)
        decision = line.decision
        if left_out:
            self.say(f"adapt: left out {dict(left_out)}")
        if decision.action == "none":
            return
        if self.stage is not None:
            self.policy.proposed -= set(decision.clusters)  # it will be decided again
        elif self.watch.dry_run or (self.deployment is None and decision.action != "retrain"):
            self._event(number, "told", clusters=decision.clusters, action=decision.action, why=decision.why)
        else:
            try:
                self._begin(number, decision, now)
            except PacelineError as error:
                self.policy.proposed -= set(decision.clusters)
                why = f"{decision.why}; not done: {error}"
                self._event(number, "told", clusters=decision.clusters, action=decision.action, why=why)

    def _scores(self, cluster: str) -> Mapping[str, float] | None:
        """Tokens a round that the other members of the pool would bring on a cluster; None when that is to be found out."""
        if self._next is None or self.deployment is None or self.watch.dry_run:
            return {}
        watched = self.policy.clusters[cluster]
        raised, now = watched.series.raised_at or self.policy.mix.raised_at or 0, watched.last_day.tokens_per_round
        return scores(self.deployment, cluster, self.incumbent, self._scored.get(cluster), raised, now)

    def _begin(self, number: int, decision: Decision, now: float) -> None:
        """Carry a decision out, or its first step. Raises DownloadError when the server is not as it must be for that."""
        stage = Stage(decision.action, "gate", number, decision.clusters, incumbent=self.incumbent, began=now)
        if decision.action == "route":
            self._route(stage, decision, now)
            return
        if decision.action == "score":
            assert self.deployment is not None
            stage.incumbent, members = others(self.deployment, decision.clusters[0], self.incumbent)
            stage.names, stage.candidates = list(members), list(members.values())
            stage.window = {"since": self._since(number, decision.clusters)}
        else:
            if decision.action == "propose" and self.deployment is not None:
                stage.incumbent = others(self.deployment, decision.clusters[0], self.incumbent)[0]
                stage.member = f"{word_of(decision.clusters)[:24]}-{number}"
            elif self.deployment is not None:
                stage.member, stage.incumbent = serving(self.deployment, decision.clusters[0], self.incumbent)
            if not self._prepared(stage):
                return
        self.stage = stage
        self._write_state()

    def _since(self, number: int, clusters: Sequence[str]) -> int:
        """The first hour of the traffic that is looked at: at the latest where an alarm was raised."""
        raised = [each.series.raised_at for key, each in self.policy.clusters.items() if key in clusters]
        return min([number + 1 - self.retrain.window_hours, *(each for each in raised if each is not None)])

    def _prepared(self, stage: Stage) -> bool:
        """Write the window of a training down."""
        name, clusters = f"{stage.hour}-{word_of(stage.clusters)}", stage.clusters
        since = self._since(stage.hour, clusters)
        try:
            window = write_window(self.store.traces, clusters, since, stage.hour + 1, self.store.state / "windows" / name)
        except PacelineError as error:
            self._event(stage.hour, "failed", clusters=clusters, why=str(error))
            return False
        outs = (self.store.state.resolve() / "trainings" / f"{name}-{at}" for at in range(len(self.retrain.learning_rates)))
        stage.name, stage.window, stage.candidates = "training", plain(asdict(window)), [str(out / "drafter") for out in outs]
        self._event(stage.hour, "training", clusters=clusters, window=asdict(window))
        return True

    def _route(self, stage: Stage, decision: Decision, now: float) -> None:
        """Send a cluster to a member that the gate has found good enough."""
        assert self.deployment is not None and decision.member is not None
        (cluster,), name = decision.clusters, decision.member
        verdict = self._scored[cluster]["members"][name]
        before = self.deployment.counts()
        stage.member, stage.drafter = name, self.deployment.members()[name]
        self.deployment.route(cluster, name)
        self.stage, stage.undo = stage, self.deployment.undo
        self.lineage.add(
            stage.drafter, parents=[], state="routed", reason=decision.why, member=name, clusters=[cluster], gate=verdict
        )
        self._on_probation(stage, now, before)
        self._event(stage.hour, "routed", clusters=stage.clusters, drafter=stage.drafter, member=name, why=decision.why)
        self._write_state()

    def _event(self, hour: int, event: str, **told: Any) -> None:
        apply(self.policy, self.log.event(hour, event, **told))
        if self.metrics is not None:
            self.metrics.events[event] += 1
        self.say(f"adapt: {event} {told.get('why', '')}".rstrip())

    # What is under way

    def _look(self, now: float) -> None:
        """Read the server's counters, but in probation, which does so itself."""
        if self.deployment is not None and (self.stage is None or self.stage.name != "probation"):
            self._readings.append((now, self._read(now)))
            self._look_for_others(now)

    def _advance(self, now: float) -> None:
        stage = self.stage
        if stage is None:
            return
        if stage.name == "probation":
            self._probation(stage, now)
            return
        if self._job is None:
            said = self.store.state / "jobs" / f"{stage.kind}-{stage.name}-{stage.hour}-{stage.at}"
            self._job = self.start(command_of(stage, self.store, self.engine, self.candidate, self.retrain), said)
            stage.began = now
            return
        status = self._job.poll()
        if status is None:
            return
        job, self._job = self._job, None
        if stage.name == "training":
            self._trained(stage, job, status, now)
        else:
            self._judged(stage, job, status, now)
        self._write_state()

    def _trained(self, stage: Stage, job: Job, status: int, now: float) -> None:
        stage.seconds += now - stage.began
        if status == 0:
            stage.name = "gate"
            return
        self.say(f"adapt: candidate {stage.at} was not trained ({job.last_words})")
        stage.verdicts.append({"passed": False, "reason": f"its training ended with status {status}: {job.last_words}"})
        self._next_candidate(stage, now)

    def _judged(self, stage: Stage, job: Job, status: int, now: float) -> None:
        verdict = verdict_of(job, status)
        stage.verdicts.append(verdict)
        if stage.kind != "score":
            stage.candidates[stage.at] = verdict.get("drafter") or stage.candidates[stage.at]
        self._next_candidate(stage, now)

    def _next_candidate(self, stage: Stage, now: float) -> None:
        """Train or judge another, or decide between those that were."""
        stage.at += 1
        if stage.at < len(stage.candidates):
            stage.name = "gate" if stage.kind == "score" else "training"
        elif stage.kind == "score":
            self._scored_all(stage, now)
        else:
            self._choose(stage, now)

    def _scored_all(self, stage: Stage, now: float) -> None:
        """What the policy is told when it asks again."""
        verdicts = dict(zip(stage.names, stage.verdicts, strict=True))
        passed = {name: verdict for name, verdict in verdicts.items() if verdict["passed"]}
        self._scored[stage.clusters[0]] = {"hour": _hour_of(now), "members": passed}
        why = "; ".join(f"{name}: {verdict['reason']}" for name, verdict in verdicts.items())
        self.stage = None
        self._event(_hour_of(now), "scored", clusters=stage.clusters, why=why)

    def _choose(self, stage: Stage, now: float) -> None:
        """The best of those that were trained, if one passed."""
        passed = []
        for at, (drafter, verdict) in enumerate(zip(stage.candidates, stage.verdicts, strict=True)):
            if verdict["passed"] and (before := self.lineage.is_known_bad(Path(drafter))):
                verdict |= {"passed": False, "reason": f"the very same weights were turned away before: {before}"}
            passed += [at] if verdict["passed"] else []
            state, window = "passed" if verdict["passed"] else "refused", dict(stage.window)
            del window["folder"]
            self.lineage.add(
                drafter, parents=[stage.incumbent], state=state, reason=verdict["reason"], window=window, gate=verdict
            )
        cost = stage.seconds / HOUR_S * (self.retrain.train_threads or os.cpu_count() or 1)
        if not passed:
            self._refused(stage, now, "; ".join(each["reason"] for each in stage.verdicts), cost)
            return
        stage.at = max(passed, key=lambda at: stage.verdicts[at]["gains"]["drifted"]["low"])
        self._swap(stage, now, cost)

    def _refused(self, stage: Stage, now: float, why: str, cost: float) -> None:
        self.stage = None
        self._event(_hour_of(now), "refused", clusters=stage.clusters, why=why, cost_hours=cost)

    def _swap(self, stage: Stage, now: float, cost: float) -> None:
        """Put the drafter where the old one is, or beside it for its cluster alone."""
        stage.drafter, why = stage.candidates[stage.at], stage.verdicts[stage.at]["reason"]
        if self.deployment is None:
            self._refused(stage, now, f"no server was named; {stage.drafter} is ready: {why}", cost)
            return
        try:
            before = self.deployment.counts()
            self.deployment.load(stage.member, Path(stage.drafter))
            if stage.kind == "propose":
                self.deployment.route(stage.clusters[0], stage.member)
        except PacelineError as error:
            with contextlib.suppress(PacelineError):  # it may be away
                self.deployment.roll_back()
            self.deployment.keep()
            self.lineage.mark(stage.drafter, "refused", str(error))
            self._refused(stage, now, f"the server refused it: {error}", cost)
            return
        stage.undo = self.deployment.undo
        self._on_probation(stage, now, before)
        self._known = self.deployment.members()
        self.lineage.mark(stage.drafter, "serving", why)
        told = {"clusters": stage.clusters, "drafter": stage.drafter, "member": stage.member}
        self._event(_hour_of(now), "swapped", **told, why=why, cost_hours=cost)

    def _look_for_others(self, now: float) -> None:
        """A drafter that somebody loaded by hand is watched as one of ours is."""
        assert self.deployment is not None
        members, known = self.deployment.members(), self._known
        self._known = members
        new = sorted(name for name, drafter in members.items() if known is not None and known.get(name) != drafter)
        if new and known is not None and self.stage is None:
            name = new[0]
            self.deployment.found(name, known.get(name))
            stage = Stage("found", "probation", _hour_of(now), (), name, self.incumbent, drafter=members[name])
            self.stage, stage.undo = stage, self.deployment.undo
            self._on_probation(stage, now, self._readings[-1][1])
            self._event(_hour_of(now), "told", drafter=stage.drafter, why=f"{name} was loaded by hand: it is watched")
            self._write_state()

    def _on_probation(self, stage: Stage, now: float, counts: Counts) -> None:
        stage.begin_probation(self.store.traces, self._readings[0][1] if self._readings else None, counts, now)

    def _probation(self, stage: Stage, now: float) -> None:
        """Keep what was changed, or take it back: the server is not well, requests fail, or acceptance fell."""
        assert self.deployment is not None
        counts = self._read(now) if self.deployment.is_well() else None
        wrong = "the server is not well" if counts is None else stage.wrong(self.store.traces, counts, now, self.watch)
        if wrong:
            self._give_back(stage, now, wrong)
        elif now - stage.began >= 60 * self.watch.probation_minutes:
            was_ours = ["drafter", stage.member, self.incumbent] in stage.undo
            if (stage.kind == "retrain" and stage.incumbent == self.incumbent) or (stage.kind == "found" and was_ours):
                self.incumbent = stage.drafter
            self.deployment.keep()
            self.stage = None
            self._event(_hour_of(now), "kept", clusters=stage.clusters, drafter=stage.drafter, why="nothing fell")
            self._readings.clear()
            self._write_state()

    def _give_back(self, stage: Stage, now: float, why: str) -> None:
        assert self.deployment is not None
        self.deployment.roll_back()
        self._known = None
        if stage.kind == "route":
            self._scored[stage.clusters[0]]["members"].pop(stage.member, None)
        self.lineage.mark(stage.drafter, "routed back" if stage.kind == "route" else "rolled back", why)
        self.stage = None
        self._event(_hour_of(now), "rolled back", clusters=stage.clusters, drafter=stage.drafter, why=why)
        self._write_state()

    # Written down

    def _write_state(self) -> None:
        stage = None if self.stage is None else asdict(self.stage)
        told = {"incumbent": self.incumbent, "stage": stage, "scored": self._scored}
        write_whole(self.store.state / "state.json", json.dumps(plain(told), indent=1) + "\n")

    def _read_state(self) -> None:
        file = self.store.state / "state.json"
        if not file.exists():
            return
        with reraised(ConfigError, f"{file} is damaged", "move it away", OSError, ValueError, KeyError, TypeError):
            told = json.loads(file.read_text(encoding="utf-8"))
            self.incumbent, self._scored = str(told["incumbent"]), dict(told["scored"])
            if told["stage"] is not None:
                self.stage = Stage(**{**told["stage"], "clusters": tuple(told["stage"]["clusters"])})
        if self.deployment is not None and self.stage is not None:
            self.deployment.undo = self.stage.undo

    def stop(self) -> None:
        """End what is under way; it goes on when the daemon is started again."""
        if self._job is not None:
            self._job.stop()
        if self.deployment is not None:
            self.deployment.close()


def _hour_of(now: float) -> int:
    return int(now // HOUR_S)
