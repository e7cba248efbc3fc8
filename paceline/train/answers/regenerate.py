"""Generates the target's answers to prompts in batches, through the real engine, into a run folder.

A drafter learns what its target would generate, so only the prompts of a data set are used, not its answers. Follow-up
messages of a conversation are sent after the target's own earlier answers. Finished conversations are recorded by key,
so an interrupted run resumes with the missing ones.

    runs/x/config.json      the settings: a second run must have the same
    runs/x/answers/         Parquet shards of every process
    runs/x/self-written-r0.jsonl

Under torchrun each process answers its share of the prompts, writes its own shards and reports its own figures.

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

from paceline.bounds import MAX_CONTEXT
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
from paceline.train.answers.conversation import Conversation, Regenerated, ShardBuffer, conversations_of
from paceline.train.answers.mixture import read_mixture
from paceline.train.answers.prompt_tokens import PromptEncoder, TokenizerOnly, check_template
from paceline.train.answers.remote_target import ChatRequest, LostAnswer, RemoteLLM, remote_target_of
from paceline.train.answers.run_identity import check_same_run, extend, identity
from paceline.train.answers.self_written import MAX_TOKENS as MAX_PROMPT_WRITTEN
from paceline.train.answers.self_written import PromptWriter, SelfWritten, read_openers
from paceline.train.config import AnswerConfig, RegenerateConfig
from paceline.train.documents.dataset import check_answers
from paceline.types import SamplingParams, Sequence

IN_FLIGHT_PER_ROW = 2
"""Requests submitted to the engine per cache row (place for one sequence), so that a free row is reused immediately."""


def run(config: RegenerateConfig, progress: Progress) -> Regenerated:
    """Generates the target's answers without Ray, on this machine or by the configured server.
    `paceline.train.regenerate` is the public function."""
    with prepared(config, progress) as job:
        shards = AnswerShards(config.out / "answers", job.ranks.rank)
        done = Regenerator(job.llm, shards, config.answering).run(job.prompts, job.bars)
        job.conclude(config, done, progress)
    return done


@dataclass(frozen=True, slots=True)
class Prepared:
    """The loaded target, the prompts and the run folder, as `prepared` yields them."""

    llm: LLM
    prompts: list[Prompt]
    """This process's share of the prompts, including those that the target wrote."""
    written: SelfWritten
    """Prompts that the target wrote for this process."""
    folder: RunFolder
    ranks: Ranks
    bars: Progress
    """Receiver of progress reports; shows them only in the first process."""
    dropped: Dropped
    """Rows of the prompt sources that were left out."""

    def conclude(self, config: RegenerateConfig, done: Regenerated, progress: Progress) -> None:
        """Ends the run: logs the counts `done` in the run folder, and prints them through `progress`. Raises
        PromptError if no prompt could be used."""
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
    """Context manager: loads the target and the prompts of a run, and yields them. Inside it, no other run may use the
    folder `config.out`.
    - `what`: the run's type, stored in its config.json.
    - `more`: settings that a resumed run must repeat, in addition to those of `config`.
    - `fill`: used only for prompts that the target itself writes. Such a prompt begins with an opener, a text from the
      configuration. `fill(opener, seed)`, given by the caller, returns the text to use in its place; the seed differs
      for every prompt.

    Raises ConfigError if the folder holds a run with other settings, PromptError for unusable prompts, CacheError for
    disk errors, and another PacelineError if the target cannot be loaded."""
    ranks = Ranks.here()
    engine = engine_for(config, ranks)
    settings = identity(config, engine, ranks) | plain(dict(more or {}))
    is_extended = check_same_run(config.out, what, settings)
    openers = _openers(config)
    mixture = read_mixture(config.prompting, config.answering.seed, progress.say if ranks.is_first else ignore)
    with only_run(config.out, "answering", ranks, progress.say):
        folder = RunFolder(config.out)
        if ranks.is_first and not (config.out / "config.json").is_file():
            folder = RunFolder.create(what, {what: settings, "llm": engine}, config.out)
        elif ranks.is_first and is_extended:
            extend(folder, what, settings)
            progress.say("the run is extended: what it had stays, what is new is asked")
        remote = remote_target_of(config)
        llm = cast(LLM, remote) if remote else _load(engine)
        check_answers(mixture.traced, llm.tokenizer.decode)
        check_template(llm.tokenizer, mixture.prompts, config.answering)
        if config.prompting.strict:
            encoder = PromptEncoder(TokenizerOnly(llm.tokenizer), config.answering)
            for prompt in mixture.prompts:
                encoder.first_ids(prompt)
        if ranks.is_first and remote:
            progress.say(remote.introduction)
        elif ranks.is_first:
            progress.loaded(llm)
        bars = progress if ranks.is_first else Progress()
        written, own = _write_own(llm, config, ranks, openers, fill, bars)
        prompts = _share(mixture.prompts, own, config.answering.seed, Ranks() if config.remote.ray else ranks)
        try:
            yield Prepared(llm, prompts, written, folder, ranks, bars, mixture.dropped)
        finally:
            if remote:
                remote.close()


