"""The stages of a turn: functions of what the turn knows, each of which returns what is kept of it as JSON.

record            what the model of this turn answered: recorded before, or asked now
store             split into what may be learned from and what is kept for evals; checked
evals             a suite of the latter, and what the model scores
drafter           one for the model, from what it answered
student           fewer layers, taught what the model says, judged by distill's own gates
student-evals     the student on the suite, beside the model
student-drafter   one for the student, from its own answers
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.data.rows import Dropped
from paceline.errors import ConfigError, refuse
from paceline.hub import resolve
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.distill import distill
from paceline.loop.distill.config import DistillConfig
from paceline.loop.evals.make import make_suite
from paceline.loop.evals.scores import read_scores
from paceline.loop.evals.suite import Suite, read_suite
from paceline.loop.flywheel import checks, ledger
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.measure import FIRST, OWN, Bench, lost, slower
from paceline.loop.flywheel.state import NO_DRAFTER, Serving, TurnState, traces_of, turn_folder
from paceline.loop.store.folder import Store
from paceline.model.checkpoint import load_config
from paceline.report.tables import Progress
from paceline.train import regenerate, train
from paceline.train.config import PromptsConfig, RegenerateConfig, TrainConfig

USUAL_LEN, MOST_LEN = 1024, 4096
"""Documents may be so long, in tokens, where nothing else is said: the first, and up to the second where the store needs it."""
MORE_TOKENS, ROOM = 32, 2048
"""An answer may be so much longer than the longest that was recorded, while prompt and answer fit in so much."""
Told = dict[str, Any]


class Refused(Exception):
    """A gate is shut: the turn ends, and nothing is swapped."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What stages know."""

    config: FlywheelConfig
    number: int
    serving: Serving
    """What answers now."""
    folder: Path
    state: TurnState
    progress: Progress

    def of(self, stage: str) -> Told:
        return self.state.stages[stage]

    @property
    def store(self) -> Store:
        return Store.open(self.of("store")["store"])

    @property
    def bench(self) -> Bench:
        suites = {name: Path(file) for name, file in self.of("evals")["suites"].items()}
        return Bench(self.config, self.folder, self.of("store")["max_tokens"], self.progress, suites)

    @property
    def earlier_stores(self) -> list[Path]:
        """Of the turns before: the models of this one were trained on them."""
        states = [TurnState.read(turn_folder(self.config, number)) for number in range(1, self.number)]
        return [Path(each.stages["store"]["store"]) for each in states if "store" in each.stages]

    def max_len(self, given: int | None = None) -> int:
        """Longest document of a training."""
        return given or min(max(USUAL_LEN, self.of("store")["longest"]), MOST_LEN)

    def line(self, what: str, state: str, **more: Any) -> None:
        ledger.append(self.config.out, {"turn": self.number, "what": what, "state": state, **more})


def record(turn: Turn) -> Told:
    """Where the answers are. Raises ConfigError when a later turn has none to begin with."""
    config, traces = turn.config, traces_of(turn.config, turn.number)
    if turn.number == 1 and config.record:
        return {"sources": list(config.record)}
    if turn.number > 1 and any(traces.glob("*.parquet")):
        return {"sources": [traces]}
    if not config.prompts:
        raise ConfigError(
            f"turn {turn.number} begins with what {turn.serving.model} answers, and {traces} has nothing of it: serve it with "
            f"`{turn.serving.command}`, then run the same command again; or give prompts, which it then answers"
        )
    out = turn.folder / "recorded"
    engine = replace(config.engine, model=turn.serving.model, drafter=NO_DRAFTER)
    done = regenerate(RegenerateConfig(out, engine, PromptsConfig(config.prompts), config.answering), progress=turn.progress)
    return {"sources": [out / "answers"], "answers": done.num_answers, "tokens": done.num_tokens}


