"""Estimates minutes, tokens, disk and cost of an iteration (turn) of the flywheel, stage by stage; writes no files.

    estimate = price(config, progress=progress)    estimate.table(), estimate.as_json()

The student's training is estimated by timing a step on recorded answers (`paceline.loop.distill.price`), generation by
the roofline model and its measured efficiency (`paceline.train.plan.training_plan`), drafters by their minutes. The
student's evals are scaled by its share of the teacher's weights. CPU seconds count all threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.errors import PromptError
from paceline.loop.distill.price import price as price_student
from paceline.loop.distill.start import kept_layers
from paceline.loop.evals.suite import read_suite
from paceline.loop.flywheel.config import FlywheelConfig
from paceline.loop.flywheel.run import open_turn
from paceline.loop.flywheel.stages import Turn, record
from paceline.loop.store.incoming import readable_rows, shards_of
from paceline.report.tables import SILENT, Column, Progress, Table, ignore
from paceline.simulate.costs.roofline import pass_seconds
from paceline.train.answers.mixture import read_mixture
from paceline.train.config import PromptsConfig, TrainConfig
from paceline.train.plan.choices import deployment_of
from paceline.train.plan.prompt_facts import LETTERS_PER_TOKEN
from paceline.train.plan.target_facts import machine_of, read_target
from paceline.train.plan.training_plan import ANSWER_SHARE, EFFICIENCY, make_plan

BYTES_A_TOKEN = 8.0
"""Disk bytes per token in a store, including the other columns; an upper estimate, not measured."""
CHECKPOINT_BYTES, FOLDER_BYTES = 12.0, 3.0
"""Disk bytes per weight of the student: in a checkpoint (float32, two moments); in an output folder (bfloat16 and
blocks)."""
DEFAULT_SHARE = 0.4
"""Assumed share of the teacher's weights that a student has, without answers to measure."""


@dataclass(frozen=True, slots=True)
class Material:
    """Number and mean length of the answers that an iteration (turn) starts from."""

    rows: int
    prompt_tokens: float
    """Mean tokens per prompt."""
    answer_tokens: float
    """Mean tokens per answer."""
    sources: tuple[Path, ...] = ()
    """Folders of recorded answers; empty if the answers are still to be generated."""


@dataclass(frozen=True, slots=True)
class StagePrice:
    """Estimated minutes, tokens and disk space of one stage of an iteration (turn) of the flywheel."""

    stage: str
    minutes: float = 0.0
    tokens: float = 0.0
    """Number of tokens that the stage generates, or trains on, each counted once."""
    disk_bytes: float = 0.0
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class TurnPrice:
    """Estimated minutes, tokens, disk space and cost of an iteration (turn) of the flywheel, stage by stage."""

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
        """Returns the cost of this many minutes on all threads of the machine; None if no price is set."""
        return None if self.price_per_core_hour is None else minutes / 60 * self.threads * self.price_per_core_hour

    def as_json(self) -> dict[str, Any]:
        stages = [
            {"stage": each.stage, "minutes": each.minutes, "tokens": each.tokens, "disk_bytes": each.disk_bytes,
             "price": self.money(each.minutes), "finished": each.is_finished}
            for each in self.stages
        ]  # fmt: skip
        return {
            "turn": self.turn,
            "model": self.model,
            "threads": self.threads,
            "stages": stages,
            "notes": list(self.notes),
            "minutes": self.minutes,
            "core_hours": self.minutes / 60 * self.threads,
            "tokens": sum(each.tokens for each in self.stages),
            "disk_bytes": sum(each.disk_bytes for each in self.stages),
            "price": self.money(self.minutes),
        }

    def table(self) -> Table:
        figures = self.as_json()
        whole = StagePrice("all", self.minutes, figures["tokens"], figures["disk_bytes"])
        columns = [
            Column("stage", lambda each: each.stage),
            Column("minutes", lambda each: None if each.is_finished else each.minutes, "{:.1f}", align="right"),
            Column("tokens", lambda each: each.tokens or None, "{:,.0f}", align="right"),
            Column("disk MiB", lambda each: each.disk_bytes / 2**20 or None, "{:,.0f}", align="right"),
            Column("price", lambda each: self.money(each.minutes), "{:.4g}", align="right"),
        ]
        title = f"Turn {self.turn}, from {self.model}: {figures['core_hours']:.2f} core-hours on {self.threads} threads"
        return Table(columns, [*self.stages, whole], title=title, notes=self.notes)


def price(config: FlywheelConfig, *, progress: Progress = SILENT) -> TurnPrice:
    """Estimates minutes, tokens, disk space and cost of each stage of the iteration (turn) that is in progress, or else
    of the next one. Finished stages cost nothing. Writes no files. Raises ConfigError if the iteration was started with
    other settings, or there are neither recorded answers nor prompts, and PromptError if no recorded answer is
    usable."""
    turn = open_turn(config, progress)
    notes: list[str] = []
    material = _material(turn)
    student_s, disk, share = _student(turn, material, notes)
    evals_share = config.split.evals_share
    suite = turn.folder / "suite.jsonl"
    cases = min(evals_share * material.rows, config.evals.limit or math.inf)
    if config.suite or suite.is_file():
        cases = len(read_suite(config.suite or suite))
    answer_s = _answer_seconds(turn.engine, config.sampling.at_once, material)
    eval_tokens, answers = cases * material.answer_tokens, 0 if material.sources else material.rows
    train_tokens = (1 - evals_share) * material.rows * material.answer_tokens
    drafter_minutes, drafter_bytes = _drafter(turn, notes)
    evals_minutes = cases * answer_s / 60
    suites = 2.0 if turn.number > 1 else 1.0  # with the first turn's suite
    row_bytes = BYTES_A_TOKEN * (material.prompt_tokens + material.answer_tokens)
    drafter = StagePrice("drafter", drafter_minutes + evals_minutes, eval_tokens, drafter_bytes)
    for_student = drafter_minutes + share * evals_minutes
    stages = [
        StagePrice("record", answers * answer_s / 60, answers * material.answer_tokens),
        StagePrice("store", disk_bytes=row_bytes * material.rows),
        StagePrice("evals", evals_minutes, eval_tokens),
        drafter if config.drafter.of_teacher else StagePrice("drafter"),
        StagePrice("student", student_s / 60, train_tokens, disk),
        StagePrice("student-evals", suites * share * evals_minutes, suites * eval_tokens),
        StagePrice("student-drafter", for_student, eval_tokens + train_tokens, drafter_bytes),
    ]
    done = turn.state.stages
    remaining = [StagePrice(each.stage, is_finished=True) if each.stage in done else each for each in stages]
    threads = config.engine.threads or torch.get_num_threads()
    return TurnPrice(turn.number, turn.serving.model, remaining, threads, config.price_per_core_hour, notes)


