"""`paceline distill`: from a teacher and its answers to a smaller student."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from paceline.commands.options import Changed, Only, Opt, options
from paceline.commands.shared import Json, TerminalProgress, say, starting
from paceline.config import EngineConfig
from paceline.loop.distill import config as asks
from paceline.train.config import AnswerConfig, PromptsConfig

TEACHER = Changed(
    model=Opt("--teacher", "--target", help="The model to be made smaller: built-in name, folder, GGUF file, hub id.")
)
ANSWERS = Only("max_tokens", "max_prompt_tokens", "system", "before")
PROMPTS = Only("prompts", "limit")


@options
def distill(
    config: Annotated[asks.DistillConfig, Only("out", "answers")],
    teacher: Annotated[EngineConfig, Only("model", "dtype", "backend", "isa", "device", "threads"), TEACHER],
    asked: Annotated[PromptsConfig, PROMPTS],
    answering: Annotated[AnswerConfig, ANSWERS],
    student: Annotated[asks.StudentConfig, Changed(choice=Opt("--choose-layers"))],
    teaching: asks.TeachingConfig,
    gate: asks.GateConfig,
    files: asks.FilesConfig,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time a step on the answers that are there, say what the run will take, and stop.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a smaller model on a larger one's answers.

    The student has fewer layers and is trained on the teacher's answers. The same command resumes a run that was
    interrupted. Exit status 0: kept; 1: refused for its answers to held-out prompts. Nothing that served before is
    changed.

    Examples:
      paceline distill --teacher smollm2-135m --answers runs/answers/answers \\
        --layers 12 --minutes 20 --out runs/student
    """
    parts = {"teacher": teacher, "asked": asked, "answering": answering, "student": student, "teaching": teaching}
    config = replace(config, **parts, gate=gate, files=files)
    starting(teacher.model)
    if dry_run:
        from paceline.loop.distill.price import price

        found = price(config)
        say(found.text)
        _end(found.figures, as_json, 0)
        return
    from paceline.loop.distill import distill as library

    result = library(config, progress=TerminalProgress())

    _end(asdict(result), as_json, 0 if result.passed else 1)


def _end(line: dict[str, Any], as_json: bool, status: int) -> None:
    import json

    from paceline.runs.folder import plain

    if as_json:
        print(json.dumps(plain(line)), flush=True)
    if status:
        raise typer.Exit(status)