def store(turn: Turn) -> Told:
    """A store of this turn's answers, or the one that was given. Raises PromptError on one that is empty or poisoned."""
    sources = [Path(each) for each in turn.of("record")["sources"]]
    stores = [each for each in sources if (each / "store.json").is_file()]
    refuse(
        ConfigError,
        (bool(stores) and len(sources) > 1, f"record names {stores and stores[0]}, a store, and more: give it alone"),
    )
    left_out: dict[str, int] = {}
    if stores:
        found = Store.open(sources[0])
        same = found.model == turn.serving.model
        refuse(
            ConfigError, (not same, f"{sources[0]} holds tokens of {found.model}, not of {turn.serving.model}: give its own")
        )
    else:
        path = turn.folder / "store"
        shutil.rmtree(path, ignore_errors=True)  # of a start that was killed, or had other answers
        found = Store.create(path, turn.serving.model, turn.config.split)
        left_out = found.add(sources, progress=turn.progress)["left_out"]
    contents = checks.check_store(found, left_out, turn.config.gates)
    room = min(turn.config.engine.max_len or ROOM, load_config(resolve(turn.serving.model)).max_position)
    max_tokens = max(1, min(contents.longest_answer + MORE_TOKENS, room - contents.longest_prompt))
    return {"store": found.path, "version": found.version, "max_tokens": max_tokens, **asdict(contents)}


def evals(turn: Turn) -> Told:
    """The suites, and the model's scores. Raises PromptError on too few cases and on a suite that leaks; JudgeError."""
    config, own = turn.config, turn.store
    trained = [*turn.earlier_stores, own.path]
    file, dropped = turn.folder / "suite.jsonl", Dropped()
    if config.suite is not None:
        suite: Suite | None = read_suite(config.suite)
        checks.check_given(suite, trained, config.suite)
    else:
        made = make_suite(replace(config.evals, sources=(str(own.path),)), "suite", dropped)
        suite = checks.apart(made, trained, dropped)
    suite = checks.check_cases(suite, config.gates, dropped)
    if dropped:
        turn.progress.say(str(dropped))
    if suite.needs_judge:
        checks.check_judge(config.judge)
    suites = {OWN: suite.write(file)}
    if config.suite is None:
        own.note_suite(file)
    if turn.number > 1:
        suites |= _first_suite(turn, trained)
    bench = Bench(config, turn.folder, turn.of("store")["max_tokens"], turn.progress, suites)
    scores, _ = bench.ask("model", turn.serving.model, NO_DRAFTER)
    turn.line("model", "measured", model=turn.serving.model, drafter=NO_DRAFTER, **bench.figures(scores))
    return {"suites": suites, "cases": len(suite), "score": scores.mean}


def _first_suite(turn: Turn, trained: list[Path]) -> dict[str, Path]:
    dropped = Dropped()
    first = checks.apart(read_suite(turn_folder(turn.config, 1) / "suite.jsonl"), trained, dropped)
    if dropped:
        turn.progress.say(f"of the first turn's suite: {dropped}")
    if first is None:
        return {}
    file = first.write(turn.folder / "first-suite.jsonl")
    if turn.config.suite is None:
        Store.open(turn.earlier_stores[0]).note_suite(file)
    return {FIRST: file}


def drafter(turn: Turn) -> Told:
    """One for the model that answers now, from what it answered; continued from the one that serves, where one does."""
    if not turn.config.drafter.of_teacher:
        return {"drafter": NO_DRAFTER}
    init = None if turn.serving.drafter == NO_DRAFTER else turn.serving.drafter
    asked = _training(turn, "drafter", turn.serving.model)
    made = train(replace(asked, init=init, answers=(turn.store.path / "train",)), progress=turn.progress)
    return _tried(turn, "drafter", turn.serving.model, made.drafter, beside="model", parents=[init] if init else [])


def student(turn: Turn) -> Told:
    """By `paceline distill`, from what the model answered. Raises Refused where one of its gates is shut, TrainingError."""
    config, teaching = turn.config, turn.config.lesson
    if not config.is_given("teaching.max_len"):
        teaching = replace(teaching, max_len=turn.max_len())
    made = distill(
        DistillConfig(
            turn.folder / "student",
            replace(config.engine, model=turn.serving.model, drafter=NO_DRAFTER),
            (turn.store.path / "train",),
            student=config.student_of(turn.number),
            teaching=teaching,
            gate=config.student_gate,
            files=config.files,
        ),
        progress=turn.progress,
    )
    model = str(made.gguf or made.student)
    if not made.passed:
        turn.line("student", "refused", model=model, drafter=NO_DRAFTER, why=made.reason)
        raise Refused(made.reason)
    return {"student": model, "layers": made.layers, "weights": made.weights, "steps": made.steps, "reason": made.reason}


