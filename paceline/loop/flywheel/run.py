"""A turn, from what is recorded to what serves next: the stages of stages.py, each kept when it is finished.

Whatever serves is named by one file, serving.json, which is written last, whole, when every gate has let pass. A stage that
raises ends the turn before that; so does a gate. The same command goes on at the stage that was not finished.
"""

from __future__ import annotations

import gc
import shlex
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, ConfigError, PacelineError, refuse, reraised
from paceline.hub import resolve
from paceline.loop.distill.start import check_layers
from paceline.loop.flywheel import ledger
from paceline.loop.flywheel.checks import check_judge
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.stages import STAGES, Refused, Told, Turn
from paceline.loop.flywheel.state import Serving, TurnState, serving_of, traces_of, turn_folder, write_serving
from paceline.loop.store.folder import Store
from paceline.report.tables import Progress
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What came of a turn."""

    turn: int
    passed: bool
    reason: str
    """Why it was refused; empty when it was not."""
    model: str
    """That serves now, with its drafter next."""
    drafter: str
    command: str
    """That serves it, and keeps what it answers for the next turn."""
    core_s: float
    """Seconds of processors that the turn took, over all its parts."""
    price: float | None
    """Of these, where an hour of a core has one."""


def open_turn(config: FlywheelConfig, progress: Progress) -> Turn:
    """The turn that is next, or under way. Raises ConfigError where it was begun with other settings. Writes nothing."""
    serving = serving_of(config)
    number = serving.turn + 1
    folder = turn_folder(config, number)
    state = TurnState.read(folder)
    state.check(config, progress.say)
    told = state.stages.get("store")
    if told and (now := Store.open(told["store"]).version) != told["version"]:
        raise ConfigError(
            f"{told['store']} was at version {told['version']} when turn {number} began, and is at {now}: what was learned is "
            f"of another store; delete {folder} to begin the turn anew"
        )
    return Turn(config, number, serving, folder, state, progress)


def run(config: FlywheelConfig, progress: Progress) -> TurnResult:
    """As `paceline.loop.flywheel.turn`."""
    refuse(ConfigError, (find_spec("trl") is None, "a turn distils with Transformers and TRL: pip install 'paceline[distill]'"))
    with only_run(config.out, "turning the flywheel", Ranks(), progress.say):
        turn = open_turn(config, progress)
        if "student" not in turn.state.stages:
            check_layers(config.student_of(turn.number), resolve(turn.serving.model))
        if config.evals.scorer == "judge" and "evals" not in turn.state.stages:
            check_judge(config.judge)
        progress.say(f"turn {turn.number}: {turn.serving.model} answers now")
        with reraised(CacheError, f"cannot write {turn.folder}", "free space, then run the same command", OSError):
            turn.folder.mkdir(parents=True, exist_ok=True)
        turn.state.write()
        for name in STAGES:
            try:
                _finish(turn, name)
            except Refused as refusal:
                turn.state.stages.pop("student", None)  # it may learn for longer
                turn.state.write()
                return _refused(turn, str(refusal))
        return _swap(turn)


def _finish(turn: Turn, name: str) -> None:
    """Run a stage, unless it is finished; keep what it came to, and what it took in any case."""
    state, progress = turn.state, turn.progress
    if name in state.stages:
        progress.say(f"{name}: finished before")
        return
    progress.say(f"== {name}")
    gc.collect()  # models of the stage before
    began, core_began = time.perf_counter(), time.process_time()
    told: Told | None = None
    try:
        told = STAGES[name](turn)
    except PacelineError as error:
        if name == "evals":
            state.stages.pop("store", None)  # more may be recorded
        turn.line(name, "stopped", why=" ".join(str(error).split()))
        raise
    finally:
        state.add_spent(name, time.perf_counter() - began, time.process_time() - core_began)
        if told is not None:
            state.stages[name] = _as_text(told)
        state.write()


def _as_text(told: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(told, dict):
        return {str(name): _as_text(value) for name, value in told.items()}
    if isinstance(told, list | tuple):
        return [_as_text(value) for value in told]
    return str(told) if isinstance(told, Path) else told


def _refused(turn: Turn, why: str) -> TurnResult:
    serving, told = turn.serving, f"turn {turn.number} REFUSED: {why}. What served before still does: {turn.serving.model}"
    made = turn.of("drafter")["drafter"]
    if made != "none":
        told += f"; a drafter for it was kept all the same: {made}"
    turn.progress.say(f"{told}. Give more minutes or other settings of gates, and run the same command: it goes on")
    return _result(turn, serving, why)


def _swap(turn: Turn) -> TurnResult:
    """What is next to serve takes the place of what did."""
    config, model = turn.config, turn.of("student")["student"]
    drafter = turn.of("student-drafter")["drafter"]
    words = ["paceline", "serve", "--model", model, "--drafter", drafter]
    words += ["--traces", str(traces_of(config, turn.number + 1))]
    serving = Serving(model, drafter, turn.number, turn.serving.first_model, shlex.join(words))
    result = _result(turn, serving, "")
    turn.line("turn", "kept", model=model, drafter=drafter, core_s=result.core_s, price=result.price)
    write_serving(config, serving)
    turn.progress.table(ledger.table(ledger.read(config.out)))
    turn.progress.say(f"turn {turn.number} passed; serve what it made, and keep what it answers for turn {turn.number + 1}:")
    turn.progress.say(serving.command)
    return result


def _result(turn: Turn, serving: Serving, why: str) -> TurnResult:
    core_s, price = sum(each["core_s"] for each in turn.state.spent.values()), turn.config.price_per_core_hour
    cost = None if price is None else core_s / 3600 * price
    return TurnResult(turn.number, not why, why, serving.model, serving.drafter, serving.command, core_s, cost)
