"""The target answers elsewhere: an OpenAI-compatible server in the place of an engine, for `regenerate --answers-from URL`.

`RemoteLLM` is what a Regenerator and a PromptWriter need of an LLM: a tokenizer, and an engine whose requests are HTTP
requests, many at once. The prompt is rendered here, by the target's own template, and sent as token ids; to a server that takes
none, as their text, or else as messages. What a drafter learns from are tokens: an answer counts when its tokens are known.

- the server tells them (`return_token_ids`, vLLM), and they decode to its text;
- or its text, encoded by the target's tokenizer, decodes to itself and has as many tokens as the server has counted.

Any other is left out, and counted by reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.data.prompts import Message
from paceline.engine.engine import Chunk
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, PacelineError
from paceline.model.embedding_and_head import light_folder
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.retrying import KEY, Client, Refused
from paceline.train.config import RegenerateConfig
from paceline.types import SamplingParams, Sequence

EXTRAS = {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
"""vLLM's; servers that do not know them leave them out of account, or refuse them and are asked without."""
WAYS = ("ids, extras", "ids", "text", "chat, extras", "chat")
"""Of asking, the surest first."""


class Lost(PacelineError):
    """An answer whose tokens cannot be known; `reason` is what such ones are counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as a server takes it that renders the prompt itself."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class RemoteLLM:
    """A tokenizer here, a model elsewhere."""

    def __init__(self, tokenizer: Tokenizer, client: Client, served_name: str | None, num_at_once: int) -> None:
        """Raises ConfigError, DownloadError, or Refused when the server cannot be asked what it has."""
        self.tokenizer = tokenizer
        self.engine = RemoteEngine(self, client, served_name or _first_model(client), num_at_once)
        self.target = self.engine

    def encode_chat(
        self,
        messages: list[Message],
        tools: Iterable[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """As LLM.encode_chat, which needs the tokenizer alone."""
        return LLM.encode_chat(cast(LLM, self), messages, tools, variables)

    @classmethod
    def of(cls, model: str, url: str, served_name: str | None, num_at_once: int, patience_s: float) -> RemoteLLM:
        """For the target `model`, of which only the tokenizer is read."""
        client = Client(url, "answers_from", patience_s)
        return cls(Tokenizer.from_path(light_folder(model)), client, served_name, num_at_once)

    @property
    def introduction(self) -> str:
        return f"{self.engine.client.url} answers, as {self.engine.served_name}"

    def close(self) -> None:
        """As RemoteEngine.close."""
        self.engine.close()


@dataclass(frozen=True, slots=True)
class TokenizerAlone:
    """What is here of a target that the workers of a Ray cluster run."""

    tokenizer: Tokenizer
    introduction: str

    def close(self) -> None:
        """There is nothing to close."""


def stand_in(config: RegenerateConfig) -> RemoteLLM | TokenizerAlone | None:
    """What stands in the target's place where it answers elsewhere, None where it answers here. Raises ConfigError for what
    cannot be asked there, and what reaching it raises."""
    where, model = config.elsewhere, config.target.model
    if where.ray:
        if config.asked.num_self_written:
            raise ConfigError("ray: prompts that the target writes itself are written on one machine: give prompts (--prompts)")
        return TokenizerAlone(Tokenizer.from_path(light_folder(model)), f"the workers of Ray at {where.ray} answer")
    if not where.answers_from:
        return None
    if config.answering.grammar is not None:
        raise ConfigError("answers_from: servers differ in how they take grammars: leave the schema or regex out")
    if config.answering.top_k:
        raise ConfigError("answers_from: what servers tell of likely tokens is cut and rounded: leave top_k out")
    return RemoteLLM.of(model, where.answers_from, where.served_name, where.at_once, 60 * where.patience_minutes)


def _first_model(client: Client) -> str:
    try:
        return str(client.json("GET", "/v1/models")["data"][0]["id"])
    except (Refused, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{client.option} {client.url} does not say which models it has ({error}): give served_name"
        ) from error


class RemoteEngine:
    """As much of `engine.Engine` as is needed, and its own cache: as many rows as requests under way."""

    def __init__(self, llm: RemoteLLM, client: Client, served_name: str, num_at_once: int) -> None:
        self.client, self.served_name, self.num_rows = client, served_name, num_at_once
        self.cache = self
        self._llm, self._way = llm, 0
        self._asked: queue.SimpleQueue[tuple[Sequence, Talk | None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: dict[int, Sequence] = {}
        self._done: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._next_id = 0

    def add(self, prompt_ids: list[int], params: SamplingParams, *, talk: Talk | None = None) -> int:
        """Send a request; returns its id. `talk`: the same prompt as messages. Raises ConfigError on what cannot be sent."""
        if params.grammar is not None:
            raise ConfigError("answers_from: servers differ in how they take grammars: leave the schema or regex out")
        request_id, self._next_id = self._next_id, self._next_id + 1
        seq = Sequence(request_id, list(prompt_ids), len(prompt_ids), params)
        self._open[request_id] = seq
        self._asked.put((seq, talk))
        if len(self._threads) < min(self.num_rows, len(self._open)):
            # daemons: a request under way, which may take minutes, does not keep a process that was interrupted
            self._threads.append(threading.Thread(target=self._work, name="paceline-elsewhere", daemon=True))
            self._threads[-1].start()
        return request_id

    def abort(self, request_id: int) -> None:
        """Drop a request; one that is under way is answered, but not looked at."""
        self._open.pop(request_id, None)

    def close(self) -> None:
        """Nothing more is asked, and nobody waits for a server that is down."""
        self._open.clear()
        self.client.close()
        for _ in self._threads:
            self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            if asked[0].request_id in self._open:
                self._run(*asked)

    def whole_chunks(self) -> contextlib.AbstractContextManager[None]:
        """How prompts are read is the server's business."""
        return contextlib.nullcontext()

    def step(self) -> list[Chunk]:
        """Wait for an answer; all that are there. One whose tokens are not known has `sequence.error`."""
        chunks = [self._done.get()]
        while not self._done.empty():
            chunks.append(self._done.get())
        return [chunk for chunk in chunks if self._open.pop(chunk.sequence.request_id, None)]

    def _run(self, seq: Sequence, talk: Talk | None) -> None:
        text = ""
        try:
            ids, text, seq.finish_reason = self._answer(seq, talk)
            seq.tokens += ids
        except Exception as error:  # noqa: BLE001  (raised where the answer is asked for)
            seq.error, seq.finish_reason = error, "error"
        self._done.put(Chunk(seq, seq.output_ids, text, seq.finish_reason))

    def _answer(self, seq: Sequence, talk: Talk | None) -> tuple[list[int], str, Any]:
        """(token ids, text, how it ended) of a request, by the first way from `_way` on that the server takes."""
        refused: Refused | None = None
        for way in range(self._way, len(WAYS)):
            path, body = self._request(WAYS[way], seq, talk)
            if not path:
                continue
            try:
                told = self.client.json("POST", path, body)
            except Refused as error:
                if error.status in (401, 403):
                    raise ConfigError(
                        f"{self.client.option} {self.client.url} wants another key ({error}): set {KEY}"
                    ) from error
                refused = refused or error
                continue
            if isinstance(told, dict) and told.get("lossless") is False:
                raise ConfigError(
                    f"{self.client.option} {self.client.url} says lossless: false, so its answers are not the model's own: "
                    "start it without --mock"
                )
            self._way = max(self._way, way)
            return read_answer(told, seq, self._llm.tokenizer)
        raise Lost(f"refused by the server ({refused})")

    def _request(self, way: str, seq: Sequence, talk: Talk | None) -> tuple[str, dict[str, Any]]:
        """Path and body; no path when this prompt cannot be sent so."""
        params, prompt_ids, tokenizer = seq.params, seq.tokens[: seq.prompt_len], self._llm.tokenizer
        body: dict[str, Any] = {"model": self.served_name, "max_tokens": params.max_tokens, "temperature": params.temperature}
        body |= {"seed": seq.seed, "stream": False}
        body |= {"top_p": params.top_p} if params.top_p < 1.0 else {}
        body |= {"stop": list(params.stop)} if params.stop else {}
        body |= {"stop_token_ids": list(params.stop_token_ids)} if params.stop_token_ids else {}
        body |= EXTRAS if way.endswith("extras") else {}
        if way.startswith("ids"):
            return "/v1/completions", body | {"prompt": prompt_ids}
        if way == "text":
            text = tokenizer.decode(prompt_ids, skip_special=False)
            is_same = tokenizer.encode(text, add_special_tokens=False) == prompt_ids
            return "/v1/completions" if is_same else "", body | {"prompt": text}
        if talk is None:
            return "", {}
        body |= {"messages": talk.messages} | ({"tools": talk.tools} if talk.tools else {})
        return "/v1/chat/completions", body | ({"chat_template_kwargs": dict(talk.variables)} if talk.variables else {})


