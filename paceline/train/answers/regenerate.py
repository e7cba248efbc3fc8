"""Regenerate: the target answers prompts, given or its own, batched, through the real engine, into a run folder.

A drafter learns what its target would say, so the answers in a data set do not matter, only its prompts do. Follow-up
turns of a conversation are asked after the target's own earlier answers. Every finished conversation is remembered by
its key: a run that was killed goes on with those that are missing.

    runs/x/config.json      what was asked: a second run must ask the same
    runs/x/answers/         Parquet shards of every process
    runs/x/self-written-r0.jsonl

Under torchrun each process takes its share of the prompts, writes shards of its own and reports its own figures.

    paceline regenerate --target smollm2-135m --prompts questions.jsonl --out runs/x
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from paceline.config import EngineConfig
from paceline.data.answers import Answer, AnswerShards, Kept
from paceline.data.prompts import Prompt, read_prompts
from paceline.data.rows import Dropped, RowError
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ContextLengthError, PromptError
from paceline.report.tables import Progress, ignore
from paceline.runs.folder import RunFolder, plain
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks
from paceline.train.answers.conversation import Conversation, Regenerated, asked_of
from paceline.train.answers.mixture import read_mixture
from paceline.train.answers.prompt_tokens import PromptEncoder, TokenizerOnly, check_template
from paceline.train.answers.remote_target import Lost, RemoteLLM, Talk, stand_in
from paceline.train.answers.run_identity import check_same_run, extend, identity
from paceline.train.answers.self_written import MAX_TOKENS as MAX_PROMPT_WRITTEN
from paceline.train.answers.self_written import PromptWriter, SelfWritten, read_openers
from paceline.train.config import AnswerConfig, RegenerateConfig
from paceline.train.documents.dataset import check_answers
from paceline.types import SamplingParams, Sequence

CONVERSATIONS_PER_SHARD = 128
IN_FLIGHT_PER_ROW = 2
"""Requests handed to the engine per cache row, so that a row that frees is taken at once."""
WRITE_EVERY_S = 60.0
"""A shard may hold fewer conversations than that: what a slow target said in a minute is too good to lose."""


def run(config: RegenerateConfig, progress: Progress) -> Regenerated:
    """As `paceline.train.regenerate`."""
    with prepared(config, progress) as job:
        shards = AnswerShards(config.out / "answers", job.ranks.rank)
        done = Regenerator(job.llm, shards, config.answering).run(job.prompts, job.bars)
        job.conclude(config, done, progress)
    return done


@dataclass(frozen=True, slots=True)
class Prepared:
    """What answering begins with."""

    llm: LLM
    prompts: list[Prompt]
    """This process's share, those that the target wrote included."""
    written: SelfWritten
    folder: RunFolder
    ranks: Ranks
    bars: Progress
    dropped: Dropped
    """Rows of the prompts that were left out."""

    def conclude(self, config: RegenerateConfig, done: Regenerated, progress: Progress) -> None:
        """Into the run's log, and in words. Raises PromptError where no prompt could be asked."""
        dropped = {"dropped": self.written.dropped, "rows_dropped": self.dropped.counts}
        self.folder.log(stage="regenerate", rank=self.ranks.rank, **dropped, **asdict(done))
        _report(config, done, self.written, self.ranks, progress)


