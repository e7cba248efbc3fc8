"""Operations that an agent may call, from a look at the traffic to the roll-out of a drafter and back."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.errors import ConfigError, refuse
from paceline.loop.adapt.check import decide_once
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
)
from paceline.loop.adapt.gate.lineage import Lineage, weights_hash
from paceline.loop.adapt.gate.retrain import command_of, paceline_command, verdict_of, write_window
from paceline.loop.adapt.rollout.stage import Stage
from paceline.loop.adapt.servers.counted_hours import ALL, stored_hours
from paceline.loop.adapt.traffic.hours import HOUR_S
from paceline.loop.mcp.calls import CallLog
from paceline.loop.mcp.jobs import Jobs
from paceline.loop.mcp.rollout import Rollout
from paceline.plan.clusters import OTHER
from paceline.runs.folder import plain, whole_folder
from paceline.train.plan.current_traffic import seen_in_traces

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
MOST_CALLS = 1000


@dataclass(slots=True)
class Operations:
    """Implements the tools of the MCP server: each is one method, whose docstring describes the tool to the agent. No
    call can change the settings."""

    store: StoreConfig
    engine: EngineConfig
    policy: PolicyConfig
    prices: PriceConfig
    candidate: CandidateConfig
    retrain: RetrainConfig
    deploy: DeployConfig
    folders: tuple[Path, ...] = ()
    """Further readable folders."""
    log: CallLog = field(init=False)
    jobs: Jobs = field(init=False)
    lineage: Lineage = field(init=False)
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        state = self.store.state
        self.log, self.jobs = CallLog(state), Jobs(state / "jobs")
        self.lineage = Lineage(state / "lineage.json")
        self.rollout = Rollout(state, self.deploy, self.candidate.incumbent)

    def tools(self) -> list[Callable[..., dict[str, Any]]]:
        """Returns the methods that are tools."""
        return [
            self.traffic, self.propose, self.train, self.score, self.gate, self.status,
            self.roll_out, self.roll_back, self.read_log,
        ]  # fmt: skip

    def traffic(self) -> dict[str, Any]:
        """Look at the stored traffic: number of answers ("answers"), their tokens ("answer_tokens") and acceptance
        length ("tokens_per_round"), in total and for each tag ("by_tag")."""
        return plain(_figures(seen_in_traces(self.store.traces)))

    def propose(self) -> dict[str, Any]:
        """Propose the next operation for the stored traffic, such as `retrain`, with the reasons and the clusters
        (groups of similar requests) it concerns. Changes nothing."""
        return plain(decide_once(self.store, self.policy, self.prices))

    def train(self, name: str, cluster: str = ALL) -> dict[str, Any]:
        """Train a candidate in the background, on the latest traffic of a cluster (group of similar requests) and
        initialised from the serving drafter. Returns at once, with the job's id; `status` reports progress and, at the
        end, the drafter's folder. Calling it again with the same arguments resumes an interrupted training. `name`:
        name of the candidate, not used before for another cluster; small letters, digits and dashes."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"name {name[:60]!r} is invalid: take up to 40 small letters, digits and dashes")
        folder = self._state / "trainings" / name

        def command() -> dict[str, Any]:
            if folder.exists():
                raise ConfigError(f"a candidate {name} was trained on another cluster: choose another name")
            latest = max(stored_hours(self.store)[0], default=int(time.time() // HOUR_S))
            since = latest + 1 - self.retrain.window_hours
            out = self._state / "windows" / name
            window = write_window(self.store.traces, [cluster], since, latest + 1, out, self._tracked(cluster))
            stage = self._stage("training", folder / "drafter", cluster, plain(window))
            return {"command": self._command(stage), "drafter": folder / "drafter"}

        return self.jobs.begin("train", {"name": name, "cluster": cluster}, command)

    def score(self, drafter: str, prompts: str = "", limit: int = 20, max_tokens: int = 128) -> dict[str, Any]:
        """Measure a drafter in the real engine, in the background: its acceptance length, and its speed-up over
        decoding without a drafter. Returns at once, with the job's id. `drafter`: its folder. `prompts`: file of
        prompts; if empty, the prompts of the stored traffic. `limit`: maximum number of prompts. `max_tokens`: longest
        answer, in tokens."""
        folder = self._readable(drafter)
        source = self._readable(prompts) if prompts else self.store.traces.resolve()
        if not (0 < limit <= 1000 and 0 < max_tokens <= 4096):
            raise ConfigError("give limit 1-1000, max_tokens 1-4096")
        arguments = {"drafter": str(folder), "prompts": str(source), "limit": limit, "max_tokens": max_tokens}
        given = {**arguments, "weights": weights_hash(folder)}
        out = self._state / "scores" / f"{folder.parent.name}-{(given['weights'] or '')[7:17]}-{limit}-{max_tokens}"
        options: dict[str, Any] = {"--model": self.engine.model, "--prompts": source, "--limit": limit}
        options |= {"--max-tokens": max_tokens, "--batch": 1, "--temperature": 0, "--out": out}
        options |= {"--dtype": self.engine.dtype, "--device": self.engine.device}
        command = paceline_command(["evaluate", folder], options)
        return self.jobs.begin("score", given, lambda: {"command": command})

    def gate(self, drafter: str, cluster: str = ALL) -> dict[str, Any]:
        """Judge whether a drafter may replace the serving one, on held-out stored requests of a cluster (group of
        similar requests), in the background. Returns at once, with the job's id, which `roll_out` needs. `drafter`:
        folder of the drafter to judge. It is refused without a test if identical weights were refused or rolled back
        before."""
        folder, serving = self._readable(drafter), self.rollout.serving
        given = {"drafter": str(folder), "cluster": cluster, "weights": weights_hash(folder), "incumbent": serving}

        def command() -> dict[str, Any]:
            self._check_new(folder)
            tracked = self._tracked(cluster)
            return {"command": self._command(self._stage("gate", folder, cluster, {"since": 0, "tracked": tracked}))}

        return self.jobs.begin("gate", given, command)

    def status(self, job: str = "") -> dict[str, Any]:
        """Report state (running, done, failed), progress and result of the job with this id; if the id is empty, of all
        jobs."""
        self._settle()
        return self.jobs.status(job) if job else {"jobs": [self.jobs.status(name) for name in self.jobs.names()]}

    def roll_out(self, gate: str) -> dict[str, Any]:
        """Load a drafter on the server, in place of the serving one. `gate`: id of the gate job that the drafter
        passed. Refused if the drafter's weights have changed since the gate, or if another drafter serves now than the
        one it was compared with."""
        self._settle()
        record = self.jobs.record(gate)
        verdict, given = record.get("verdict") or {}, record["arguments"]
        refuse(
            ConfigError,
            (record["tool"] != "gate", f"{gate} is no gate: call gate, and give the id that it returns"),
            (not verdict, f"{gate} has no verdict yet: wait until its status is done"),
            (verdict.get("passed") is not True, f"the gate refused it: {verdict.get('reason')}"),
            (given.get("incumbent") != self.rollout.serving, f"{self.rollout.serving} serves by now: call gate again"),
        )
        drafter = Path(verdict["drafter"])
        self._check_new(drafter)
        copy = self._copied(drafter, verdict["weights"])
        done = self.rollout.load(copy)
        self.lineage.add(str(copy), parents=[given["incumbent"]], state="serving", reason=verdict["reason"], by=gate)
        return done

    def roll_back(self, why: str) -> dict[str, Any]:
        """Restore the drafter that served before the latest roll-out. The drafter that is removed can never be rolled
        out again. `why`: reason, recorded with the removed drafter."""
        drafter = self.rollout.undo()
        self.lineage.mark(drafter, "rolled back", why)
        return {"rolled_back": drafter, "serving": self.rollout.serving}

    def read_log(self, most: int = 50) -> dict[str, Any]:
        """Read the log: the latest `most` calls, including refused ones; the state of every drafter that was judged or
        rolled out; and the serving drafter."""
        self._settle()
        refuse(ConfigError, (not 0 < most <= MOST_CALLS, f"most must be between 1 and {MOST_CALLS}"))
        return {"calls": self.log.calls(most), "drafters": self.lineage.entries(), "serving": self.rollout.serving}

    def _check_new(self, drafter: Path) -> None:
        before = self.lineage.is_known_bad(drafter)
        if before is not None:
            raise ConfigError(f"the very same weights were turned away before: {before}")

    @property
    def _state(self) -> Path:
        return self.store.state.resolve()

    def _readable(self, path: str) -> Path:
        """Resolve a path, symbolic links included. Raises ConfigError if it is outside of the given folders."""
        roots = [folder.resolve() for folder in (self.store.traces, self.store.state, *self.folders)]
        real = Path(path).resolve()
        if not any(real.is_relative_to(root) for root in roots):
            given = ", ".join(map(str, roots))
            raise ConfigError(f"{path} is outside of the folders of this server: give a path within {given}")
        if not real.exists():
            raise ConfigError(f"{path} does not exist: take the folder that a training's status names")
        return real

    def _stage(self, step: str, drafter: Path, cluster: str, window: dict[str, Any]) -> Stage:
        """Return the daemon's stage of this step, so that training and gate are the daemon's own."""
        serving = self.rollout.serving
        return Stage("retrain", step, 0, (cluster,), incumbent=serving, window=window, candidates=[str(drafter)])

    def _tracked(self, cluster: str) -> list[str]:
        """Clusters that the policy's cluster "other" leaves out; [] for another cluster."""
        seen = decide_once(self.store, self.policy, self.prices).get("seen", {}) if cluster == OTHER else {}
        return [name for name in seen if name != OTHER]

    def _command(self, stage: Stage) -> list[str]:
        return command_of(stage, self.store, self.engine, self.candidate, self.retrain)

    def _copied(self, drafter: Path, weights: str | None) -> Path:
        """Copy the drafter to a folder that no job writes; a copy from an earlier call stays, as a server may be
        reading it. Raises ConfigError if its weights are not those judged."""
        copy = self._state / "rolled-out" / str(weights)[7:23]

        def check(folder: Path) -> None:
            if weights is None or weights_hash(folder) != weights:
                raise ConfigError(f"the weights in {drafter} are not those that passed the gate: call gate again")

        check(drafter)
        if weights_hash(copy) == weights:
            return copy
        with whole_folder(copy, "free space") as scratch:
            shutil.copytree(drafter, scratch, dirs_exist_ok=True)
            check(scratch)  # a training may have replaced them meanwhile
        return copy

    def _settle(self) -> None:
        """Record the verdicts of gates that have ended."""
        for name in self.jobs.names():
            record = self.jobs.record(name)
            if record["tool"] != "gate" or "verdict" in record or self.jobs.status(name)["state"] != "done":
                continue
            verdict, given = verdict_of(self.jobs.output(name), 0), record["arguments"]
            if verdict["passed"] and verdict.get("share") == 1.0 and verdict.get("weights") != given["weights"]:
                reason = "its weights changed meanwhile: judge it again"
                verdict |= {"passed": False, "is_judged": False, "reason": reason}
            state = "passed" if verdict["passed"] else "refused" if verdict.get("is_judged", True) else "not judged"
            figures = {"weights": given["weights"], "reason": verdict["reason"], "by": name}
            self.lineage.add(given["drafter"], parents=[given["incumbent"]], state=state, **figures)
            self.jobs.update(name, verdict=verdict)


def _figures(seen: Any) -> dict[str, Any]:
    names = ("source", "answers", "answer_tokens", "tokens_per_round", "num_drafted")
    by_tag = {tag: _figures(each) for tag, each in seen.by_tag.items()}
    return {**{name: getattr(seen, name) for name in names}, "by_tag": by_tag}
