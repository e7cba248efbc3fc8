"""What a turn will take, before any of it is done: minutes, tokens, disk and money, stage by stage. Nothing is written.

    found = price_of(config, progress)          found.table(), found.as_json()

A step of the student's training is timed here, on the answers that were recorded (`paceline.loop.distill.price`); evals
and answers are those of the roofline, over the share of it that answering reaches
(`paceline.train.plan.training_plan`); trainings end after their minutes. What a student of a later stage takes is its
share of the teacher's weights. Seconds of processors are those of all threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PromptError
from paceline.loop.distill.config import DistillConfig
from paceline.loop.distill.price import price as price_student
from paceline.loop.distill.start import kept_layers
from paceline.loop.evals.suite import read_suite
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.run import open_turn
from paceline.loop.flywheel.stages import Turn, record
from paceline.loop.flywheel.state import NO_DRAFTER
from paceline.loop.store.incoming import read_shard, shards_of
from paceline.report.tables import Column, Progress, Table, ignore
from paceline.simulate.costs.roofline import pass_seconds
from paceline.train.answers.mixture import read_mixture
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.plan.choices import deployment_of
from paceline.train.plan.prompt_facts import LETTERS_PER_TOKEN
from paceline.train.plan.target_facts import machine_of, read_target
from paceline.train.plan.training_plan import ANSWER_SHARE, EFFICIENCY, make_plan

BYTES_A_TOKEN = 8.0
"""Of a token in a store, with its row's share of other columns: measured on none, an upper estimate."""
CHECKPOINT_BYTES, FOLDER_BYTES = 12.0, 3.0
"""A weight of the student with two moments in float32; the same in bfloat16 and in blocks."""
DEFAULT_SHARE = 0.4
"""Of the teacher's weights, where the student was not looked at."""


@dataclass(frozen=True, slots=True)
class Material:
    """What there is to learn from."""

    rows: int
    prompt_tokens: float
    """Mean, of all rows; answers next."""
    answer_tokens: float
    sources: tuple[Path, ...] = ()
    """Of answers; none where they are yet to be made."""


@dataclass(frozen=True, slots=True)
class StagePrice:
    """Of one stage."""

    stage: str
    minutes: float = 0.0
    tokens: float = 0.0
    """Answered, or learned from once."""
    disk_bytes: float = 0.0
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class TurnPrice:
    """Of all stages that are left."""

    turn: int
    model: str
    stages: Sequence[StagePrice]
    threads: int
    price_per_core_hour: float | None
    notes: Sequence[str]

    @property
    def minutes(self) -> float:
        return sum(each.minutes for each in self.stages)

    def money(self, minutes: float) -> float | None:
        """Of so many minutes of all threads."""
        return None if self.price_per_core_hour is None else minutes / 60 * self.threads * self.price_per_core_hour

    def as_json(self) -> dict[str, Any]:
        stages = [
            {"stage": each.stage, "minutes": each.minutes, "tokens": each.tokens, "disk_bytes": each.disk_bytes,
             "price": self.money(each.minutes), "finished": each.is_finished}
            for each in self.stages
        ]  # fmt: skip
        told = {"turn": self.turn, "model": self.model, "threads": self.threads, "stages": stages, "notes": list(self.notes)}
        whole = {"tokens": sum(each.tokens for each in self.stages), "disk_bytes": sum(each.disk_bytes for each in self.stages)}
        hours = {"minutes": self.minutes, "core_hours": self.minutes / 60 * self.threads}
        return {**told, **hours, **whole, "price": self.money(self.minutes)}

    def table(self) -> Table:
        told = self.as_json()
        whole = StagePrice("all", self.minutes, told["tokens"], told["disk_bytes"])
        columns = [
            Column("stage", lambda each: each.stage),
            Column("minutes", lambda each: None if each.is_finished else each.minutes, "{:.1f}", align="right"),
            Column("tokens", lambda each: each.tokens or None, "{:,.0f}", align="right"),
            Column("disk MiB", lambda each: each.disk_bytes / 2**20 if each.disk_bytes else None, "{:,.0f}", align="right"),
            Column("price", lambda each: self.money(each.minutes), "{:.4g}", align="right"),
        ]
        title = f"Turn {self.turn}, from {self.model}: {told['core_hours']:.2f} core-hours on {self.threads} threads"
        return Table(columns, [*self.stages, whole], title=title, notes=self.notes)


def price_of(config: FlywheelConfig, progress: Progress) -> TurnPrice:
    """As `paceline.loop.flywheel.price`."""
    turn = open_turn(config, progress)
    notes: list[str] = []
    material = _material(turn)
    student_s, disk, share = _student(turn, material, notes)
    kept = config.split.evals_share
    suite = turn.folder / "suite.jsonl"
    cases = len(read_suite(config.suite or suite)) if config.suite or suite.is_file() else kept * material.rows
    cases = min(cases, config.evals.limit or cases)
    answer_s = _answer_seconds(config, turn.serving.model, material)
    learned = (1 - kept) * material.rows
    asked, answers = cases * material.answer_tokens, 0 if material.sources else material.rows
    drafter_minutes, drafter_bytes = _drafter(turn, notes)
    evals_minutes, of_teacher = cases * answer_s / 60, config.drafter.of_teacher
    first = 2.0 if turn.number > 1 else 1.0  # the first turn's suite, too
    row_bytes = BYTES_A_TOKEN * (material.prompt_tokens + material.answer_tokens)
    taught = learned * material.answer_tokens
    stages = [
        StagePrice("record", answers * answer_s / 60, answers * material.answer_tokens),
        StagePrice("store", disk_bytes=row_bytes * material.rows),
        StagePrice("evals", evals_minutes, asked),
        StagePrice("drafter", drafter_minutes + evals_minutes, asked, drafter_bytes) if of_teacher else StagePrice("drafter"),
        StagePrice("student", student_s / 60, taught, disk),
        StagePrice("student-evals", first * share * evals_minutes, first * asked),
        StagePrice("student-drafter", drafter_minutes + share * evals_minutes, asked + taught, drafter_bytes),
    ]
    left = [StagePrice(each.stage, is_finished=True) if each.stage in turn.state.stages else each for each in stages]
    threads = config.engine.threads or torch.get_num_threads()
    return TurnPrice(turn.number, turn.serving.model, left, threads, config.price_per_core_hour, notes)