def read_answer(told: Any, seq: Sequence, tokenizer: Tokenizer) -> tuple[list[int], str, Any]:
    """(token ids, text, how it ended) of what a server told. Raises Lost when the tokens cannot be known."""
    try:
        (choice,) = told["choices"]
        message = choice.get("message") or {}
        text, usage = choice.get("text", message.get("content")) or "", told.get("usage") or {}
        given, reason = choice.get("token_ids"), choice.get("finish_reason")
        prompt_ids = choice.get("prompt_token_ids") or told.get("prompt_token_ids")
        is_parsed = any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Lost("of another form than the API's") from error
    if reason == "tool_calls":
        reason = "stop"
    if reason not in ("stop", "length"):
        raise Lost(f"ended by {reason!r:.40}")
    if prompt_ids is not None and prompt_ids != seq.tokens[: seq.prompt_len]:
        raise Lost("to another prompt: the server's template or tokenizer differs")
    if prompt_ids is None and usage.get("prompt_tokens", seq.prompt_len) != seq.prompt_len:
        raise Lost("to another prompt: the server counts other tokens")
    if given is not None:
        return _given(given, text, is_parsed, tokenizer), text, reason
    if is_parsed:
        raise Lost("parsed by the server into calls or thoughts, without its tokens")
    return _encoded(text, reason, usage.get("completion_tokens"), seq, tokenizer), text, reason


