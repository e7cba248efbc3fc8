"""The stages of an iteration (turn) of the flywheel: functions that take a `Turn` and return their result as JSON.

record            finds the served model's recorded answers, or generates them
store             builds a store with a training and an evals split, and checks it
evals             makes a suite of the evals split, and measures the model on it
drafter           trains a drafter for the model on its answers
student           distils a student with fewer layers, subject to distill's gates
student-evals     measures the student on the suite and compares it with the model
student-drafter   trains a drafter for the student on the student's own answers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig
from paceline.data.rows import Dropped
from paceline.errors import ConfigError
from paceline.hub import resolve
from paceline.loop.adapt.gate.lineage import Lineage
from paceline.loop.distill.config import DistillConfig, TeachingConfig
from paceline.loop.distill.run import distill
from paceline.loop.evals.make import make_suite
from paceline.loop.evals.scores import read_scores
from paceline.loop.evals.suite import Suite, read_suite
from paceline.loop.flywheel import checks, ledger
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.measure import FIRST, OWN, Bench, lost, slower
from paceline.loop.flywheel.state import NO_DRAFTER, Serving, TurnState, traces_of, turn_folder
from paceline.loop.store.folder import Store
from paceline.loop.store.forget import renewed
from paceline.model.checkpoint import load_config
from paceline.report.tables import Progress
from paceline.train import regenerate, train
from paceline.train.config import PromptsConfig, RegenerateConfig, TrainConfig

USUAL_LEN, MOST_LEN = 1024, 4096
"""Default length limit of a training document, in tokens: the store's longest document, between USUAL_LEN and
MOST_LEN."""
MORE_TOKENS, ROOM = 32, 2048
"""Tokens by which an answer may exceed the longest recorded one; default limit of prompt plus answer, in tokens."""
StageResult = dict[str, Any]


class Refused(Exception):
    """Raised if the student fails a gate (minimum quality); ends the iteration (turn) of the flywheel."""


@dataclass(frozen=True, slots=True)
class Turn:
    """State and settings of one iteration of `paceline turn`, which its stages (record, store, evals, ...) read."""

    config: FlywheelConfig
    number: int
    serving: Serving
    """The model that serves now."""
    folder: Path
    state: TurnState
    progress: Progress

    def of(self, stage: str) -> StageResult:
        """Returns the stored result of a finished stage. `stage`: a key of STAGES."""
        return self.state.stages[stage]

    @property
    def recorded(self) -> list[Path]:
        """Folders of the served model's recorded answers; empty if nothing was recorded."""
        if self.number == 1:
            return list(self.config.record)
        traces = traces_of(self.config, self.number)
        return [traces] if any(traces.glob("*.parquet")) else []

    @property
    def store(self) -> Store:
        return Store.open(self.of("store")["store"])

    @property
    def bench(self) -> Bench:
        suites = {name: Path(file) for name, file in self.of("evals")["suites"].items()}
        return Bench(self.config, self.folder, self.of("store")["max_tokens"], self.progress, suites)

    @property
    def engine(self) -> EngineConfig:
        """Engine settings for the served model, without a drafter."""
        return replace(self.config.engine, model=self.serving.model, drafter=NO_DRAFTER)

    def distilling(self, answers: tuple[Path, ...], teaching: TeachingConfig) -> DistillConfig:
        """Returns the settings with which the student is distilled from the answers in the folders `answers`.
        `teaching`: loss, duration and optimiser of its training."""
        config, out = self.config, self.folder / "student"
        student, gate = config.student_of(self.number), config.student_gate
        return DistillConfig(
            out, self.engine, answers, student=student, teaching=teaching, gate=gate, files=config.files
        )

    @property
    def earlier_stores(self) -> list[Path]:
        """Folders of the dataset stores of all earlier iterations (turns), on which their models were trained."""
        states = [TurnState.read(turn_folder(self.config, number)) for number in range(1, self.number)]
        return [Path(each.stages["store"]["store"]) for each in states if "store" in each.stages]

    @property
    def max_len(self) -> int:
        """Default length limit of a training document (prompt plus answer), in tokens. This is the length of the
        longest one in the dataset store, but at least 1024 and at most 4096."""
        return min(max(USUAL_LEN, self.of("store")["longest"]), MOST_LEN)

    def line(self, what: str, state: str, **more: Any) -> None:
        ledger.append(self.config.out, {"turn": self.number, "what": what, "state": state, **more})


