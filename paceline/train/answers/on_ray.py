"""`regenerate`, here or on the workers of a Ray cluster (`--ray ADDRESS`): the same answers by the same keys in the same form.

Each worker holds the target and answers batches of prompts as `Regenerator` does; a conversation's seed comes from its key, so
it does not matter who answers it, nor when. This process alone writes: every conversation that arrives is in its journal at
once, then in a shard. A worker that dies loses its batch, which another one answers again; if this process dies, the next
run asks what is missing. Under torchrun the first process has the cluster, and the others wait for its answers.
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
from paceline.train.answers.conversation import Regenerated, asked_of
from paceline.train.answers.regenerate import CONVERSATIONS_PER_SHARD, WRITE_EVERY_S, Regenerator, engine_for, prepared
from paceline.train.config import AnswerConfig, RegenerateConfig
from paceline.train.processes.ray_cluster import Work, connected, shared_out

BATCHES_OF_ROWS = 4
"""Conversations of a batch, for each row of a worker's cache: at its end rows wait for the longest answer."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt on its way to a worker."""

    prompt: Prompt
    found: frozenset[str]
    """Keys of its conversations that are answered already."""
    begun: dict[str, list[Answer]]
    """Answers so far of those that an earlier run had begun."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a worker made of a batch."""

    answers: list[Answer]
    """Those of a conversation one behind the other."""
    done: Regenerated


@dataclass(frozen=True, slots=True)
class Answering:
    """The job of a worker: the target answers batches of prompts."""

    engine: EngineConfig
    answering: AnswerConfig

    def begin(self, num_threads: int | None) -> Work:
        """As Job."""
        llm = LLM.of(replace(self.engine, threads=self.engine.threads or num_threads))
        return partial(_answered, llm, self.answering)


@dataclass
class _InMemory:
    """In the place of shards: what is known of a batch, and what becomes of it."""

    found: set[str]
    begun: dict[str, list[Answer]]
    folder: Path = Path()
    written: list[Answer] = field(default_factory=list)

    def recover(self) -> dict[str, list[Answer]]:
        return self.begun

    def keys(self) -> set[str]:
        return self.found

    def note(self, answer: Answer, is_over: bool) -> None:
        """Who asked keeps them."""

    def write(self, answers: list[Answer]) -> None:
        self.written += answers


def _answered(llm: LLM, answering: AnswerConfig, batch: list[Asked]) -> list[Answers]:
    found = {key for each in batch for key in each.found}
    shards = _InMemory(found, {key: answers for each in batch for key, answers in each.begun.items()})
    done = Regenerator(llm, shards, answering).run([each.prompt for each in batch])
    return [Answers(shards.written, done)]


def run(config: RegenerateConfig, progress: Progress) -> Regenerated:
    """As `paceline.train.regenerate`."""
    if config.elsewhere.ray is None:
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
    """Have the cluster answer what is missing."""
    began, where = time.monotonic(), config.elsewhere
    keys = asked_of(prompts, config.answering)
    begun, found = shards.recover(), shards.keys()
    kept = _Keeping(shards, Regenerated(shards.folder, num_found=len(found & keys.keys())))
    asked = _missing(keys, found, begun)
    device = config.target.device  # of a worker: this machine may have no GPU
    engine = replace(settle(engine_for(config, Ranks())), device=device)
    samples = max(1, len(keys) // max(1, len(prompts)))
    with progress.bar("answering", len(keys)) as kept.advance:
        for _ in range(kept.done.num_found):
            kept.tell()
        try:
            with connected(where) as ray:
                job, at_most = Answering(engine, config.answering), max(1, BATCHES_OF_ROWS * config.max_batch // samples)
                for each in shared_out(ray, where, job, asked, at_most):
                    kept.add(each)
        finally:
            kept.write()
    kept.done.wall_s = time.monotonic() - began
    kept.done.tokens_per_s = kept.done.num_tokens / kept.done.wall_s
    return kept.done


def _missing(keys: dict[str, tuple[Prompt, float]], found: set[str], begun: dict[str, list[Answer]]) -> list[Asked]:
    """The prompts of which some conversation is missing, each once."""
    by_prompt: dict[int, list[str]] = {}
    for key, (prompt, _) in keys.items():
        by_prompt.setdefault(id(prompt), []).append(key)
    return [
        Asked(keys[own[0]][0], frozenset(found & {*own}), {key: begun[key] for key in own if key in begun})
        for own in by_prompt.values()
        if not found.issuperset(own)
    ]


@dataclass
class _Keeping:
    """Answers that arrive, on their way to disk."""

    shards: AnswerShards
    done: Regenerated
    advance: Advance = lambda text, share=None: None
    _waiting: list[Answer] = field(default_factory=list)
    _num_waiting: int = 0
    _written_s: float = field(default_factory=time.monotonic)
    _seen: set[str] = field(default_factory=set)

    def add(self, found: Answers) -> None:
        """A conversation that has come already is not taken twice."""
        for key, group in groupby(found.answers, key=lambda answer: answer.key):
            answers = list(group)
            if key in self._seen:
                continue
            self._seen.add(key)
            for answer in answers:
                self.shards.note(answer, is_over=answer is answers[-1])
            self._waiting += answers
            self._num_waiting += 1
            self.done.num_answers += len(answers)
            self.done.num_tokens += sum(len(answer.answer_ids) for answer in answers)
            self.tell()
        theirs, ours = found.done, self.done
        ours.num_too_long += theirs.num_too_long
        ours.num_tokens_too_long = max(ours.num_tokens_too_long, theirs.num_tokens_too_long)
        ours.num_cut_short += theirs.num_cut_short
        ours.refused.update(theirs.refused)
        if self._num_waiting >= CONVERSATIONS_PER_SHARD or time.monotonic() - self._written_s > WRITE_EVERY_S:
            self.write()

    def tell(self) -> None:
        self.advance("answering")

    def write(self) -> None:
        if self._waiting:
            self.shards.write(self._waiting)
        self._waiting, self._num_waiting, self._written_s = [], 0, time.monotonic()
