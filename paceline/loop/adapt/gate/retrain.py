"""Trains a candidate in a separate process at low priority: writes the training window (recent answers), builds the
command, runs the job.

    state/windows/<name>/answers-r0-00000.parquet     the window, without the gate's held-out prompts
    state/trainings/<name>-<number>/                  one resumable `paceline train` run per learning rate

A training that dies or fills the disk only adds a line to the daemon's log."""

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeGuard

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.draft.dflash.checkpoint import read_stored
from paceline.draft.dflash.config import is_dflash
from paceline.errors import ConfigError
from paceline.loop.adapt.config import CandidateConfig, RetrainConfig, StoreConfig
from paceline.loop.adapt.gate.examine import is_held_out
from paceline.loop.adapt.gate.gate import one_a_prompt
from paceline.loop.adapt.gate.lineage import window_hash
from paceline.loop.adapt.rollout.stage import Stage
from paceline.loop.adapt.servers.counted_hours import ALL
from paceline.loop.adapt.traffic.stored import read_requests
from paceline.model.checkpoint import read_json

LEAST_ANSWERS = 50
"""Minimum number of prompts in a training window; with fewer the drafter would learn the habits of one client."""


@dataclass(frozen=True, slots=True)
class Window:
    """Training window: a folder with the stored answers of hours [since, until), counted from 1970."""

    folder: Path
    since: int
    until: int
    requests: int
    sha256: str
    """Hash of the keys of the window's requests."""
    tracked: tuple[str, ...] = ()
    """Clusters that are separate; all further clusters form one, named "other". Empty if every cluster is separate."""


def write_window(
    traces: Path, clusters: Sequence[str], since: int, until: int, folder: Path, tracked: Sequence[str] = ()
) -> Window:
    """Writes a training window to `folder`: the stored answers of these clusters (groups of similar requests) in hours
    [since, until), counted from 1970. It has one answer per prompt, and leaves out the held-out prompts, which are
    reserved for judging drafters. `paceline train --answers` reads the folder.

    `tracked`: names of the clusters that stay separate. All other clusters then form one cluster, whose name in
    `clusters` is "other". If `tracked` is empty, every cluster stays separate. Raises ConfigError if there are fewer
    than 50 answers (LEAST_ANSWERS), CacheError if the folder cannot be written."""
    requests = [
        request
        for cluster in (None if name == ALL else name for name in clusters)
        for request in one_a_prompt(read_requests(traces, cluster, since, until, exact=False, tracked=tracked)[0])
        if not is_held_out(request.prompt)
    ]
    if len(requests) < LEAST_ANSWERS:
        raise ConfigError(
            f"{len(requests)} different prompts of {', '.join(clusters)} are too few to train on, {LEAST_ANSWERS} are "
            "needed: wait, or keep more of the traffic"
        )
    if folder.exists():
        shutil.rmtree(folder)
    answers = []
    for each in sorted(requests, key=lambda request: request.key):
        temperature = each.params.temperature if each.knows_temperature else math.nan
        tokens = (each.prompt_ids, each.answer_ids)
        answers.append(Answer(each.key, "traces", 0, temperature, *tokens, each.finish_reason, ""))
    AnswerShards(folder).write(answers)
    sha256 = window_hash(request.key for request in requests)
    return Window(folder, since, until, len(requests), sha256, tuple(tracked))