@contextlib.contextmanager
def prepared(
    config: RegenerateConfig,
    progress: Progress,
    what: str = "regenerate",
    more: Mapping[str, Any] | None = None,
    fill: Callable[[str, int], str] = lambda opener, seed: opener,
) -> Iterator[Prepared]:
    """The target and the prompts; within, no other run may work in the folder.

    `what` is the run's kind, `more` what it is asked beside `config`, `fill` as of PromptWriter. Raises what
    `paceline.train.regenerate` does.
    """
    ranks = Ranks.here()
    engine = engine_for(config, ranks)
    settings = identity(config, engine, ranks) | plain(dict(more or {}))
    is_extended = check_same_run(config.out, what, settings)
    openers = _openers(config, progress)
    given = read_mixture(config.asked, config.answering.seed, progress.say if ranks.is_first else ignore)
    with only_run(config.out, "answering", ranks, progress.say):
        folder = RunFolder(config.out)
        if ranks.is_first and not (config.out / "config.json").is_file():
            folder = RunFolder.create(what, {what: settings, "llm": engine}, config.out)
        elif ranks.is_first and is_extended:
            extend(folder, what, settings)
            progress.say("the run is extended: what it had stays, what is new is asked")
        remote = stand_in(config)
        llm = cast(LLM, remote) if remote else _load(engine)
        check_answers(given.traced, llm.tokenizer.decode)
        check_template(llm.tokenizer, given.prompts, config.answering)
        if config.asked.strict:
            encoder = PromptEncoder(TokenizerOnly(llm.tokenizer), config.answering)
            for prompt in given.prompts:
                encoder.first_ids(prompt)
        if ranks.is_first and remote:
            progress.say(remote.introduction)
        elif ranks.is_first:
            progress.loaded(llm)
        bars = progress if ranks.is_first else Progress()
        written, own = _write_own(llm, config, ranks, openers, fill, bars)
        prompts = _share(given.prompts, own, config.answering.seed, Ranks() if config.elsewhere.ray else ranks)
        try:
            yield Prepared(llm, prompts, written, folder, ranks, bars, given.dropped)
        finally:
            if remote:
                remote.close()