def _material(turn: Turn) -> Material:
    """Returns the answers of the iteration (turn). Raises the errors of the stage `record`, and PromptError on sources
    without an answer."""
    config = turn.config
    if "store" in turn.state.stages:
        sources = [Path(turn.of("store")["store"])]
    elif "record" in turn.state.stages or turn.recorded or not config.prompts:
        recorded = turn.state.stages.get("record") or record(turn)
        sources = [Path(source) for source in recorded["sources"]]
    else:
        prompts = read_mixture(PromptsConfig(config.prompts), config.answering.seed, ignore).prompts
        letters = [sum(len(str(each.get("content") or "")) for each in prompt.messages) for prompt in prompts]
        pairs = zip(prompts, letters, strict=True)
        lengths = [len(prompt.token_ids) or number / LETTERS_PER_TOKEN for prompt, number in pairs]
        rows = len(prompts) * len(config.answering.temperatures)
        return Material(rows, sum(lengths) / max(1, len(lengths)), ANSWER_SHARE * config.answering.max_tokens)
    folders = [split for source in sources for split in _splits(source)]
    files = [file for folder in folders for file in shards_of(folder)]
    rows = [row for file in files for row in readable_rows(file) if row["answer_ids"]]
    if not rows:
        raise PromptError(f"{', '.join(map(str, sources))} holds no answer whose tokens are known: record some")
    means = (sum(len(row[name] or ()) for row in rows) / len(rows) for name in ("prompt_ids", "answer_ids"))
    return Material(len(rows), *means, sources=tuple(folder for folder in folders if folder.name != "evals"))


def _splits(source: Path) -> list[Path]:
    """Returns the folders of a source's answers: the non-empty splits of a store, else the source itself."""
    if not (source / "store.json").is_file():
        return [source]
    return [source / split for split in ("train", "evals") if any((source / split).glob("*.parquet"))]


def _answer_seconds(engine: EngineConfig, batch: int, material: Material) -> float:
    """Seconds per eval answer without a drafter, by the roofline at the evals' batch size."""
    target, machine = read_target(engine), machine_of(None, engine.device)
    deployment = deployment_of(target, machine)
    context = material.prompt_tokens + material.answer_tokens / 2
    pass_s = sum(pass_seconds(target.shape, deployment, batch, 1, context).values()) / batch
    prefill_s = sum(pass_seconds(target.shape, deployment, 1, 256, context).values()) / 256
    reached = EFFICIENCY["gpu" if machine.is_gpu else "cpu"]["answers"]
    return (material.answer_tokens * pass_s + material.prompt_tokens * prefill_s) / reached


def _student(turn: Turn, material: Material, notes: list[str]) -> tuple[float, float, float]:
    """Estimates the student: (training seconds, disk bytes, share of the teacher's weights)."""
    config, teaching = turn.config, turn.config.student_teaching
    if not material.sources:
        student = config.student_of(turn.number)
        target = read_target(turn.engine)
        if not student.student:
            kept_layers(student, target.shape.num_layers)  # raises ConfigError on invalid layers
        notes.append("the student's training is priced by its minutes: a step is timed when there are answers")
        return 60 * (teaching.minutes or config.minutes), 0.0, DEFAULT_SHARE
    figures = price_student(turn.distilling(material.sources, teaching)).figures
    weights = figures["weights"]
    stored = figures["answers"] + figures["heldout"] if teaching.method == "soft" else figures["heldout"]
    top_k = stored * material.answer_tokens * (8.0 * teaching.top_k + 4)
    disk = top_k + weights["student"] * (2 * CHECKPOINT_BYTES + 4 + 2 * FOLDER_BYTES)
    return 60 * sum(figures["minutes"].values()), disk, weights["student"] / weights["teacher"]


def _drafter(turn: Turn, notes: list[str]) -> tuple[float, float]:
    """Estimates a drafter's training: (minutes, disk bytes). The student's drafter is assumed as large as the
    teacher's."""
    config, drafter = turn.config, turn.config.drafter
    training = TrainConfig(
        turn.folder / "drafter",
        turn.engine,
        answers=(turn.folder / "store" / "train",),
        minutes=config.drafter_minutes,
        plan=drafter.plan,
        shape=drafter.shape,
        loop=drafter.loop,
    )
    plan = make_plan(training)
    notes.append("of drafters, the disk is that of the plan without hidden states that are kept for a while")
    return config.drafter_minutes or 60 * plan.hours["all"], plan.disk_bytes["checkpoints"]