def _material(turn: Turn) -> Material:
    """Raises what the stage `record` would, without asking the model; PromptError on sources that hold nothing."""
    config = turn.config
    if "store" in turn.state.stages:
        sources = [Path(turn.of("store")["store"])]
    elif "record" in turn.state.stages or (turn.number == 1 and config.record) or not config.prompts or _has_traces(turn):
        told = turn.state.stages.get("record") or record(turn)
        sources = [Path(each) for each in told["sources"]]
    else:
        given = read_mixture(PromptsConfig(config.prompts), config.answering.seed, ignore).prompts
        letters = [sum(len(str(each.get("content") or "")) for each in prompt.messages) for prompt in given]
        lengths = [len(prompt.token_ids) or number / LETTERS_PER_TOKEN for prompt, number in zip(given, letters, strict=True)]
        rows = len(given) * len(config.answering.temperatures)
        return Material(rows, sum(lengths) / max(1, len(lengths)), ANSWER_SHARE * config.answering.max_tokens)
    folders = [side for each in sources for side in _sides(each)]
    rows = [row for folder in folders for file in shards_of(folder) for row in read_shard(file) if row["answer_ids"]]
    if not rows:
        raise PromptError(f"{', '.join(map(str, sources))} holds no answer whose tokens are known: record some")
    means = (sum(len(row[name] or ()) for row in rows) / len(rows) for name in ("prompt_ids", "answer_ids"))
    learned = [folder for folder in folders if folder.name != "evals"]
    return Material(len(rows), *means, sources=tuple(learned))


def _has_traces(turn: Turn) -> bool:
    return turn.number > 1 and any((turn.folder / "traces").glob("*.parquet"))


def _sides(source: Path) -> list[Path]:
    """Folders of answers of a source: of a store both sides, as far as there is something."""
    if not (source / "store.json").is_file():
        return [source]
    return [source / side for side in ("train", "evals") if any((source / side).glob("*.parquet"))]


def _answer_seconds(config: FlywheelConfig, model: str, material: Material) -> float:
    """Of one answer without a drafter, as evals ask: so many at once, by the roofline."""
    engine = replace(config.engine, model=model, drafter=NO_DRAFTER)
    target, machine = read_target(engine), machine_of(None, engine.device)
    deployment, batch = deployment_of(target, machine), config.sampling.at_once
    context = material.prompt_tokens + material.answer_tokens / 2
    pass_s = sum(pass_seconds(target.shape, deployment, batch, 1, context).values()) / batch
    prefill_s = sum(pass_seconds(target.shape, deployment, 1, 256, context).values()) / 256
    reached = EFFICIENCY["gpu" if machine.is_gpu else "cpu"]["answers"]
    return (material.answer_tokens * pass_s + material.prompt_tokens * prefill_s) / reached


def _student(turn: Turn, material: Material, notes: list[str]) -> tuple[float, float, float]:
    """(seconds, bytes on disk, share of the teacher's weights)."""
    config, teaching = turn.config, turn.config.lesson
    if not material.sources:
        student, shape = config.student_of(turn.number), read_target(replace(config.engine, model=turn.serving.model)).shape
        if not student.student:
            kept_layers(student, shape.num_layers)  # refuses what the teacher does not have; nothing is fetched for it
        notes.append("the student's training is priced by its minutes: a step is timed when there are answers")
        return 60 * (teaching.minutes or config.minutes), 0.0, DEFAULT_SHARE
    teacher = replace(config.engine, model=turn.serving.model, drafter=NO_DRAFTER)
    asked = DistillConfig(
        turn.folder / "student",
        teacher,
        material.sources,
        student=config.student_of(turn.number),
        teaching=teaching,
        files=config.files,
    )
    told = price_student(asked).figures
    weights = told["weights"]
    kept = told["answers"] + told["heldout"] if teaching.method == "soft" else told["heldout"]
    top_k = kept * material.answer_tokens * (8.0 * teaching.top_k + 4)
    disk = top_k + weights["student"] * (2 * CHECKPOINT_BYTES + 4 + 2 * FOLDER_BYTES)
    return 60 * sum(told["minutes"].values()), disk, weights["student"] / weights["teacher"]


def _drafter(turn: Turn, notes: list[str]) -> tuple[float, float]:
    """(minutes, bytes on disk) of one drafter's training; the student's is taken to be as large as its teacher's."""
    config, given = turn.config, turn.config.drafter
    engine = replace(config.engine, model=turn.serving.model, drafter=NO_DRAFTER)
    named: dict[str, Any] = {"minutes": config.drafter_minutes, "plan": given.plan, "shape": given.shape, "loop": given.loop}
    plan = make_plan(TrainConfig(turn.folder / "drafter", engine, answers=(turn.folder / "store" / "train",), **named))
    notes.append("of drafters, the disk is that of the plan without hidden states that are kept for a while")
    return config.drafter_minutes or 60 * plan.hours["all"], plan.disk_bytes["checkpoints"]
