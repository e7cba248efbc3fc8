"""A training as a process of its own, at low priority: the window that drifted, other answers beside it, and what to run.

    state/windows/<name>/answers-r0-00000.parquet     the window, without the prompts that the gate judges by
    state/trainings/<name>-<number>/                  one `paceline train` run for each learning rate; killed, it goes on

Nothing of a training happens in the process that watches: one that dies, or fills the disk, is a line in the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig, RetrainConfig, StoreConfig
from paceline.loop.adapt.gate.examine import is_held_out
from paceline.loop.adapt.gate.gate import one_a_prompt
from paceline.loop.adapt.gate.lineage import window_hash
from paceline.loop.adapt.rollout.stage import Stage
from paceline.loop.adapt.servers.counted_hours import ALL
from paceline.loop.adapt.traffic.stored import Request, read_requests

LEAST_ANSWERS = 50
"""Prompts that a window must have: fewer teach one client's habits."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a training learns from."""

    folder: Path
    since: int
    until: int
    requests: int
    sha256: str
    """Of the requests' keys."""


def write_window(traces: Path, clusters: Sequence[str], since: int, until: int, folder: Path) -> Window:
    """The answers of these clusters in hours [since, until), one a prompt, as `paceline train --answers` reads them.

    Raises ConfigError when they are too few, CacheError when the disk refuses.
    """
    found = [
        each
        for cluster in (None if each == ALL else each for each in clusters)
        for each in one_a_prompt(read_requests(traces, cluster, since, until, exact=False)[0])
        if not is_held_out(each.prompt)
    ]
    if len(found) < LEAST_ANSWERS:
        raise ConfigError(
            f"{len(found)} different prompts of {', '.join(clusters)} are too few to train on, {LEAST_ANSWERS} are needed: "
            "wait, or keep more of the traffic"
        )
    if folder.exists():
        shutil.rmtree(folder)
    answers = [
        Answer(each.key, "traces", 0, _temperature(each), each.prompt_ids, each.answer_ids, each.finish_reason, "")
        for each in sorted(found, key=lambda request: request.key)
    ]
    AnswerShards(folder).write(answers)
    return Window(folder, since, until, len(found), window_hash(each.key for each in found))


def _temperature(request: Request) -> float:
    """As an Answer has it."""
    return request.params.temperature if request.knows_temperature else math.nan


def command_of(
    stage: Stage, store: StoreConfig, engine: EngineConfig, candidate: CandidateConfig, retrain: RetrainConfig
) -> list[str]:
    """What a stage has to run now, for its current candidate."""
    drafter = Path(stage.candidates[stage.at])
    if stage.name == "training":
        # The daemon may have been started again with other rates.
        rates = stage.rates or retrain.learning_rates
        window, rate = Path(stage.window["folder"]), rates[min(stage.at, len(rates) - 1)]
        return train_command(window, drafter.parent, stage.incumbent, rate, engine, retrain)
    asked: dict[str, Any] = {"--incumbent": stage.incumbent}
    asked |= {} if stage.clusters[0] == ALL else {"--cluster": stage.clusters[0]}
    asked |= {"--since": stage.window["since"], "--requests": candidate.requests, "--held-out-only": True}
    asked |= {"--least-requests": candidate.least_requests}
    asked |= {} if candidate.temperature is None else {"--temperature": candidate.temperature}
    shares = (1.0,) if stage.kind == "score" else candidate.shares  # a member is taken as it is
    asked |= {"--shares": ",".join(f"{share:g}" for share in shares)}
    # A drafter for one cluster gets the traffic of no other.
    asked |= {"--ood": candidate.ood, "--most-loss": candidate.most_loss} if stage.kind == "retrain" else {"--most-loss": 1.0}
    return gate_command(stage.candidates[stage.at], engine, store.traces, asked)