def engine_for(config: RegenerateConfig, ranks: Ranks) -> EngineConfig:
    """Returns the target's engine settings for generating answers: without a drafter, and with a cache that has room
    for the longest allowed prompt and answer. If `ranks` has several processes, each uses the GPU of its local rank,
    and one CPU thread unless `config.target.threads` is set. Raises ConfigError for lengths above `MAX_CONTEXT`."""
    target, answering = config.target, config.answering
    longest = max(answering.max_tokens, MAX_PROMPT_WRITTEN if config.prompting.num_self_written else 0)
    max_len = -(-(answering.max_prompt_tokens + longest) // 16) * 16
    if max_len > MAX_CONTEXT:
        raise ConfigError(f"max_prompt_tokens and max_tokens need {max_len} tokens of context, more than {MAX_CONTEXT}")
    engine = replace(target, drafter="none", max_batch=config.max_batch, max_len=max_len)
    if ranks.world == 1:
        return engine
    if target.device in ("auto", "cuda") and torch.cuda.is_available():
        engine = replace(engine, device=f"cuda:{ranks.local % torch.cuda.device_count()}")
    return replace(engine, threads=target.threads or 1)


def _openers(config: RegenerateConfig) -> tuple[str, ...]:
    """Returns beginnings of self-written prompts; one in four is empty, so the target writes the whole prompt."""
    if config.prompting.openers is None:
        return ("",)
    texts = read_openers(config.prompting.openers)
    return ("",) * max(1, len(texts) // 3) + texts


def _load(engine: EngineConfig) -> LLM:
    try:
        return LLM.of(engine)
    except ContextLengthError as error:
        remedy = "the longest prompt and answer must fit, lower max_prompt_tokens or max_tokens"
        raise ConfigError(f"{error}: {remedy}") from error


def _write_own(
    llm: LLM,
    config: RegenerateConfig,
    ranks: Ranks,
    openers: tuple[str, ...],
    fill: Callable[[str, int], str],
    bars: Progress,
) -> tuple[SelfWritten, list[Prompt]]:
    """Has the target write this process's share of the self-written prompts."""
    number = len(range(ranks.rank, config.prompting.num_self_written, ranks.world))
    if not number:
        return SelfWritten(), []
    file = config.out / f"self-written-r{ranks.rank}.jsonl"
    seed = zlib.crc32(f"{config.answering.seed}/{ranks.rank}".encode()) << 24  # disjoint seeds for all processes
    opening, variables = config.answering.read_opening(), config.answering.template_variables()
    writer = PromptWriter(llm, file, openers=openers, seed=seed, opening=opening, variables=variables, fill=fill)
    with bars.bar("the target writes prompts", number) as advance:
        written = writer.write(number, on_prompt=lambda prompt: advance("the target writes prompts"))
    return written, read_prompts(file, number)


def _share(given: list[Prompt], own: list[Prompt], seed: int, ranks: Ranks) -> list[Prompt]:
    """Returns this process's prompts in random order, so that an interrupted run has answered a representative
    sample."""
    generator = random.Random(seed)
    unique = list({repr(prompt): prompt for prompt in given}.values())
    generator.shuffle(unique)
    mine = unique[ranks.rank :: ranks.world] + own
    generator.shuffle(mine)
    return mine


def _report(
    config: RegenerateConfig, done: Regenerated, written: SelfWritten, ranks: Ranks, progress: Progress
) -> None:
    limit = config.answering.max_prompt_tokens
    too_long = f"prompt longer than {limit} tokens, the longest {done.num_tokens_too_long}"
    refused = done.refused.summary("conversations") if done.refused else ""
    if not done.num_answers and not done.num_found and (done.num_too_long or refused):
        if not done.num_too_long:
            raise PromptError(f"no prompt can be asked of this target: {refused}")
        more = f" ({refused})" if refused else ""
        raise PromptError(
            f"no conversation can be answered, {done.num_too_long} have a {too_long}{more}: raise max_prompt_tokens"
        )
    dropped = ", ".join(f"{count} {reason}" for reason, count in written.dropped.most_common())
    lost = ", ".join(f"{number} {reason}" for reason, number in done.lost.items())
    cut_short = f"{done.num_cut_short} conversations ended early: an answer or the next prompt was too long"
    notes = (
        (done.num_found, f"{done.num_found} conversations had been answered before"),
        (done.num_too_long, f"{done.num_too_long} conversations left out: {too_long}"),
        (refused, refused),
        (done.num_cut_short, cut_short),
        (dropped, f"self-written prompts dropped: {dropped}"),
        (lost, f"answers left out: {lost}"),
    )
    own = f"process {ranks.rank}: " if ranks.world > 1 else ""
    speed = f"{done.wall_s:.0f} s: {done.tokens_per_s:.0f} tokens/s"
    progress.say(f"{own}{done.num_answers} answers, {done.num_tokens} tokens in {speed}; {done.answers}")
    for is_so, note in notes:
        if is_so:
            progress.say(own + note)


class Regenerator:
    """Generates the target's answers to prompts and writes them to shards (files of finished conversations). A second
    `run` with the same prompts and config generates only the missing conversations."""

    def __init__(self, llm: LLM | RemoteLLM, shards: Kept, config: AnswerConfig) -> None:
        self.llm, self.shards, self.config = llm, shards, config
        self.encoder = PromptEncoder(llm, config, getattr(llm.target, "vocab_size", None))
        self.done = Regenerated(shards.folder)
        self._in_flight: dict[int, Conversation] = {}
        self._finished = ShardBuffer(shards)
        self._started_at, self._advance = 0.0, ignore

    def run(self, prompts: list[Prompt], bars: Progress | None = None) -> Regenerated:
        """Answers the prompts and returns the counts. Duplicate prompts are answered once. `bars` shows the progress.
        Prompts that are too long, or that the chat template rejects, are left out and counted. Raises:
        - CacheError if a shard cannot be written, PromptError if an existing one is damaged;
        - the error of the engine or the server if an answer fails.
        After an error, finished conversations are retained, and the next run generates the others."""
        self.done, self._started_at = Regenerated(self.shards.folder), time.perf_counter()
        conversations = conversations_of(prompts, self.config)
        waiting = self._missing(conversations)
        in_flight = self.llm.target.cache.num_rows * IN_FLIGHT_PER_ROW
        with (bars or Progress()).bar("answering", len(conversations)) as self._advance:
            try:
                for conversation in itertools.islice(waiting, in_flight):
                    self._submit(conversation)
                while self._in_flight:
                    with self.llm.engine.whole_chunks():
                        chunks = self.llm.engine.step()
                    for chunk in chunks:
                        if isinstance(chunk.sequence.error, LostAnswer):
                            self._drop(chunk.sequence, waiting)
                        elif chunk.sequence.error:
                            raise chunk.sequence.error
                        elif chunk.finish_reason is not None:
                            self._finish(chunk.sequence, waiting)
            finally:
                try:
                    self._finished.write()
                finally:
                    for request_id in self._in_flight:
                        self.llm.engine.abort(request_id)
                    self._in_flight.clear()
        self.done.wall_s = time.perf_counter() - self._started_at
        self.done.tokens_per_s = self.done.num_tokens / self.done.wall_s
        return self.done

    def _missing(self, conversations: dict[str, tuple[Prompt, float]]) -> Iterator[Conversation]:
        begun = self.shards.recover()
        finished = self.shards.keys() | {answer.key for answer in self._finished.answers}
        for key, (prompt, temperature) in conversations.items():
            seed = self.config.seed ^ zlib.crc32(key.encode())
            grammar = prompt.grammar or self.config.grammar
            options = {"max_tokens": self.config.max_tokens, "logprobs": self.config.top_k or None}
            params = SamplingParams(temperature=temperature, seed=seed, grammar=grammar, **options)
            conversation = Conversation(prompt, key, params, [*self.encoder.messages_of(prompt)])
            for answer in begun.get(key, ()):
                conversation.add_answer(answer)
            if key in finished:
                self.done.num_found += 1
            elif self._fits(conversation):
                yield conversation
                continue
            elif conversation.prompt_ids:
                self.done.num_too_long += 1
                self.done.num_tokens_too_long = max(self.done.num_tokens_too_long, len(conversation.prompt_ids))
            self._advance_bar()

    def _advance_bar(self) -> None:
        pace = self.done.num_tokens / (time.perf_counter() - self._started_at)
        self._advance(f"answering, {pace:.0f} tokens/s")

    def _fits(self, conversation: Conversation) -> bool:
        """Encodes the conversation so far; returns False if it is too long, or refused (then `prompt_ids` is empty)."""
        conversation.prompt_ids = []
        try:
            conversation.prompt_ids = self.encoder.encode(conversation.prompt, conversation.messages)
        except RowError as error:
            self.done.refused.add(error.reason, str(error))
            return False
        return len(conversation.prompt_ids) <= self.config.max_prompt_tokens

    def _submit(self, conversation: Conversation) -> None:
        prompt_ids, params = conversation.prompt_ids, conversation.params
        if isinstance(self.llm, RemoteLLM):
            variables = self.encoder.variables | dict(conversation.prompt.variables)
            chat = ChatRequest(conversation.messages, list(conversation.prompt.tools or self.encoder.tools), variables)
            is_ids = conversation.prompt.token_ids or self.config.raw
            request_id = self.llm.engine.add(prompt_ids, params, chat=None if is_ids else chat)
        else:
            request_id = self.llm.engine.add(prompt_ids, params)
        self._in_flight[request_id] = conversation

    def _drop(self, seq: Sequence, waiting: Iterator[Conversation]) -> None:
        """Leaves out an answer; earlier answers of its conversation are retained."""
        conversation, reason = self._in_flight.pop(seq.request_id), str(seq.error)
        self.done.lost[reason] = self.done.lost.get(reason, 0) + 1
        if conversation.answers:
            self.done.num_cut_short += 1
            self._finish_one(conversation)
            self.shards.note(conversation.answers[-1], is_over=True)
        else:
            self._advance_bar()
        self._submit_next(waiting)

    def _finish(self, seq: Sequence, waiting: Iterator[Conversation]) -> None:
        conversation = self._in_flight.pop(seq.request_id)
        answer = self._answer_of(conversation, seq)
        has_more = conversation.add_answer(answer)
        # Only after a complete answer: the user's next message does not follow from half a sentence.
        if has_more and seq.finish_reason == "stop" and self._fits(conversation):
            self.shards.note(answer, is_over=False)
            self._submit(conversation)
            return
        self.done.num_cut_short += has_more
        self._finish_one(conversation)
        self.shards.note(answer, is_over=True)
        self._submit_next(waiting)

    def _finish_one(self, conversation: Conversation) -> None:
        self._finished.add(conversation.answers)
        self.done.num_answers += len(conversation.answers)
        self.done.num_tokens += sum(len(answer.answer_ids) for answer in conversation.answers)
        self._advance_bar()

    def _submit_next(self, waiting: Iterator[Conversation]) -> None:
        """Writes a shard if it is due, and submits the next conversation."""
        self._finished.write_if_due()
        if following := next(waiting, None):
            self._submit(following)

    def _answer_of(self, conversation: Conversation, seq: Sequence) -> Answer:
        output = seq.output_ids
        spoken = output[:-1] if seq.finish_reason == "stop" else output
        top = [candidates.top for candidates in seq.logprobs] if self.config.top_k else None
        return Answer(
            key=conversation.key,
            source=conversation.prompt.source,
            turn=len(conversation.answers),
            temperature=conversation.params.temperature,
            prompt_ids=seq.tokens[: seq.prompt_len],
            answer_ids=output,
            finish_reason=str(seq.finish_reason),
            text=self.llm.tokenizer.decode(spoken),
            top_ids=None if top is None else [[token for token, _ in candidates] for candidates in top],
            top_logprobs=None if top is None else [[chance for _, chance in candidates] for candidates in top],
        )