def record(turn: Turn) -> StageResult:
    """Provides the recorded answers of the served model. If nothing was recorded, generates answers to the prompts that
    flywheel.yaml names.

    Keys of the result: "sources" (folders of the answers) and, if they were generated, "answers" and "tokens" (their
    numbers). Raises ConfigError if there are neither recorded answers nor prompts.
    """
    config = turn.config
    if turn.recorded:
        return {"sources": turn.recorded}
    if not config.prompts:
        raise ConfigError(
            f"turn {turn.number} begins with what {turn.serving.model} answers, and "
            f"{traces_of(config, turn.number)} has nothing of it: serve it with `{turn.serving.command}`, then run the "
            "same command again; or give prompts, which it then answers"
        )
    out = turn.folder / "recorded"
    settings = RegenerateConfig(out, turn.engine, PromptsConfig(config.prompts), config.answering)
    done = regenerate(settings, progress=turn.progress)
    return {"sources": [out / "answers"], "answers": done.num_answers, "tokens": done.num_tokens}


def store(turn: Turn) -> StageResult:
    """Builds a dataset store of the answers of this iteration (turn). If `record` in flywheel.yaml names a store, uses
    that one instead.

    Keys of the result (all lengths in tokens):

    - "store" and "version": the store's folder and version;
    - "rows": number of training rows;
    - "longest_prompt", "longest_answer", "longest": length of the longest prompt, answer, and prompt plus answer;
    - "max_tokens": maximum length of the answers that later stages generate.

    Raises PromptError if the store has too few answers or too many bad ones, ConfigError if the named store is of
    another model.
    """
    sources = [Path(source) for source in turn.of("record")["sources"]]
    stores = [source for source in sources if (source / "store.json").is_file()]
    if stores and len(sources) > 1:
        raise ConfigError(f"record names {stores[0]}, a store, and more: give it alone")
    left_out: dict[str, int] = {}
    if stores:
        data = Store.open(stores[0])
        if data.model != turn.serving.model:
            raise ConfigError(f"{stores[0]} holds tokens of {data.model}, not of {turn.serving.model}: give its own")
    else:
        # An earlier one is incomplete, from a killed run, or of other answers; rows that were deleted from it stay so.
        data = renewed(turn.folder / "store", turn.serving.model, turn.config.split)
        left_out = data.add(sources, progress=turn.progress)["left_out"]
    contents = checks.check_store(data, left_out, turn.config.gates)
    room = min(turn.config.engine.max_len or ROOM, load_config(resolve(turn.serving.model)).max_position)
    max_tokens = max(1, min(contents["longest_answer"] + MORE_TOKENS, room - contents["longest_prompt"]))
    return {"store": data.path, "version": data.version, "max_tokens": max_tokens, **contents}


