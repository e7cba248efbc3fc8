"""`paceline distill`: trains a smaller student model on a teacher's answers."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from paceline.commands.options import Changed, Only, Opt, options
from paceline.commands.shared import REFUSED, Json, TerminalProgress, finish, say, starting
from paceline.config import EngineConfig
from paceline.loop.distill import config as asks
from paceline.train.config import AnswerConfig, PromptsConfig

TEACHER = Changed(
    model=Opt("--teacher", "--target", help="The large model: built-in name, folder, GGUF file or hub id.")
)
ANSWERS = Only("max_tokens", "max_prompt_tokens", "system", "before")
PROMPTS = Only("prompts", "limit")


@options
def distill(
    config: Annotated[asks.DistillConfig, Only("out", "answers")],
    teacher: Annotated[EngineConfig, Only("model", "dtype", "backend", "isa", "device", "threads"), TEACHER],
    prompting: Annotated[PromptsConfig, PROMPTS],
    answering: Annotated[AnswerConfig, ANSWERS],
    student: Annotated[asks.StudentConfig, Changed(choice=Opt("--choose-layers"))],
    teaching: asks.TeachingConfig,
    gate: asks.GateConfig,
    files: asks.FilesConfig,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Time one training step on existing answers, print the run's costs, and stop."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a smaller model on a larger one's answers.

    The smaller model (student) has fewer layers than the larger one (teacher). At the end its answers to held-out
    prompts are compared with the teacher's. Exit status 0: they are good enough; 3: they are not, and the student is
    rejected; 2: an error. The same command resumes an interrupted run. No running server is changed.

    Examples:
      paceline distill --teacher smollm2-135m --answers runs/answers/answers \\
        --layers 12 --minutes 20 --out runs/student
    """
    parts = {"teacher": teacher, "prompting": prompting, "answering": answering, "student": student}
    config = replace(config, **parts, teaching=teaching, gate=gate, files=files)
    starting(teacher.model)
    if dry_run:
        from paceline.loop.distill.price import price

        costs = price(config)
        say(costs.text)
        finish(costs.figures, as_json)
        return
    from paceline.loop.distill.run import distill as library

    result = library(config, progress=TerminalProgress())
    finish(asdict(result), as_json, 0 if result.passed else REFUSED)