def train_command(
    window: Path, out: Path, incumbent: str, learning_rate: float, engine: EngineConfig, config: RetrainConfig
) -> list[str]:
    """As it would be typed; at the lowest priority where there is `nice`."""
    words: list[Any] = [sys.executable, "-m", "paceline", "train", "--target", engine.model, "--init", incumbent, "--out", out]
    words += ["--answers", window, "--keep", "best", "--max-minutes", f"{config.minutes:g}", "--lr", f"{learning_rate:g}"]
    words += [word for folder in config.general for word in ("--answers", folder)]
    words += ["--dtype", engine.dtype, "--device", engine.device, "--weight-format", engine.weight_format]
    words += ["--threads", config.train_threads] if config.train_threads else []
    return [*polite(), *map(str, words), "--json"]


def gate_command(candidate: str, engine: EngineConfig, traces: Path, asked: dict[str, Any]) -> list[str]:
    """`paceline adapt gate`; `asked`: option -> value, or values."""
    words: list[Any] = [sys.executable, "-m", "paceline", "adapt", "gate", candidate, "--traces", traces]
    words += ["--model", engine.model, "--dtype", engine.dtype, "--device", engine.device]
    for name, value in asked.items():
        for each in value if isinstance(value, tuple | list) else [value]:
            words += [name] if each is True else [name, each]
    return [*polite(), *map(str, words), "--json"]


def verdict_of(job: Job, status: int) -> dict[str, Any]:
    """The verdict of a gate at its end; of one that died, or whose last line is none, a verdict of `unjudged`."""
    try:
        verdict = json.loads(job.last_line)
    except ValueError:
        verdict = None
    if not _is_verdict(verdict):
        return unjudged(f"the gate gave no verdict and ended with status {status}: {job.last_words}")
    return verdict


def unjudged(reason: str) -> dict[str, Any]:
    """Returns the verdict of a candidate that could not be judged."""
    return {"passed": False, "reason": reason, "is_judged": False}


def _is_verdict(verdict: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(verdict, dict) or not isinstance(verdict.get("passed"), bool) or "reason" not in verdict:
        return False
    gains = verdict.get("gains") or {}
    figures = gains.get("drifted") if isinstance(gains, dict) else None
    numbers = [figures.get(name) for name in ("low", "incumbent", "candidate")] if isinstance(figures, dict) else [None]
    has_gain = all(type(each) in (int, float) for each in numbers)
    return has_gain or not verdict["passed"]


def polite() -> list[str]:
    return ["nice", "-n", "19"] if shutil.which("nice") else []


class Job:
    """A command under way; what it says goes to files beside its output."""

    def __init__(self, command: list[str], said: Path) -> None:
        """Starts it, or waits for the same job of a daemon that was killed. Raises OSError when that is not possible."""
        said.parent.mkdir(parents=True, exist_ok=True)
        self._command, self._lock = command, said.with_suffix(".lock")
        self._out, self._err = said.with_suffix(".out"), said.with_suffix(".err")
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Start the command; None while a job of an earlier daemon, which outlives it, holds the lock.

        The process inherits the locked file, and the kernel gives the lock back when it ends, however it ends."""
        with self._lock.open("a+") as lock:
            if not _takes(lock):
                return None
            lock.truncate(0)
            with self._out.open("w") as out, self._err.open("w") as err:
                process = subprocess.Popen(
                    self._command,
                    stdout=out,
                    stderr=err,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[lock.fileno()],
                )
            lock.write(str(process.pid))
            return process

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        self._process = self._process or self._started()
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """End it; a training goes on from its checkpoint when it is started again."""
        if self._process is None:
            with self._lock.open("a+") as lock, contextlib.suppress(ValueError, ProcessLookupError):
                if not _takes(lock):
                    os.kill(int(self._lock.read_text()), signal.SIGTERM)
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def is_waiting(self) -> bool:
        """True while the same job of an earlier daemon goes on."""
        return self._process is None

    @property
    def last_line(self) -> str:
        """Of its output: the JSON line."""
        return _last_line(self._out)

    @property
    def last_words(self) -> str:
        """Of its errors."""
        return _last_line(self._err) or "it said nothing"


def _takes(lock: IO[str]) -> bool:
    """Take the lock; False if another process has it. A disk without locks has none to give."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1][:500] if lines and path.suffix == ".err" else lines[-1] if lines else ""
