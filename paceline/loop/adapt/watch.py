"""Adaptation daemon of a server: reads traces, decides every hour, trains, compares the candidate with the serving
drafter (the gate), swaps, watches, rolls back.

    watcher = Watcher(...)
    while True: watcher.tick(time.time()); time.sleep(60)

At most one `Stage` (work such as a training with its deployment) is in progress. It is saved in `state.json` before it
begins, so that a killed daemon resumes it. A drafter that a user loaded by hand may be on probation (trial period) at
the same time; meanwhile the daemon deploys none. Only the `Canary` changes the server. Other failures are logged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, ConfigError, DownloadError, PacelineError, UnreachableError, reraised
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.members import others, scores, serving
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.adapt.gate.retrain import write_window
from paceline.loop.adapt.log import AdaptLog, hour_line, is_event, rebuilt
from paceline.loop.adapt.metrics import AdaptMetrics
from paceline.loop.adapt.rollout.canary import Canary
from paceline.loop.adapt.rollout.stage import ON_SERVER, Stage, read_stage, word_of
from paceline.loop.adapt.rollout.steps import Steps
from paceline.loop.adapt.servers.counted_hours import CountedHours
from paceline.loop.adapt.servers.counters import Counts, Meters
from paceline.loop.adapt.traffic.hours import HOUR_S, Sums
from paceline.loop.adapt.traffic.stored import read_hours
from paceline.runs.folder import plain, write_whole

DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""Exceptions that reading a damaged state.json may raise."""