def engine_for(config: RegenerateConfig, ranks: Ranks) -> EngineConfig:
    """The target without a drafter, with room for the longest prompt and answer."""
    target, answering = config.target, config.answering
    longest = max(answering.max_tokens, MAX_PROMPT_WRITTEN) if config.asked.num_self_written else answering.max_tokens
    max_len = -(-(answering.max_prompt_tokens + longest) // 16) * 16
    engine = replace(target, drafter="none", max_batch=config.max_batch, max_len=max_len)
    if ranks.world == 1:
        return engine
    if target.device in ("auto", "cuda") and torch.cuda.is_available():
        engine = replace(engine, device=f"cuda:{ranks.local % torch.cuda.device_count()}")  # one each, as far as they go
    return replace(engine, threads=target.threads or 1)


def _openers(config: RegenerateConfig, progress: Progress) -> tuple[str, ...]:
    """Beginnings of prompts for the target to continue; it begins one of four itself."""
    if config.asked.openers is None:
        return ("",)
    if not config.asked.num_self_written:
        progress.say("note: openers have no effect without self-written prompts")
    openers = read_openers(config.asked.openers)
    return ("",) * max(1, len(openers) // 3) + openers


def _load(engine: EngineConfig) -> LLM:
    try:
        return LLM.of(engine)
    except ContextLengthError as error:
        raise ConfigError(f"{error}: the longest prompt and answer must fit, lower max_prompt_tokens or max_tokens") from error


def _write_own(
    llm: LLM,
    config: RegenerateConfig,
    ranks: Ranks,
    openers: tuple[str, ...],
    fill: Callable[[str, int], str],
    bars: Progress,
) -> tuple[SelfWritten, list[Prompt]]:
    """This process's share of the prompts that the target writes."""
    number = len(range(ranks.rank, config.asked.num_self_written, ranks.world))
    if not number:
        return SelfWritten(), []
    file = config.out / f"self-written-r{ranks.rank}.jsonl"
    seed = zlib.crc32(f"{config.answering.seed}/{ranks.rank}".encode()) << 24  # no two processes or seeds draw the same prompts
    opening, variables = config.answering.read_opening(), config.answering.template_variables()
    writer = PromptWriter(llm, file, openers=openers, seed=seed, opening=opening, variables=variables, fill=fill)
    with bars.bar("the target writes prompts", number) as advance:
        written = writer.write(number, on_prompt=lambda prompt: advance("the target writes prompts"))
    return written, read_prompts(file, number)


def _share(given: list[Prompt], own: list[Prompt], seed: int, ranks: Ranks) -> list[Prompt]:
    """This process's prompts, shuffled: a run that is interrupted has answered a fair mixture."""
    generator = random.Random(seed)
    unique = list({repr(prompt): prompt for prompt in given}.values())
    generator.shuffle(unique)
    mine = unique[ranks.rank :: ranks.world] + own
    generator.shuffle(mine)
    return mine


def _report(config: RegenerateConfig, done: Regenerated, written: SelfWritten, ranks: Ranks, progress: Progress) -> None:
    limit = config.answering.max_prompt_tokens
    left_out = f"longer than {limit} tokens, the longest {done.num_tokens_too_long}"
    if not done.num_answers and not done.num_found and (done.num_too_long or done.refused):
        refused = str(done.refused) if done.refused else ""
        if not done.num_too_long:
            raise PromptError(f"no prompt can be asked of this target: {refused}")
        more = f" ({refused})" if refused else ""
        raise PromptError(f"all {done.num_too_long} prompts are {left_out}{more}: raise max_prompt_tokens")
    dropped = ", ".join(f"{count} {reason}" for reason, count in written.dropped.most_common())
    notes = (
        (done.num_found, f"{done.num_found} conversations had been answered before"),
        (done.num_too_long, f"{done.num_too_long} prompts left out: {left_out}"),
        (done.refused, str(done.refused) if done.refused else ""),
        (done.num_cut_short, f"{done.num_cut_short} conversations ended early: an answer or the next prompt was too long"),
        (dropped, f"self-written prompts dropped: {dropped}"),
        (done.lost, f"answers left out: {', '.join(f'{number} {reason}' for reason, number in done.lost.items())}"),
    )
    own = f"process {ranks.rank}: " if ranks.world > 1 else ""
    speed = f"{done.wall_s:.0f} s: {done.tokens_per_s:.0f} tokens/s"
    progress.say(f"{own}{done.num_answers} answers, {done.num_tokens} tokens in {speed}; {done.answers}")
    for is_so, note in notes:
        if is_so:
            progress.say(own + note)


class Regenerator:
    """Answers prompts into shards; `run` may be called again after a crash, with the same prompts and config."""

    def __init__(self, llm: LLM | RemoteLLM, shards: Kept, config: AnswerConfig) -> None:
        self.llm, self.shards, self.config = llm, shards, config
        self._encoder = PromptEncoder(llm, config, getattr(llm.target, "vocab_size", None))
        self.done = Regenerated(shards.folder)
        self._flying: dict[int, Conversation] = {}
        self._finished: list[Answer] = []
        self._num_unwritten = 0
        self._written_s = time.monotonic()
        self._started_at, self._advance = 0.0, ignore

    def run(self, prompts: list[Prompt], bars: Progress | None = None) -> Regenerated:
        """Answer these prompts, repeated ones once; `bars` shows one bar of all conversations.

        A prompt that the chat template refuses is left out, and counted.

        Raises CacheError when a shard cannot be written, PromptError when a shard is damaged, and what made the model
        fail at a conversation, which the next run asks again; finished ones are kept."""
        self.done, self._started_at = Regenerated(self.shards.folder), time.perf_counter()
        asked = asked_of(prompts, self.config)
        waiting = self._missing(asked)
        in_flight = self.llm.target.cache.num_rows * IN_FLIGHT_PER_ROW
        with (bars or Progress()).bar("answering", len(asked)) as self._advance:
            try:
                for conversation in itertools.islice(waiting, in_flight):
                    self._ask(conversation)
                while self._flying:
                    with self.llm.engine.whole_chunks():
                        chunks = self.llm.engine.step()
                    for chunk in chunks:
                        if isinstance(chunk.sequence.error, Lost):
                            self._lose(chunk.sequence, waiting)
                        elif chunk.sequence.error:
                            raise chunk.sequence.error
                        elif chunk.finish_reason is not None:
                            self._finish(chunk.sequence, waiting)
            finally:
                try:
                    self._write()
                finally:
                    for request_id in self._flying:
                        self.llm.engine.abort(request_id)
                    self._flying.clear()
        self.done.wall_s = time.perf_counter() - self._started_at
        self.done.tokens_per_s = self.done.num_tokens / self.done.wall_s
        return self.done

    def _missing(self, asked: dict[str, tuple[Prompt, float]]) -> Iterator[Conversation]:
        begun = self.shards.recover()
        found = self.shards.keys() | {answer.key for answer in self._finished}
        for key, (prompt, temperature) in asked.items():
            seed = self.config.seed ^ zlib.crc32(key.encode())
            grammar = prompt.grammar or self.config.grammar
            more = {"max_tokens": self.config.max_tokens, "logprobs": self.config.top_k or None}
            params = SamplingParams(temperature=temperature, seed=seed, grammar=grammar, **more)
            conversation = Conversation(prompt, key, params, [*self._encoder.messages_of(prompt)])
            for answer in begun.get(key, ()):
                conversation.go_on(answer)
            if key in found:
                self.done.num_found += 1
            elif self._fits(conversation):
                yield conversation
                continue
            elif conversation.prompt_ids:
                self.done.num_too_long += 1
                self.done.num_tokens_too_long = max(self.done.num_tokens_too_long, len(conversation.prompt_ids))
            self._tell_one_more()

    def first_ids(self, prompt: Prompt) -> list[int]:
        """What the target is given first of a prompt. Raises RowError."""
        return self._encoder.first_ids(prompt)

    def _tell_one_more(self) -> None:
        pace = self.done.num_tokens / (time.perf_counter() - self._started_at)
        self._advance(f"answering, {pace:.0f} tokens/s")

    def _fits(self, conversation: Conversation) -> bool:
        """Encode the conversation so far; whether it leaves room for an answer. A refused one has no `prompt_ids`."""
        conversation.prompt_ids = []
        try:
            conversation.prompt_ids = self._encoder.encode(conversation.prompt, conversation.messages)
        except RowError as error:
            self.done.refused.add(error.reason, str(error))
            return False
        return len(conversation.prompt_ids) <= self.config.max_prompt_tokens

    def _ask(self, conversation: Conversation) -> None:
        prompt_ids, params = conversation.prompt_ids, conversation.params
        if isinstance(self.llm, RemoteLLM):
            variables = self._encoder.variables | dict(conversation.prompt.variables)
            talk = Talk(conversation.messages, list(conversation.prompt.tools or self._encoder.tools), variables)
            is_ids = conversation.prompt.token_ids or self.config.raw
            request_id = self.llm.engine.add(prompt_ids, params, talk=None if is_ids else talk)
        else:
            request_id = self.llm.engine.add(prompt_ids, params)
        self._flying[request_id] = conversation

    def _lose(self, seq: Sequence, waiting: Iterator[Conversation]) -> None:
        """An answer is left out; those before it in its conversation stay."""
        conversation, reason = self._flying.pop(seq.request_id), str(seq.error)
        self.done.lost[reason] = self.done.lost.get(reason, 0) + 1
        if conversation.answers:
            self.done.num_cut_short += 1
            self._finish_one(conversation)
            self.shards.note(conversation.answers[-1], is_over=True)
        else:
            self._tell_one_more()
        self._go_on(waiting)

    def _finish(self, seq: Sequence, waiting: Iterator[Conversation]) -> None:
        conversation = self._flying.pop(seq.request_id)
        answer = self._answer_of(conversation, seq)
        has_more = conversation.go_on(answer)
        # only after an answer that came to its end: what would a user say to half a sentence?
        if has_more and seq.finish_reason == "stop" and self._fits(conversation):
            self.shards.note(answer, is_over=False)
            self._ask(conversation)
            return
        self.done.num_cut_short += has_more
        self._finish_one(conversation)
        self.shards.note(answer, is_over=True)
        self._go_on(waiting)

    def _finish_one(self, conversation: Conversation) -> None:
        self._finished += conversation.answers
        self._num_unwritten += 1
        self.done.num_answers += len(conversation.answers)
        self.done.num_tokens += sum(len(answer.answer_ids) for answer in conversation.answers)
        self._tell_one_more()

    def _go_on(self, waiting: Iterator[Conversation]) -> None:
        """Write what is due, and ask the next one."""
        if self._num_unwritten >= CONVERSATIONS_PER_SHARD or time.monotonic() - self._written_s > WRITE_EVERY_S:
            self._write()
        if following := next(waiting, None):
            self._ask(following)

    def _answer_of(self, conversation: Conversation, seq: Sequence) -> Answer:
        output = seq.output_ids
        spoken = output[:-1] if seq.finish_reason == "stop" else output
        top = [each.top for each in seq.logprobs] if self.config.top_k else None
        return Answer(
            key=conversation.key,
            source=conversation.prompt.source,
            turn=len(conversation.answers),
            temperature=conversation.params.temperature,
            prompt_ids=seq.tokens[: seq.prompt_len],
            answer_ids=output,
            finish_reason=str(seq.finish_reason),
            text=self.llm.tokenizer.decode(spoken),
            top_ids=None if top is None else [[token for token, _ in each] for each in top],
            top_logprobs=None if top is None else [[chance for _, chance in each] for each in top],
        )

    def _write(self) -> None:
        if self._finished:
            self.shards.write(self._finished)
        self._finished, self._num_unwritten, self._written_s = [], 0, time.monotonic()