def evals(turn: Turn) -> StageResult:
    """Makes the eval suite of this iteration (turn) and runs it on the served model. From the second iteration on, also
    copies the first iteration's suite: on it, the student is later compared with the model that the flywheel started
    with. Cases that occur in training data are left out of the copy.

    Keys of the result: "suites" (suite name -> file), "cases" (their number), "score" (the model's mean score). Raises
    JudgeError if the judge fails, PromptError if there are too few cases or the user's suite contains training data.
    """
    config, own = turn.config, turn.store
    trained = [*turn.earlier_stores, own.path]
    file, dropped = turn.folder / "suite.jsonl", Dropped()
    if config.suite is not None:
        suite: Suite | None = read_suite(config.suite)
        checks.check_given(suite, trained, config.suite)
    else:
        suite = make_suite(replace(config.evals, sources=(str(own.path),)), "suite", dropped)
        suite = checks.apart(suite, trained, dropped)
    suite = checks.check_cases(suite, config.gates, dropped)
    if dropped:
        turn.progress.say(str(dropped))
    if suite.needs_judge:
        checks.check_judge(config.judge)
    if config.suite is None:
        own.note_suite(file)  # first: `store forget` must know it
    suites = {OWN: suite.write(file)}
    if turn.number > 1:
        suites |= _first_suite(turn, trained)
    bench = Bench(config, turn.folder, turn.of("store")["max_tokens"], turn.progress, suites)
    scores = bench.scores("model", turn.serving.model)
    turn.line("model", "measured", model=turn.serving.model, drafter=NO_DRAFTER, **bench.figures(scores))
    return {"suites": suites, "cases": len(suite), "score": scores.mean}


def _first_suite(turn: Turn, trained: list[Path]) -> dict[str, Path]:
    """Writes the first iteration's suite without contaminated cases; returns {FIRST: file}, or {} without a case."""
    dropped = Dropped()
    first = checks.apart(read_suite(turn_folder(turn.config, 1) / "suite.jsonl"), trained, dropped)
    if dropped:
        turn.progress.say(f"of the first turn's suite: {dropped}")
    if first is None:
        return {}
    file = turn.folder / "first-suite.jsonl"
    if turn.config.suite is None:
        Store.open(turn.earlier_stores[0]).note_suite(file)
    return {FIRST: first.write(file)}


def drafter(turn: Turn) -> StageResult:
    """Trains a drafter for the served model on that model's answers, starting from the served drafter if there is one.
    Runs the evals with the new drafter; refuses it if it changes a greedy answer or is too slow.

    Keys of the result: "trained" (the new drafter's folder), "drafter" (the same folder if it is accepted, else
    "none"), "why" (reason of the refusal, or None). If `drafter.of_teacher` is off, trains nothing and returns
    {"drafter": "none"}.
    """
    if not turn.config.drafter.of_teacher:
        return {"drafter": NO_DRAFTER}
    init = None if turn.serving.drafter == NO_DRAFTER else turn.serving.drafter
    config = _training(turn, "drafter", turn.serving.model)
    if init:  # it keeps its sizes: those of `drafter.shape` are of new drafters
        names = (each for each in config.given or () if not each.startswith("shape.") or each == "shape.block_size")
        config = replace(config, given=tuple(names))
    trained = train(replace(config, init=init, answers=(turn.store.path / "train",)), progress=turn.progress)
    return _tried(turn, "drafter", turn.serving.model, trained.drafter, base="model", parents=[init] if init else [])


def student(turn: Turn) -> StageResult:
    """Distils the student from the served model's answers.

    Keys of the result: "student" (path of its folder or GGUF file), and "layers", "weights", "steps" and "reason" of
    `DistillResult`. Raises Refused if the student fails a gate (minimum quality), TrainingError if its training
    diverges.
    """
    config, teaching = turn.config, turn.config.student_teaching
    if not config.is_given("teaching.max_len"):
        teaching = replace(teaching, max_len=turn.max_len)
    result = distill(turn.distilling((turn.store.path / "train",), teaching), progress=turn.progress)
    model = str(result.gguf or result.student)
    if not result.passed:
        turn.line("student", "refused", model=model, drafter=NO_DRAFTER, why=result.reason)
        raise Refused(result.reason)
    return {"student": model, **{name: getattr(result, name) for name in ("layers", "weights", "steps", "reason")}}


