"""Runs `regenerate` here or on the workers of a Ray cluster (`--ray ADDRESS`), with the same answers, keys and files.

Each worker loads the target and answers batches of prompts with `Regenerator`. A conversation's seed is derived from
its key, so its answer does not depend on the worker or the order. Only this process writes: every finished conversation
goes to the journal (a log on disk) immediately, later to a shard (a Parquet file). If a worker dies, another one
answers its batch; if this process dies, the next run generates what is missing. Under torchrun the first process uses
the cluster, and the others wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards
from paceline.data.prompts import Prompt
from paceline.engine.llm import LLM
from paceline.model.backends import settle
from paceline.report.tables import Advance, Progress
from paceline.runs.ranks import Ranks
from paceline.train.answers import regenerate as regenerate_run
from paceline.train.answers.conversation import Regenerated, ShardBuffer, conversations_of
from paceline.train.answers.regenerate import Regenerator, engine_for, prepared
from paceline.train.config import AnswerConfig, RegenerateConfig
from paceline.train.processes.ray_cluster import Work, connected, distributed

BATCHES_OF_ROWS = 4
"""Conversations per batch, for each cache row (place of one sequence) of a worker. At the end of a batch, rows are idle
until its longest answer is complete."""


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A prompt that a Ray worker answers. Each answer, one for each configured temperature and sample number, begins a
    conversation; the worker skips the conversations that are already finished."""

    prompt: Prompt
    finished: frozenset[str]
    """Keys of its finished conversations."""
    begun: dict[str, list[Answer]]
    """Key -> answers so far, for conversations that an earlier run had begun."""


@dataclass(frozen=True, slots=True)
class Answering:
    """The job of a Ray worker that generates answers: `begin` loads the target, and returns the function that answers a
    batch of prompts."""

    engine: EngineConfig
    answering: AnswerConfig

    def begin(self, num_threads: int | None) -> Work:
        llm = LLM.of(replace(self.engine, threads=self.engine.threads or num_threads))
        return partial(_answered, llm, self.answering)


@dataclass
class _InMemory:
    """Replaces AnswerShards in a worker: one batch's finished and begun conversations, and its new answers."""

    finished: set[str]
    begun: dict[str, list[Answer]]
    folder: Path = Path()
    written: list[Answer] = field(default_factory=list)

    def recover(self) -> dict[str, list[Answer]]:
        return self.begun

    def keys(self) -> set[str]:
        return self.finished

    def note(self, answer: Answer, is_over: bool) -> None:
        """Does nothing: the main process writes the journal."""

    def write(self, answers: list[Answer]) -> None:
        self.written += answers


def _answered(
    llm: LLM, answering: AnswerConfig, batch: list[PromptTask]
) -> list[tuple[list[Answer], Regenerated, set[str]]]:
    """Returns one tuple for the batch: its answers, the counts, and the keys of the conversations without an answer
    (prompt too long, or refused)."""
    finished = {key for item in batch for key in item.finished}
    shards = _InMemory(finished, {key: answers for item in batch for key, answers in item.begun.items()})
    prompts = [item.prompt for item in batch]
    done = Regenerator(llm, shards, answering).run(prompts)
    left_out = conversations_of(prompts, answering).keys() - finished - {answer.key for answer in shards.written}
    return [(shards.written, done, left_out)]


def run(config: RegenerateConfig, progress: Progress) -> Regenerated:
    """Generates the target's answers; the implementation of `paceline.train.regenerate`. Uses the Ray cluster
    `config.remote.ray`; if that is None, this machine or the configured server."""
    if config.remote.ray is None:
        return regenerate_run.run(config, progress)
    ranks = Ranks.here()
    if not ranks.is_first:
        return Regenerated(config.out / "answers")
    with prepared(config, progress) as job:
        shards = AnswerShards(config.out / "answers")
        done = _shared(config, job.prompts, shards, progress)
        job.conclude(config, done, progress)
    return done


def _shared(config: RegenerateConfig, prompts: list[Prompt], shards: AnswerShards, progress: Progress) -> Regenerated:
    began, where = time.monotonic(), config.remote
    keys = conversations_of(prompts, config.answering)
    begun, finished = shards.recover(), shards.keys()
    done = Regenerated(shards.folder, num_found=len(finished & keys.keys()))
    writer = _AnswerWriter(shards, done, ShardBuffer(shards))
    missing = _missing(keys, finished, begun)
    device = config.target.device  # of a worker: this machine may have no GPU
    engine = replace(settle(engine_for(config, Ranks())), device=device)
    samples = max(1, len(keys) // max(1, len(prompts)))
    with progress.bar("answering", len(keys)) as writer.advance:
        for _ in range(done.num_found):
            writer.advance("answering")
        try:
            with connected(where) as ray:
                job = Answering(engine, config.answering)
                at_most = max(1, BATCHES_OF_ROWS * config.max_batch // samples)
                for answers, counts, left_out in distributed(ray, where, job, missing, at_most):
                    writer.add(answers, counts, left_out)
        finally:
            writer.buffer.write()
    done.wall_s = time.monotonic() - began
    done.tokens_per_s = done.num_tokens / done.wall_s
    return done


def _missing(
    keys: dict[str, tuple[Prompt, float]], finished: set[str], begun: dict[str, list[Answer]]
) -> list[PromptTask]:
    """Returns each prompt that has an unfinished conversation, once."""
    by_prompt: dict[int, list[str]] = {}
    for key, (prompt, _) in keys.items():
        by_prompt.setdefault(id(prompt), []).append(key)
    return [
        PromptTask(keys[own[0]][0], frozenset(finished & {*own}), {key: begun[key] for key in own if key in begun})
        for own in by_prompt.values()
        if not finished.issuperset(own)
    ]


@dataclass
class _AnswerWriter:
    """Writes answers to disk as they arrive, and counts them."""

    shards: AnswerShards
    done: Regenerated
    buffer: ShardBuffer
    advance: Advance = lambda text, share=None: None
    _seen: set[str] = field(default_factory=set)

    def add(self, batch: list[Answer], counts: Regenerated, left_out: set[str]) -> None:
        """Adds a batch's answers to those of the run, and the worker's `counts` to the run's counts. Advances the
        progress bar, also for the conversations `left_out` (keys), which have no answer. Ignores a conversation that
        has already arrived."""
        for key, group in groupby(batch, key=lambda answer: answer.key):
            answers = list(group)
            if key in self._seen:
                continue
            self._seen.add(key)
            for answer in answers:
                self.shards.note(answer, is_over=answer is answers[-1])
            self.buffer.add(answers)
            self.done.num_answers += len(answers)
            self.done.num_tokens += sum(len(answer.answer_ids) for answer in answers)
            self.advance("answering")
        for key in left_out - self._seen:
            self._seen.add(key)
            self.advance("answering")
        self.done.num_too_long += counts.num_too_long
        self.done.num_tokens_too_long = max(self.done.num_tokens_too_long, counts.num_tokens_too_long)
        self.done.num_cut_short += counts.num_cut_short
        self.done.refused.update(counts.refused)
        self.buffer.write_if_due()
