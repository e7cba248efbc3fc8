"""Runs on a Ray cluster for their tests: jobs whose worker dies, and a run that goes on with answers of two workers."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.data.answers import AnswerShards
from paceline.errors import PromptError
from paceline.report.tables import Progress
from paceline.train import regenerate
from paceline.train.answers.conversation import Regenerated
from paceline.train.config import (
    DrafterShape,
    LoopConfig,
    RegenerateConfig,
    RemoteConfig,
    TrainConfig,
)
from paceline.train.processes.ray_cluster import LOCAL, Work

RAY = RemoteConfig(ray=LOCAL, ray_workers=2)
TARGET = EngineConfig(device="cpu", dtype="float32", threads=1)


class Seen(Exception):
    """Ends a run at what is looked for."""


def ended(*arguments: Any, **named: Any) -> None:
    raise Seen


@dataclass(frozen=True)
class Dying:
    """A job whose worker is killed once, with its first batch done and nothing of it sent."""

    job: Any
    died: Path

    def begin(self, num_threads: int | None) -> Work:
        work = self.job.begin(num_threads)

        def work_or_die(batch: list[Any]) -> list[Any]:
            results = work(batch)
            try:
                self.died.touch(exist_ok=False)
            except FileExistsError:
                return results
            os.kill(os.getpid(), signal.SIGKILL)
            return results

        return work_or_die


def answers_of(folder: Path) -> str:
    """A hash in which their order does not count."""
    lines = sorted(json.dumps(astuple(each)) for each in AnswerShards(folder))
    assert lines and len(lines) == len({*lines})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def files_of(run: Path, kind: str) -> dict[str, str]:
    files = sorted(run.glob(f"{kind}-*/**/*.safetensors"))
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def going_on(regenerate_config: RegenerateConfig, one: Regenerated, folder: Path, before: Callable[[], None]) -> None:
    """The first prompts answered here, then, with `before` called, the others on the cluster: the answers of one
    process."""
    first = replace(regenerate_config, out=folder, prompting=replace(regenerate_config.prompting, limit=2))
    assert regenerate(first).num_answers
    lines: list[str] = []

    class Saying(Progress):
        def say(self, text: str) -> None:
            lines.append(text)

    before()
    two = regenerate(replace(regenerate_config, out=folder, remote=RAY), progress=Saying())
    assert answers_of(one.answers) == answers_of(two.answers)
    assert any(answer.turn for answer in AnswerShards(one.answers)), "some conversations went on"
    begun = sum(each.key.split("/")[1].startswith(("0", "1")) for each in AnswerShards(one.answers))
    assert two.num_found == 6 and two.num_answers + begun == one.num_answers
    assert (two.num_too_long, two.num_tokens_too_long) == (
        one.num_too_long,
        one.num_tokens_too_long,
    ) and two.num_too_long
    assert any("the workers of Ray at local answer" in each for each in lines)
    again = regenerate(replace(regenerate_config, out=folder, remote=RAY))
    assert (again.num_found, again.num_answers) == (15, 0)


def training(regenerate_config: RegenerateConfig, answers: Path, folder: Path) -> TrainConfig:
    shape = DrafterShape(num_layers=1, block_size=4, num_taps=2)
    loop = LoopConfig(max_steps=2, blocks_per_step=8, anchors=4, autocast=False, serve_share=0.0)
    options: dict[str, Any] = {"plan": "off", "max_len": 256, "shape": shape, "loop": loop, "features": "cached"}
    return TrainConfig(folder, regenerate_config.target, answers=(answers,), **options)


def dying(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, died: Path) -> None:
    """Have the first worker of this job die."""
    job = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *arguments: Dying(job(*arguments), died))


@dataclass(frozen=True)
class Doubling:
    """A job that takes no time; -1 is refused."""

    def begin(self, num_threads: int | None) -> Work:
        def work(batch: list[Any]) -> list[Any]:
            if -1 in batch:
                raise PromptError(f"no template for -1 with {num_threads} threads")
            return [2 * each for each in batch]

        return work