def student_evals(turn: Turn) -> Told:
    """The student beside its teacher, and from the second turn on beside the first model. Raises Refused."""
    model, gates, bench = turn.of("student")["student"], turn.config.gates, turn.bench
    scores, found = bench.ask("student", model, NO_DRAFTER, beside="model")
    assert found is not None
    figures, why = bench.figures(scores), lost(found, gates.most_lost)
    first = bench.ask_first("student", model, scores, turn_folder(turn.config, 1) / "evals" / "model")
    if first is not None:
        figures |= {"first_score": first[0].mean, "first_interval": list(first[0].interval)}
        why = why or lost(replace(first[1], before="the first model"), gates.most_lost_in_all)
    turn.line("student", "refused" if why else "kept", model=model, drafter=NO_DRAFTER, why=why, **figures)
    if why:
        raise Refused(why)
    return {**figures, "difference": found.difference, "difference_interval": found.interval}


def student_drafter(turn: Turn) -> Told:
    """One for the student, from its own answers to the prompts that were learned from."""
    model = turn.of("student")["student"]
    asked = _training(turn, "student-drafter", model)
    made = train(replace(asked, asked=PromptsConfig((str(turn.store.path / "train"),))), progress=turn.progress)
    return _tried(turn, "student + drafter", model, made.drafter, beside="student")


def _training(turn: Turn, name: str, model: str) -> TrainConfig:
    """Of a drafter, as far as both have it in common: answers as long as those that were recorded, and some more."""
    config, given, told = turn.config, turn.config.drafter, turn.of("store")
    answering = replace(config.answering, seed=given.loop.seed)
    if not config.is_given("answering.max_tokens"):
        answering = replace(answering, max_tokens=told["max_tokens"])
    if not config.is_given("answering.max_prompt_tokens"):
        answering = replace(answering, max_prompt_tokens=told["longest_prompt"])
    return TrainConfig(
        turn.folder / name,
        replace(config.engine, model=model, drafter=NO_DRAFTER),
        max_len=turn.max_len(given.max_len),
        minutes=config.drafter_minutes,
        plan=given.plan,
        features=given.features,
        shape=given.shape,
        loop=given.loop,
        answering=answering,
        given=tuple(each.removeprefix("drafter.") for each in config.given if each.startswith("drafter.")),
    )


def _tried(turn: Turn, what: str, model: str, folder: Path, beside: str, parents: list[str] | None = None) -> Told:
    """Ask the model with its new drafter: it must change no answer, and bring speed. One that does not is not served."""
    bench, is_greedy = turn.bench, turn.config.sampling.temperature == 0
    scores, found = bench.ask(what.replace(" + ", "-and-"), model, str(folder), beside=beside)
    alone = read_scores(turn.folder / "evals" / beside)
    why = slower(alone, scores, found, turn.config.gates.least_speedup, is_greedy)
    state = "refused" if why else "kept"
    turn.line(what, state, model=model, drafter=str(folder), why=why, **bench.figures(scores))
    lineage = {"parents": parents or [], "state": state, "turn": turn.number, "target": model, "reason": why or ""}
    Lineage(turn.config.out / "lineage.json").add(str(folder), **lineage)
    if why:
        turn.progress.say(f"{what}: the drafter is not served: {why}")
    return {"drafter": NO_DRAFTER if why else str(folder), "trained": str(folder), "why": why}


STAGES: dict[str, Callable[[Turn], Told]] = {
    "record": record,
    "store": store,
    "evals": evals,
    "drafter": drafter,
    "student": student,
    "student-evals": student_evals,
    "student-drafter": student_drafter,
}
"""In their order."""