def student_evals(turn: Turn) -> StageResult:
    """Runs the evals on the student and compares it with its teacher. From the second iteration (turn) on, also
    compares it with the first model, which the flywheel started with.

    Keys of the result: those of `Bench.figures`, "difference" (the student's mean score minus the teacher's) and
    "difference_interval". If the first iteration's suite was run, also "first_score" and "first_interval".

    Raises Refused if the score may have fallen too much, see `measure.lost`: by more than `gates.most_lost` from the
    teacher's, or by more than `gates.most_lost_in_all` from the first model's.
    """
    model, gates, bench = turn.of("student")["student"], turn.config.gates, turn.bench
    scores = bench.scores("student", model)
    comparison = bench.compared("student", scores, base="model")
    figures, why = bench.figures(scores), lost(comparison, gates.most_lost)
    first = bench.compared_with_first("student", model, scores, turn_folder(turn.config, 1) / "evals" / "model")
    if first is not None:
        figures |= {"first_score": first[0].mean, "first_interval": list(first[0].interval)}
        why = why or lost(replace(first[1], before="the first model"), gates.most_lost_in_all)
    turn.line("student", "refused" if why else "kept", model=model, drafter=NO_DRAFTER, why=why, **figures)
    if why:
        raise Refused(why)
    return {**figures, "difference": comparison.difference, "difference_interval": comparison.interval}


def student_drafter(turn: Turn) -> StageResult:
    """Trains a drafter for the student on the student's own answers to the training prompts. Runs the evals with the
    new drafter; refuses it if it changes a greedy answer or is too slow.

    Keys of the result: "trained" (the new drafter's folder), "drafter" (the same folder if it is accepted, else
    "none"), "why" (reason of the refusal, or None).
    """
    model = turn.of("student")["student"]
    config = _training(turn, "student-drafter", model)
    trained = train(replace(config, prompting=PromptsConfig((str(turn.store.path / "train"),))), progress=turn.progress)
    return _tried(turn, "student + drafter", model, trained.drafter, base="student")


def _training(turn: Turn, name: str, model: str) -> TrainConfig:
    """Returns the settings that both drafters' trainings share; generated answers may be as long as the evals'."""
    config, drafter, store = turn.config, turn.config.drafter, turn.of("store")
    answering = replace(config.answering, seed=drafter.loop.seed)
    if not config.is_given("answering.max_tokens"):
        answering = replace(answering, max_tokens=store["max_tokens"])
    if not config.is_given("answering.max_prompt_tokens"):
        answering = replace(answering, max_prompt_tokens=store["longest_prompt"])
    return TrainConfig(
        turn.folder / name,
        replace(config.engine, model=model, drafter=NO_DRAFTER),
        max_len=drafter.max_len,
        minutes=config.drafter_minutes,
        plan=drafter.plan,
        features=drafter.features,
        shape=drafter.shape,
        loop=drafter.loop,
        answering=answering,
        given=tuple(each.removeprefix("drafter.") for each in config.given if each.startswith("drafter.")),
    )


def _tried(turn: Turn, what: str, model: str, folder: Path, base: str, parents: list[str] | None = None) -> StageResult:
    """Measures the model with its new drafter against the run `base` without; a drafter that changes an answer or is
    too slow is not served."""
    bench, is_greedy = turn.bench, turn.config.sampling.temperature == 0
    name = what.replace(" + ", "-and-")
    scores = bench.scores(name, model, str(folder))
    comparison = bench.compared(name, scores, base)
    alone = read_scores(turn.folder / "evals" / base)
    why = slower(alone, scores, comparison, turn.config.gates.least_speedup, is_greedy)
    state = "refused" if why else "kept"
    turn.line(what, state, model=model, drafter=str(folder), why=why, **bench.figures(scores))
    lineage = {"parents": parents or [], "state": state, "turn": turn.number, "target": model, "reason": why or ""}
    Lineage(turn.config.out / "lineage.json").add(str(folder), **lineage)
    if why:
        turn.progress.say(f"{what}: the drafter is not served: {why}")
    return {"drafter": NO_DRAFTER if why else str(folder), "trained": str(folder), "why": why}


STAGES: dict[str, Callable[[Turn], StageResult]] = {
    "record": record,
    "store": store,
    "evals": evals,
    "drafter": drafter,
    "student": student,
    "student-evals": student_evals,
    "student-drafter": student_drafter,
}
"""All stages, in execution order."""