def command_of(
    stage: Stage,
    store: StoreConfig,
    engine: EngineConfig,
    candidate: CandidateConfig,
    retrain: RetrainConfig,
    *,
    same_shapes: bool = False,
) -> list[str]:
    """Builds the command that `stage` (the daemon's work in progress) runs in its current step. In the step "training"
    the command trains the stage's current candidate. In other steps it is `paceline adapt gate`, which compares this
    candidate with the incumbent.

    `same_shapes`: True if the servers load only drafters with the tensor shapes of the incumbent. The size of the draft
    vocabulary then stays unchanged in a training. Raises ModelFileError if the incumbent cannot be read."""
    drafter = Path(stage.candidates[stage.at])
    if stage.name == "training":
        # The daemon may have been restarted with other rates.
        rates = stage.rates or retrain.learning_rates
        window, rate = Path(stage.window["folder"]), rates[min(stage.at, len(rates) - 1)]
        num_drafts = vocabulary_of(Path(stage.incumbent)) if same_shapes else None
        return train_command(window, drafter.parent, stage.incumbent, rate, engine, retrain, num_drafts)
    clusters = None if ALL in stage.clusters else stage.clusters
    options: dict[str, Any] = {"--traces": store.traces, "--model": engine.model, "--dtype": engine.dtype}
    options |= {"--device": engine.device, "--incumbent": stage.incumbent, "--cluster": clusters}
    options |= {"--tracked": stage.window.get("tracked"), "--since": stage.window["since"]}
    options |= {"--requests": candidate.requests, "--held-out-only": True}
    options |= {"--least-requests": candidate.least_requests, "--temperature": candidate.temperature}
    shares = (1.0,) if stage.kind == "score" else candidate.shares  # a pool drafter is not blended
    options |= {"--shares": ",".join(f"{share:g}" for share in shares)}
    # A drafter for one cluster gets no other traffic, so its losses there do not matter.
    options |= (
        {"--ood": candidate.ood, "--most-loss": candidate.most_loss}
        if stage.kind == "retrain"
        else {"--most-loss": 1.0}
    )
    return paceline_command(["adapt", "gate", stage.candidates[stage.at]], options)


def vocabulary_of(drafter: Path) -> int | None:
    """Returns the size of a DFlash drafter's draft vocabulary (the tokens that it can draft), for trainings that must
    keep it. Raises ModelFileError if the drafter cannot be read.

    Returns None if there is no size to keep:
    - The drafter drafts all tokens of the target.
    - The drafter has its own output layer, whose size a training never changes.
    - It is not a DFlash drafter."""
    if drafter.is_dir() and not is_dflash(read_json(drafter / "config.json")):
        return None
    stored = read_stored(drafter)
    ids = stored.vocabulary.ids
    return None if ids is None or stored.config.has_own_width else len(ids)


def train_command(
    window: Path,
    out: Path,
    incumbent: str,
    learning_rate: float,
    engine: EngineConfig,
    config: RetrainConfig,
    draft_vocab: int | None = None,
) -> list[str]:
    """Builds the command that trains a copy of the drafter `incumbent` on the answers in the folder `window`. It runs
    the user's `config.train_command` if that is set, with the arguments as environment variables, else `paceline
    train`. `out`: folder of the training run.

    `draft_vocab`: size of the new drafter's draft vocabulary (the tokens that it can draft). With None `paceline train`
    takes the incumbent's draft vocabulary; in a DFlash drafter it then adds the tokens of the answers to it."""
    if config.train_command is not None:
        values = {
            "PACELINE_WINDOW": str(window.absolute()),
            "PACELINE_OUT": str(out.absolute()),
            "PACELINE_INCUMBENT": incumbent,
            "PACELINE_MODEL": engine.model,
            "PACELINE_LEARNING_RATE": f"{learning_rate:g}",
            "PACELINE_MINUTES": f"{config.minutes:g}",
            "PACELINE_GENERAL": os.pathsep.join(str(folder.absolute()) for folder in config.general),
            "PACELINE_DRAFT_VOCAB": "" if draft_vocab is None else str(draft_vocab),
        }
        assigned = [f"{name}={value}" for name, value in values.items()]
        return [*polite(), "env", *assigned, "sh", "-c", config.train_command]
    options: dict[str, Any] = {"--target": engine.model, "--init": incumbent, "--out": out}
    options |= {"--answers": [window, *config.general], "--keep": "best"}
    options |= {"--max-minutes": f"{config.minutes:g}", "--lr": f"{learning_rate:g}"}
    options |= {"--dtype": engine.dtype, "--device": engine.device, "--weight-format": engine.weight_format}
    options |= {"--threads": config.train_threads, "--features-from": config.features_from or None}
    options |= {"--features-folder": config.features_folder, "--draft-vocab": draft_vocab}
    return paceline_command(["train"], options)


def not_trained(status: int, job: Job, drafter: Path, config: RetrainConfig) -> str | None:
    """Returns an error message if a finished training failed, else None. It failed if its exit `status` is not 0. The
    user's `config.train_command` also failed if the folder `drafter` contains no drafter."""
    if status != 0:
        return f"its training ended with status {status}: {job.last_error}"
    if config.train_command is not None and not (drafter / "config.json").is_file():
        return f"train_command ended with status 0 and left no drafter in {drafter}: it must write one there"
    return None