def _given(ids: Any, text: str, is_parsed: bool, tokenizer: Tokenizer) -> list[int]:
    """The server's own tokens, when they are the target's."""
    size = tokenizer.vocab_size
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < size for token in ids):
        raise Lost("without tokens of this vocabulary")
    texts = [tokenizer.decode(ids, skip) for skip in (True, False)]
    if not is_parsed and not any(each.strip().startswith(text.rstrip("\ufffd").strip()) for each in texts):
        raise Lost("in tokens of another tokenizer")
    return ids


def _encoded(text: str, reason: str, counted: int | None, seq: Sequence, tokenizer: Tokenizer) -> list[int]:
    """The text's tokens, with the end token of an answer that came to its end."""
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    if tokenizer.decode(ids, skip_special=False) != text:
        raise Lost("whose text does not encode to itself")
    has_end = reason == "stop" and not seq.params.stop and not seq.params.stop_token_ids
    if counted is not None and counted not in ((len(ids), len(ids) + 1) if reason == "stop" else (len(ids),)):
        raise Lost("whose text encodes to another number of tokens than were made")
    end = end_token(tokenizer)
    if not has_end:
        return ids
    if end is None:
        raise Lost("whose end token cannot be told")
    return [*ids, end]


def end_token(tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer: the tokenizer's own end where a model has several; None when it cannot be told."""
    ends = tokenizer.eos_token_ids
    own = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    return own if own in ends else ends[0] if len(ends) == 1 else None
