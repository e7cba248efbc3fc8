"""Runs an iteration (turn) of the flywheel: the stages of stages.py, whose results are stored.

The file serving.json names the served model. It is replaced atomically at the end; an error or a refusal by a gate
(minimum quality of the student) ends the iteration before that. The same command resumes at the first unfinished stage.
"""

from __future__ import annotations

import gc
import shlex
import time
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.errors import CacheError, ConfigError, PacelineError, reraised
from paceline.hub import resolve
from paceline.loop.distill.start import check_files, check_layers
from paceline.loop.flywheel import ledger
from paceline.loop.flywheel.checks import check_judge
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.stages import STAGES, Refused, StageResult, Turn
from paceline.loop.flywheel.state import (
    NO_DRAFTER,
    Serving,
    TurnState,
    anew,
    serving_of,
    traces_of,
    turn_folder,
    write_serving,
)
from paceline.loop.store.folder import Store
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import plain
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Result of an iteration (turn) of the flywheel: whether it passed, and which model and drafter are served now."""

    turn: int
    passed: bool
    reason: str
    """Reason of the refusal; empty if the iteration (turn) passed."""
    model: str
    """The model that serves now."""
    drafter: str
    command: str
    """Command that serves the model and stores its answers for the next iteration (turn)."""
    core_s: float
    """CPU seconds of the iteration (turn), over all resumed parts."""
    price: float | None
    """Price of the CPU seconds; None without a price per core-hour."""


def open_turn(config: FlywheelConfig, progress: Progress) -> Turn:
    """Returns the iteration (turn) that is in progress in the folder `config.out`, or else the next one.

    Raises ConfigError if the iteration in progress was started with other settings, or if the dataset store that it
    uses has a newer version now.
    """
    serving = serving_of(config)
    number = serving.turn + 1
    folder = turn_folder(config, number)
    state = TurnState.read(folder)
    state.check(config)
    store = state.stages.get("store")
    if store and (now := Store.open(store["store"]).version) != store["version"]:
        raise ConfigError(
            f"{store['store']} was at version {store['version']} when turn {number} began, and is at {now}: what was "
            f"learned is of another store; {anew(folder)}"
        )
    return Turn(config, number, serving, folder, state, progress)


def turn(config: FlywheelConfig, *, progress: Progress = SILENT) -> TurnResult:
    """Runs one iteration (turn) of the flywheel: distils the served model into a student, and trains drafters for both.
    Skips finished stages and resumes a killed stage.

    The served model changes only if the student passes every gate (minimum quality) and no stage raises an error.
    PromptError: too few answers or eval cases, too many bad answers, or the user's own suite overlaps with training
    data. JudgeError: the judge of the evals fails. TrainingError: a training diverges. ConfigError: the iteration was
    started with other settings, or there are neither recorded answers nor prompts.
    """
    if find_spec("trl") is None:
        raise ConfigError("a turn distils with Transformers and TRL: pip install 'paceline[distill]'")
    with only_run(config.out, "turning the flywheel", Ranks(), progress.say):
        current = open_turn(config, progress)
        if "student" not in current.state.stages:
            teacher, student = resolve(current.serving.model), config.student_of(current.number)
            check_layers(student, teacher)
            check_files(config.files, student, teacher)
        if config.evals.scorer == "judge" and "evals" not in current.state.stages:
            check_judge(config.judge)
        progress.say(f"turn {current.number}: {current.serving.model} answers now")
        with reraised(CacheError, f"cannot write {current.folder}", "free space, then run the same command", OSError):
            current.folder.mkdir(parents=True, exist_ok=True)
        current.state.write()
        for name in STAGES:
            try:
                _finish(current, name)
            except Refused as refusal:
                current.state.stages.pop("student", None)  # a rerun may train it longer
                current.state.write()
                return _refused(current, str(refusal))
        return _swap(current)


def _finish(turn: Turn, name: str) -> None:
    """Runs a stage unless it is finished; stores its result, and its time even on an error."""
    state, progress = turn.state, turn.progress
    if name in state.stages:
        progress.say(f"{name}: finished before")
        return
    progress.say(f"== {name}")
    gc.collect()  # frees the models of the previous stage
    began, core_began = time.perf_counter(), time.process_time()
    result: StageResult | None = None
    try:
        result = STAGES[name](turn)
    except PacelineError as error:
        if name == "evals":
            state.stages.pop("store", None)  # the user may record more before the rerun
        turn.line(name, "stopped", why=" ".join(str(error).split()))
        raise
    finally:
        state.add_spent(name, time.perf_counter() - began, time.process_time() - core_began)
        if result is not None:
            state.stages[name] = plain(result)
        state.write()


def _refused(turn: Turn, why: str) -> TurnResult:
    text = f"turn {turn.number} REFUSED: {why}. What served before still does: {turn.serving.model}"
    drafter = turn.of("drafter")["drafter"]
    if drafter != NO_DRAFTER:
        text += f"; a drafter for it was kept all the same: {drafter}"
    turn.progress.say(f"{text}. Give more minutes or other settings of gates, and run the same command: it goes on")
    return _result(turn, turn.serving, why)


def _swap(turn: Turn) -> TurnResult:
    """Makes the student and its drafter the served model."""
    config, model = turn.config, turn.of("student")["student"]
    drafter = turn.of("student-drafter")["drafter"]
    words = ["paceline", "serve", "--model", model, "--drafter", drafter]
    words += ["--traces", str(traces_of(config, turn.number + 1))]
    serving = Serving(model, drafter, turn.number, turn.serving.first_model, shlex.join(words))
    result = _result(turn, serving, "")
    turn.line("turn", "kept", model=model, drafter=drafter, core_s=result.core_s, price=result.price)
    write_serving(config, serving)
    turn.progress.table(ledger.table(ledger.read(config.out)))
    turn.progress.say(
        f"turn {turn.number} passed; serve what it made, and keep what it answers for turn {turn.number + 1}:"
    )
    turn.progress.say(serving.command)
    return result


def _result(turn: Turn, serving: Serving, why: str) -> TurnResult:
    core_s, price = sum(each["core_s"] for each in turn.state.spent.values()), turn.config.price_per_core_hour
    cost = None if price is None else core_s / 3600 * price
    return TurnResult(turn.number, not why, why, serving.model, serving.drafter, serving.command, core_s, cost)