@dataclass(slots=True)
class Watcher(Steps):
    """Adaptation daemon: decides once an hour whether to train or to use another drafter, carries the decision out on
    the server, and judges the result. A restarted daemon needs only the folder `store.state` and the traces."""

    def __post_init__(self) -> None:
        self.log, self.lineage = AdaptLog(self.store.state), Lineage(self.store.state / "lineage.json")
        incumbent = Path(self.candidate.incumbent)
        self.incumbent = str(incumbent.resolve()) if incumbent.is_dir() else self.candidate.incumbent
        self.metrics = AdaptMetrics(self.policy)
        if self.deployment is not None:
            self._counted = None if self.deployment.traces_rounds else CountedHours(self.store.state)
            self._canary = Canary(self.deployment, self.store.traces, self._counted)
        self._read_state()
        if self.deployment is not None:
            self.deployment.serves(self.incumbent)
        self._earlier = self._counted_earlier()
        self.policy.scores = self._scores

    def tick(self, now: float) -> None:
        """Do all work that is due at `now` (seconds since 1970): decide for completed hours, continue work in progress,
        read the servers' counters. Errors of paceline and of the file system are reported with `say`, not raised."""
        for part in (self._hours, self._look, self._save, self._advance, self._save):
            try:
                part(now)
            except (PacelineError, OSError) as error:
                if isinstance(error, UnreachableError):
                    self.metrics.is_reached = False
                self.say(f"adapt: {error}")
        stage = self.by_hand or self.stage
        self.metrics.stage = stage.name if stage else ""
        self.metrics.hour = (self._next or 1) - 1

    def _hours(self, now: float) -> None:
        """Decide for every completed hour, two minutes after its end: traces are written late."""
        over = int((now - 120) // HOUR_S)
        if self._next is not None and over < self._next - 1:
            self.say(f"adapt: the clock went back {self._next - over} hours: what was decided for these is left out")
            self.policy.reset()
            self._next = None
        if self._next is None:
            hours, _ = self._seen(over, 0, now)
            if num_odd := self.log.num_odd():
                odd = f"{num_odd} events of {self.log.file} that have no hour since 2020, or are damaged"
                self.say(f"adapt: left out {odd}")
            rebuilt(self.policy, hours, self.log, over)
            self._resume_training()
            self._next = over
        if over > self._next:
            hours, left_out = self._seen(over, self._next, now)
            for number in range(max(self._next, over - 7 * 24), over):
                self._next = number + 1  # also after an error: the policy has the hour by then
                self._hour(number, hours.get(number, {}), left_out, now)

    def _resume_training(self) -> None:
        """Correct the restored policy: a training whose stage was not saved, because the daemon was killed before that,
        does not go on, and what it was proposed for may be proposed again."""
        policy, is_lost = self.policy, self.policy.is_training and self.stage is None
        policy.is_training = self.stage is not None and self.stage.trains
        if is_lost:
            trainings = [line for line in self.log.lines() if is_event(line) and line["event"] == "training"]
            policy.proposed -= set(trainings[-1].get("clusters", ()))

    def _seen(self, over: int, since: int, now: float) -> tuple[Mapping[int, Mapping[str, Sums]], Mapping[str, int]]:
        """Read the completed hours [since, over), and the counts of what was left out."""
        if self._counted is None:
            return read_hours(self.store.traces, since, now)
        return self._counted.hours(over, since), self._counted.left_out

    def _hour(self, number: int, seen: Mapping[str, Sums], left_out: Mapping[str, int], now: float) -> None:
        line = self.policy.hour(number, seen)
        self._write(hour_line(line))
        decision = line.decision
        if left_out:
            self.say(f"adapt: left out {dict(left_out)}")
        if decision.is_idle:
            return
        if self.stage is not None or self.by_hand is not None:
            self.policy.proposed -= set(decision.clusters)  # it will be decided again
        elif self.watch.dry_run or (self.deployment is None and decision.action != "retrain"):
            self.policy.proposed -= set(decision.clusters)
            self._event(number, "reported", clusters=decision.clusters, action=decision.action, why=decision.why)
        else:
            try:
                self._begin(number, decision, now)
            except (PacelineError, OSError) as error:
                self.policy.proposed -= set(decision.clusters)
                why = f"{decision.why}; not done: {error}"
                self._event(number, "reported", clusters=decision.clusters, action=decision.action, why=why)

    def _scores(self, cluster: str) -> Mapping[str, float] | None:
        """Acceptance length of the other drafters on a cluster; None if they must be scored first."""
        if self._next is None or self.deployment is None or self.watch.dry_run:
            return {}
        watched = self.policy.clusters[cluster]
        fired_at = watched.series.raised_at or self.policy.mix.raised_at or 0
        current = watched.last_day.tokens_per_round
        return scores(self.deployment, cluster, self.incumbent, self._scored.get(cluster), fired_at, current)

    def _begin(self, number: int, decision: Decision, now: float) -> None:
        """Start carrying out a decision. Raises DownloadError if the server is not in the state that this needs."""
        stage = Stage(decision.action, "gate", number, decision.clusters, incumbent=self.incumbent, began=now)
        if decision.action == "route":
            self._to_route(stage, decision)
        elif decision.action == "score":
            assert self.deployment is not None
            stage.incumbent, members = others(self.deployment, decision.clusters[0], self.incumbent)
            stage.names, stage.candidates = list(members), list(members.values())
            stage.window = {"since": self._since(number, decision.clusters), "tracked": self.policy.tracked}
        else:
            if decision.action == "propose" and self.deployment is not None:
                stage.incumbent = others(self.deployment, decision.clusters[0], self.incumbent)[0]
                stage.member = f"{word_of(decision.clusters)[:24]}-{number}"
            elif self.deployment is not None:
                stage.member, stage.incumbent = serving(self.deployment, decision.clusters[0], self.incumbent)
            if not self._prepared(stage):
                return
        self.stage, self._is_unsaved = stage, True

    def _since(self, number: int, clusters: Sequence[str]) -> int:
        """First hour of the training window: no later than the hour in which an alarm fired."""
        fired = [cluster.series.raised_at for name, cluster in self.policy.clusters.items() if name in clusters]
        return min([number + 1 - self.retrain.window_hours, *(hour for hour in fired if hour is not None)])

    def _prepared(self, stage: Stage) -> bool:
        """Write the training window to disk. Returns False if it cannot be used."""
        name, clusters = f"{stage.hour}-{word_of(stage.clusters)}", stage.clusters
        since = self._since(stage.hour, clusters)
        try:
            folder = self.store.state / "windows" / name
            window = write_window(self.store.traces, clusters, since, stage.hour + 1, folder, self.policy.tracked)
        except CacheError:
            raise  # a full disk says nothing about the window: it is decided again
        except PacelineError as error:
            self._event(stage.hour, "failed", clusters=clusters, action=stage.kind, why=str(error))
            return False
        trainings = self.store.state.resolve() / "trainings"
        stage.name = "training"
        stage.window = plain(asdict(window))
        stage.rates = list(self.retrain.learning_rates)
        stage.candidates = [str(trainings / f"{name}-{at}" / "drafter") for at in range(len(stage.rates))]
        self._event(stage.hour, "training", clusters=clusters, action=stage.kind, window=asdict(window))
        return True

    def _to_route(self, stage: Stage, decision: Decision) -> None:
        """Prepare to route a cluster to a drafter that passed the gate. Raises DownloadError if the server no longer
        has it."""
        assert self.deployment is not None and decision.member is not None
        self.deployment.pinned(decision.clusters[0])
        stage.member, stage.why, stage.name = decision.member, decision.why, "swap"
        stage.drafter = self.deployment.members().get(stage.member, "")
        if not stage.drafter:
            raise DownloadError(f"the server has no member {stage.member!r} any more")

    def _look(self, now: float) -> None:
        """Read the server's counters, unless a swap or a probation, which read them, is in progress."""
        is_watching = self.by_hand is not None or (self.stage is not None and self.stage.name in ON_SERVER)
        if self._canary is None or is_watching:
            return
        probation = self._canary.look(now)
        self.metrics.is_reached = True
        if probation is not None:
            probation.incumbent = self.incumbent
            self.by_hand, self._is_unsaved = probation, True
            then = "it is watched, and taken back if the server gets worse"
            why = f"{probation.drafter} was loaded by hand ({probation.member}): {then}"
            self._event(probation.hour, "reported", drafter=probation.drafter, why=why)

    def clock_moved(self, by: float) -> None:
        """Correct the times of the work in progress after the system clock was set forward by `by` seconds (negative:
        back)."""
        self.say(f"adapt: the clock was set {'forward' if by > 0 else 'back'} by {abs(by):.0f} s")
        for stage in (self.stage, self.by_hand):
            if stage is not None:
                stage.clock_moved(by)
        self._is_unsaved = True

    # Saved state

    def _save(self, now: float) -> None:
        """Save the state if it has changed. Raises CacheError; the next tick tries again."""
        if self._is_unsaved or self._earlier != self._counted_earlier():
            self._save_now()

    def _save_now(self) -> None:
        stages = {name: stage and asdict(stage) for name, stage in (("stage", self.stage), ("by_hand", self.by_hand))}
        state = {"incumbent": self.incumbent, **stages, "scored": self._scored, "meters": self._meters().saved()}
        state["known"] = self._canary.known if self._canary else None
        write_whole(self.store.state / "state.json", json.dumps(plain(state), indent=1) + "\n")
        self._is_unsaved, self._earlier = False, self._counted_earlier()

    def _meters(self) -> Meters:
        return self.deployment.meters if self.deployment is not None else Meters({})

    def _counted_earlier(self) -> list[Counts]:
        """Counts before the servers' latest restarts, which a resumed daemon needs."""
        return [meter.earlier for meter in self._meters().all()]

    def _read_state(self) -> None:
        file = self.store.state / "state.json"
        if not file.exists():
            return
        with reraised(ConfigError, f"{file} is damaged", "move it away", *DAMAGED):
            state = json.loads(file.read_text(encoding="utf-8"))
            self.incumbent, self._scored = str(state["incumbent"]), dict(state["scored"])
            scored = self._scored.values()
            if not all(type(each["hour"]) is int and _has_gains(each["members"]) for each in scored):
                raise ValueError("impossible scored")
            stages = (state["stage"], state["by_hand"])
            self.stage, self.by_hand = (None if stage is None else read_stage(stage) for stage in stages)
            known = state["known"]
            if self._canary is not None and self._canary.deployment.traces_rounds and known is not None:
                self._canary.known = dict(known)  # other servers do not list what they draft with
            self._meters().restore(state["meters"])
        stage = self.by_hand or self.stage
        if self.deployment is not None and stage is not None:
            self.deployment.resume(stage.undo)

    def stop(self, now: float) -> None:
        """Stop the running training or gate job, which a restarted daemon resumes, and close the connections to the
        servers. `now`: seconds since 1970."""
        if self._job is not None:
            if self.stage is not None:
                self.stage.pause(now)
                self._is_unsaved = True
            try:
                self._save(now)
            except CacheError as error:
                self.say(f"adapt: {error}; the time that the training has run is not saved")
            self._job.stop()
        if self.deployment is not None:
            self.deployment.close()


def _has_gains(members: Mapping[str, Any]) -> bool:
    """True if `members` is a dict of verdicts that passed, as `members.scores` reads it."""
    gains = [verdict["gains"]["drifted"] for verdict in members.values()]
    lengths = [gain[name] for gain in gains for name in ("candidate", "incumbent")]
    return all(type(length) in (int, float) and length > 0 for length in lengths)