def paceline_command(words: Sequence[object], options: Mapping[str, Any]) -> list[str]:
    """Builds a `paceline` command that prints JSON and runs at the lowest priority if `nice` is available. `words`:
    subcommand and positional arguments. `options`: option name -> value; a list repeats the option for each value, True
    makes a flag, None leaves the option out."""
    command = [*polite(), sys.executable, "-m", "paceline", *words]
    for name, value in options.items():
        for item in value if isinstance(value, tuple | list) else [value]:
            command += [] if item is None else [name] if item is True else [name, item]
    return [*map(str, command), "--json"]


def verdict_of(job: Output, status: int) -> dict[str, Any]:
    """Returns the verdict of a finished gate job (`paceline adapt gate`): the JSON object that it printed. If it
    printed no valid verdict, returns one that says that the candidate could not be judged. The reason then names the
    job's exit `status` and last error line."""
    try:
        verdict = json.loads(job.last_line)
    except ValueError:
        verdict = None
    if not _is_verdict(verdict):
        return unjudged(f"the gate gave no verdict and ended with status {status}: {job.last_error}")
    return verdict


def unjudged(reason: str) -> dict[str, Any]:
    """Returns the JSON verdict of a candidate that could not be judged. `reason`: text that says why."""
    return {"passed": False, "reason": reason, "is_judged": False}


def _is_verdict(verdict: Any) -> TypeGuard[dict[str, Any]]:
    if not isinstance(verdict, dict) or not isinstance(verdict.get("passed"), bool) or "reason" not in verdict:
        return False
    gains = verdict.get("gains") or {}
    figures = gains.get("drifted") if isinstance(gains, dict) else None
    numbers = [figures.get(name) for name in ("low", "incumbent", "candidate")] if isinstance(figures, dict) else [None]
    has_gain = all(type(number) in (int, float) for number in numbers)
    return has_gain or not verdict["passed"]


def polite() -> list[str]:
    return ["nice", "-n", "19"] if shutil.which("nice") else []


class Output:
    """Reads the output of a background command from the files of its stdout and stderr. A third file is locked while
    the command runs. Another process may have started the command."""

    def __init__(self, output: Path) -> None:
        """`output`: path of the files, without suffix."""
        self._lock = output.with_suffix(".lock")
        self._out, self._err = output.with_suffix(".out"), output.with_suffix(".err")

    @property
    def is_locked(self) -> bool:
        """True while the command runs, also if another process started it."""
        with self._lock.open("a+") as lock:
            return not _takes(lock)

    @property
    def last_line(self) -> str:
        """Last line of stdout, where commands print their JSON result; "" without output."""
        return _last_line(self._out)

    @property
    def last_error(self) -> str:
        """Last line of stderr, at most 500 characters; "no output" if it is empty."""
        return _last_line(self._err)[:500] or "no output"


class Job(Output):
    """A background command that writes its output to files. The command continues if this process is killed. A new job
    with the same output files does not start its own command before the earlier command has ended."""

    def __init__(self, command: list[str], output: Path) -> None:
        """Start the command, or wait if a job of the same output still runs, which a killed daemon left. Raises
        OSError. `output`: path of the output files, without suffix."""
        super().__init__(output)
        output.parent.mkdir(parents=True, exist_ok=True)
        self._command = command
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes] | None:
        """Start the command; returns None while a job of an earlier daemon, which outlives it, holds the lock.

        The process inherits the locked file; the kernel releases the lock when it ends, however it ends."""
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
        """Returns the command's exit status; None while it waits or runs. The command waits while an earlier job with
        the same output files runs. Once that job has ended, the next `poll` starts the command."""
        self._process = self._process or self._started()
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """Terminate the command with its child processes. If the command is still waiting for an earlier job, terminate
        that job instead. A stopped training can be started again, and then resumes from its checkpoint."""
        if self._process is None:
            with self._lock.open("a+") as lock, contextlib.suppress(ValueError, ProcessLookupError):
                if not _takes(lock):
                    os.killpg(int(self._lock.read_text()), signal.SIGTERM)
            return
        _signal_group(self._process, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            _signal_group(self._process, signal.SIGKILL)
            self._process.wait()

    @property
    def is_waiting(self) -> bool:
        """True if the command has not been started, because a job of an earlier daemon with the same output files still
        runs."""
        return self._process is None


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal a process and its children, which form a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _takes(lock: IO[str]) -> bool:
    """Take the lock; False if another process has it. Returns True on file systems without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""
