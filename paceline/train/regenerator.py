"""Regenerate: the target answers the prompts itself, batched, through the real engine.

A drafter learns what its target would say, so the answers in a data set do not matter, only its prompts do. Follow-up turns of
a conversation are asked after the target's own earlier answers. Every finished conversation is remembered by its key: a run
that was killed goes on with those that are missing.

    paceline regenerate --target smollm2-135m --prompts questions.jsonl --out runs/x
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, PromptError
from paceline.prompts import Prompt
from paceline.train.answers import Answer, AnswerShards
from paceline.train.config import AnswerConfig
from paceline.types import SamplingParams, Sequence

if TYPE_CHECKING:
    from paceline.engine.llm import LLM

CONVERSATIONS_PER_SHARD = 128
IN_FLIGHT_PER_ROW = 2
"""Requests handed to the engine per cache row, so that a row that frees is taken at once."""
WRITE_EVERY_S = 60.0
"""A shard may hold fewer conversations than that: what a slow target said in a minute is too good to lose."""


@dataclass(slots=True)
class _Conversation:
    """One prompt on its way through the engine at one temperature."""

    prompt: Prompt
    key: str
    params: SamplingParams
    messages: list[dict[str, str]]
    prompt_ids: list[int] = field(default_factory=list)
    """Token ids of `messages`, ready for the next answer."""
    answers: list[Answer] = field(default_factory=list)


@dataclass(slots=True)
class Regenerated:
    """What one process did."""

    answers: Path
    """Folder of the answers, those of all processes."""
    num_answers: int = 0
    num_tokens: int = 0
    """Tokens the target wrote."""
    wall_s: float = 0.0
    tokens_per_s: float = 0.0
    num_found: int = 0
    """Conversations that an earlier run had finished."""
    num_too_long: int = 0
    num_tokens_too_long: int = 0
    """Length of the longest prompt left out."""
    num_cut_short: int = 0
    """Conversations whose later turns were not asked: an answer had not come to its end, or the next prompt was too long."""


class Regenerator:
    """Answers prompts into shards; `run` may be called again after a crash, with the same prompts and config.

    Raises ConfigError when the engine's cache is too small for the longest prompt and answer.
    """

    def __init__(self, llm: LLM, shards: AnswerShards, config: AnswerConfig) -> None:
        needed, max_len = config.max_prompt_tokens + config.max_tokens, llm.target.cache.max_len
        if needed > max_len:
            raise ConfigError(
                f"max_prompt_tokens and max_tokens need {needed} tokens of cache, a row holds {max_len}: raise max_len "
                "or lower them"
            )
        self.llm, self.shards, self.config = llm, shards, config
        self.done = Regenerated(shards.folder)
        self._flying: dict[int, _Conversation] = {}
        self._finished: list[Answer] = []
        self._num_unwritten = 0
        self._written_s = time.monotonic()

    def run(self, prompts: list[Prompt], on_answer: Callable[[Answer | None], None] = lambda answer: None) -> Regenerated:
        """Answer these prompts; `on_answer` hears of every answer, and None for a conversation that needs no work.

        Raises CacheError when a shard cannot be written, PromptError when the chat template refuses a prompt or a shard is
        damaged; what earlier shards hold stays.
        """
        self.done, started_at = Regenerated(self.shards.folder), time.perf_counter()
        waiting = self._missing(prompts, on_answer)
        in_flight = self.llm.target.cache.num_rows * IN_FLIGHT_PER_ROW
        try:
            for conversation in itertools.islice(waiting, in_flight):
                self._ask(conversation)
            while self._flying:
                for chunk in self.llm.engine.step():
                    if chunk.finish_reason is not None:
                        self._finish(chunk.sequence, waiting, on_answer)
        finally:
            try:
                self._write()
            finally:
                for request_id in self._flying:
                    self.llm.engine.abort(request_id)
                self._flying.clear()
        self.done.wall_s = time.perf_counter() - started_at
        self.done.tokens_per_s = self.done.num_tokens / self.done.wall_s
        return self.done

    def num_conversations(self, prompts: list[Prompt]) -> int:
        """How many conversations `run` will report to `on_answer`: each by None, or by an answer whose turn is 0."""
        return len(self._unique(prompts))

    def _unique(self, prompts: list[Prompt]) -> dict[str, tuple[Prompt, float]]:
        """Key -> what to ask, repeated prompts once."""
        return {_key(*pair): pair for pair in itertools.product(prompts, self.config.temperatures)}

    def _missing(self, prompts: list[Prompt], on_answer: Callable[[Answer | None], None]) -> Iterator[_Conversation]:
        found = self.shards.keys() | {answer.key for answer in self._finished}
        for key, (prompt, temperature) in self._unique(prompts).items():
            if key in found:
                self.done.num_found += 1
            elif self._fits(conversation := self._open(prompt, key, temperature)):
                yield conversation
                continue
            else:
                self.done.num_too_long += 1
                self.done.num_tokens_too_long = max(self.done.num_tokens_too_long, len(conversation.prompt_ids))
            on_answer(None)

    def _open(self, prompt: Prompt, key: str, temperature: float) -> _Conversation:
        seed = self.config.seed ^ zlib.crc32(key.encode())
        params = SamplingParams(temperature=temperature, max_tokens=self.config.max_tokens, seed=seed)
        return _Conversation(prompt, key, params, list(prompt.messages))

    def _fits(self, conversation: _Conversation) -> bool:
        """Encode the conversation so far; whether it leaves room for an answer."""
        try:
            given = conversation.prompt.token_ids
            conversation.prompt_ids = list(given) if given else self.llm.encode_chat(conversation.messages)
        except PromptError as error:
            raise PromptError(f"{conversation.prompt.source}, prompt {conversation.prompt.id}: {error}") from error
        return len(conversation.prompt_ids) <= self.config.max_prompt_tokens

    def _ask(self, conversation: _Conversation) -> None:
        self._flying[self.llm.engine.add(conversation.prompt_ids, conversation.params)] = conversation

    def _finish(self, seq: Sequence, waiting: Iterator[_Conversation], on_answer: Callable[[Answer | None], None]) -> None:
        conversation = self._flying.pop(seq.request_id)
        answer = self._answer_of(conversation, seq)
        conversation.answers.append(answer)
        on_answer(answer)
        if len(conversation.answers) < len(conversation.prompt.turns):
            # only after an answer that came to its end: what would a user say to half a sentence?
            if seq.finish_reason == "stop" and self._next_turn_fits(conversation):
                self._ask(conversation)
                return
            self.done.num_cut_short += 1
        self._close(conversation)
        if following := next(waiting, None):
            self._ask(following)

    def _answer_of(self, conversation: _Conversation, seq: Sequence) -> Answer:
        output = seq.output_ids
        spoken = output[:-1] if seq.finish_reason == "stop" else output
        return Answer(
            key=conversation.key,
            source=conversation.prompt.source,
            turn=len(conversation.answers),
            temperature=conversation.params.temperature,
            prompt_ids=seq.tokens[: seq.prompt_len],
            answer_ids=output,
            finish_reason=str(seq.finish_reason),
            text=self.llm.tokenizer.decode(spoken),
        )

    def _next_turn_fits(self, conversation: _Conversation) -> bool:
        said, turn = conversation.answers[-1].text, conversation.prompt.turns[len(conversation.answers)]
        conversation.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": turn}]
        return self._fits(conversation)

    def _close(self, conversation: _Conversation) -> None:
        self._finished += conversation.answers
        self._num_unwritten += 1
        self.done.num_answers += len(conversation.answers)
        self.done.num_tokens += sum(len(answer.answer_ids) for answer in conversation.answers)
        if self._num_unwritten >= CONVERSATIONS_PER_SHARD or time.monotonic() - self._written_s > WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        if self._finished:
            self.shards.write(self._finished)
        self._finished, self._num_unwritten, self._written_s = [], 0, time.monotonic()


def _key(prompt: Prompt, temperature: float) -> str:
    """The text counts too: two prompts may carry one id, and a file may change between runs."""
    before = prompt.messages[:-1]
    text = repr((before, prompt.turns) if before else prompt.token_ids or prompt.turns)
    return f"{prompt.source}/{prompt.id}#{zlib.crc32(text.encode()):08x}@{temperature:g}"
