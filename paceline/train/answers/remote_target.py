"""A remote target: an OpenAI-compatible server used in place of the engine, for `regenerate --answers-from URL`.

`RemoteLLM` provides the parts of an LLM that Regenerator and PromptWriter use: a tokenizer, and an engine whose
requests are concurrent HTTP requests. The prompt is rendered here by the target's chat template and sent as token ids;
to a server that rejects token ids, as text, or else as messages. A drafter learns from tokens, so an answer is used
only if its tokens are known:

- the server returns them (`return_token_ids`, vLLM), and they decode to its text;
- or its text, encoded by the target's tokenizer, decodes to itself and has as many tokens as the server reports.

Every other answer is left out, and counted by reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.data.prompts import Message
from paceline.engine.engine import Chunk
from paceline.errors import ConfigError, PacelineError
from paceline.model.remote_embedding import light_folder
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.retrying import KEY, Client, Refused
from paceline.train.answers.prompt_tokens import TokenizerOnly
from paceline.train.config import RegenerateConfig
from paceline.types import SamplingParams, Sequence

EXTRAS = {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
"""Request fields that vLLM knows. Other servers ignore or reject them; then the request is sent without them."""
WAYS = ("ids, extras", "ids", "text", "chat, extras", "chat")
"""Request formats, the most reliable first: the prompt as token ids, text, or messages (chat), some with EXTRAS."""

NO_GRAMMAR = "answers_from: servers differ in how they take grammars: leave the schema or regex out"


class LostAnswer(PacelineError):
    """Raised for a server's answer that cannot be used for training, for example because its token ids are unknown. The
    run leaves the answer out, and counts it by `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation as messages, for a server that applies the chat template itself."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


class RemoteLLM(TokenizerOnly):
    """Replaces an `LLM` if the target runs on a server: has the tokenizer, and sends requests to the server."""

    def __init__(self, tokenizer: Tokenizer, client: Client, served_name: str | None, num_at_once: int) -> None:
        """Raises ConfigError if `served_name` is None and the server does not list its models, DownloadError if the
        server cannot be reached."""
        super().__init__(tokenizer)
        self.engine = RemoteEngine(self, client, served_name or first_model(client), num_at_once)
        self.target = self.engine
        self.introduction = f"{client.url} answers, as {self.engine.served_name}"

    def close(self) -> None:
        self.engine.close()


def remote_target_of(config: RegenerateConfig) -> TokenizerOnly | None:
    """Returns the object that replaces the LLM: a RemoteLLM if a server runs the target, a TokenizerOnly if a Ray
    cluster does, None if this machine does. Raises:
    - ConfigError for an invalid address, for a grammar, `top_k` or `max_batch` with a server, or for prompts written by
      the target with Ray;
    - DownloadError if the server or the tokenizer's files cannot be reached;
    - ModelNotFoundError or ModelFileError for a missing or damaged tokenizer."""
    where = config.remote
    if not where.ray and not where.answers_from:
        return None
    if where.ray:
        if config.prompting.num_self_written:
            raise ConfigError(
                "ray: prompts that the target writes itself are written on one machine: give prompts (--prompts)"
            )
        return TokenizerOnly(_tokenizer(config), f"the workers of Ray at {where.ray} answer")
    assert where.answers_from
    if config.answering.grammar is not None:
        raise ConfigError(NO_GRAMMAR)
    if config.answering.top_k:
        raise ConfigError("answers_from: what servers tell of likely tokens is cut and rounded: leave top_k out")
    if config.max_batch != RegenerateConfig(config.out).max_batch:
        raise ConfigError("max_batch means nothing for answers_from, whose requests at_once limits: leave it out")
    client = Client(where.answers_from, "answers_from", 60 * where.patience_minutes)
    return RemoteLLM(_tokenizer(config), client, where.served_name, where.at_once)


def _tokenizer(config: RegenerateConfig) -> Tokenizer:
    return Tokenizer.from_path(light_folder(config.target.model))


def first_model(client: Client) -> str:
    """Returns the name of the first model that the server lists. Raises ConfigError if the server lists none or
    refuses."""
    try:
        return str(client.json("GET", "/v1/models")["data"][0]["id"])
    except (Refused, KeyError, IndexError, TypeError) as error:
        fault = f"does not say which models it has ({error}): give served_name"
        raise ConfigError(f"{client.option} {client.url} {fault}") from error


class RemoteEngine:
    """Has the interface of `engine.Engine`, but sends requests to a server. It has no KV cache: its attribute `cache`
    only gives `num_rows`, the largest number of concurrent requests."""

    def __init__(self, llm: RemoteLLM, client: Client, served_name: str, num_at_once: int) -> None:
        self.client, self.served_name, self.num_rows = client, served_name, num_at_once
        self.cache = self
        self._llm, self._way = llm, 0
        self._requests: queue.SimpleQueue[tuple[Sequence, ChatRequest | None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: dict[int, Sequence] = {}
        self._done: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._next_id = 0

    def add(self, prompt_ids: list[int], params: SamplingParams, *, chat: ChatRequest | None = None) -> int:
        """Queues a request for the server; returns its id. `chat`: the same prompt as messages, sent to servers that
        accept neither token ids nor the rendered text. Raises ConfigError for parameters with a grammar."""
        if params.grammar is not None:
            raise ConfigError(NO_GRAMMAR)
        request_id, self._next_id = self._next_id, self._next_id + 1
        seq = Sequence(request_id, list(prompt_ids), len(prompt_ids), params)
        self._open[request_id] = seq
        self._requests.put((seq, chat))
        if len(self._threads) < min(self.num_rows, len(self._open)):
            # Daemon threads: a request in flight, which may take minutes, does not delay the exit of an interrupted
            # process.
            self._threads.append(threading.Thread(target=self._work, name="paceline-remote", daemon=True))
            self._threads[-1].start()
        return request_id

    def abort(self, request_id: int) -> None:
        """Drops a request; an answer in flight is discarded."""
        self._open.pop(request_id, None)

    def close(self) -> None:
        """Stops sending requests, without waiting for those in flight."""
        self._open.clear()
        self.client.close()
        for _ in self._threads:
            self._requests.put(None)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            if request[0].request_id in self._open:
                self._run(*request)

    def whole_chunks(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager without effect, to match the interface of `engine.Engine`. The size of prefill
        chunks is the server's choice."""
        return contextlib.nullcontext()

    def step(self) -> list[Chunk]:
        """Waits until the server has answered a request. Returns one chunk, with the whole answer, for each request
        answered since the last call, except aborted ones. `chunk.sequence.error` is the error of a failed request, or a
        LostAnswer for an answer that cannot be used; otherwise None."""
        chunks = [self._done.get()]
        while not self._done.empty():
            chunks.append(self._done.get())
        return [chunk for chunk in chunks if self._open.pop(chunk.sequence.request_id, None)]

    def _run(self, seq: Sequence, chat: ChatRequest | None) -> None:
        text = ""
        try:
            ids, text, seq.finish_reason = self._answer(seq, chat)
            seq.tokens += ids
        except Exception as error:  # noqa: BLE001  (raised by Regenerator.run)
            seq.error, seq.finish_reason = error, "error"
        self._done.put(Chunk(seq, seq.output_ids, text, seq.finish_reason))

    def _answer(self, seq: Sequence, chat: ChatRequest | None) -> tuple[list[int], str, Any]:
        """Returns (token ids, text, finish reason), by the first format from `_way` on that the server accepts."""
        refused: Refused | None = None
        for way in range(self._way, len(WAYS)):
            path, body = self._request(WAYS[way], seq, chat)
            if not path:
                continue
            try:
                response = self.client.json("POST", path, body)
            except Refused as error:
                if error.status in (401, 403):
                    raise ConfigError(
                        f"{self.client.option} {self.client.url} wants another key ({error}): set {KEY}"
                    ) from error
                refused = refused or error
                continue
            if isinstance(response, dict) and response.get("lossless") is False:
                raise ConfigError(
                    f"{self.client.option} {self.client.url} says lossless: false, so its answers are not the model's "
                    "own: start it without --mock"
                )
            self._way = max(self._way, way)
            return read_answer(response, seq, self._llm.tokenizer)
        raise LostAnswer(f"refused by the server ({refused})")

    def _request(self, way: str, seq: Sequence, chat: ChatRequest | None) -> tuple[str, dict[str, Any]]:
        """Returns (path, body) of a request; an empty path if the prompt cannot be sent in this format."""
        params, prompt_ids, tokenizer = seq.params, seq.tokens[: seq.prompt_len], self._llm.tokenizer
        body: dict[str, Any] = {"model": self.served_name, "max_tokens": params.max_tokens}
        body |= {"temperature": params.temperature, "seed": seq.seed, "stream": False}
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
        if chat is None:
            return "", {}
        body |= {"messages": chat.messages} | ({"tools": chat.tools} if chat.tools else {})
        return "/v1/chat/completions", body | ({"chat_template_kwargs": dict(chat.variables)} if chat.variables else {})


def read_answer(response: Any, seq: Sequence, tokenizer: Tokenizer) -> tuple[list[int], str, Any]:
    """Reads `response`, the JSON object that a server returned for the request `seq`. Returns (token ids, text, finish
    reason: "stop" or "length"). Without token ids in the response, `tokenizer` encodes the text. Raises LostAnswer for
    a malformed response, if the answer's token ids are uncertain, if the answer ended for another reason, or if the
    server answered another prompt than that of `seq`."""
    try:
        (choice,) = response["choices"]
        message = choice.get("message") or {}
        text, usage = choice.get("text", message.get("content")) or "", response.get("usage") or {}
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        prompt_ids = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        is_parsed = any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LostAnswer("of another form than the API's") from error
    if reason == "tool_calls":
        reason = "stop"
    if reason not in ("stop", "length"):
        raise LostAnswer(f"ended by {reason!r:.40}")
    if prompt_ids is not None and prompt_ids != seq.tokens[: seq.prompt_len]:
        raise LostAnswer("to another prompt: the server's template or tokenizer differs")
    if prompt_ids is None and usage.get("prompt_tokens", seq.prompt_len) != seq.prompt_len:
        raise LostAnswer("to another prompt: the server counts other tokens")
    if ids is not None:
        return _given(ids, text, is_parsed, tokenizer), text, reason
    if is_parsed:
        raise LostAnswer("parsed by the server into calls or thoughts, without its tokens")
    return _encoded(text, reason, usage.get("completion_tokens"), seq, tokenizer), text, reason


def _given(ids: Any, text: str, is_parsed: bool, tokenizer: Tokenizer) -> list[int]:
    """Returns the server's token ids. Raises LostAnswer if they are not the target's."""
    size = tokenizer.vocab_size
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < size for token in ids):
        raise LostAnswer("without tokens of this vocabulary")
    texts = [tokenizer.decode(ids, skip) for skip in (True, False)]
    if not is_parsed and not any(decoded.strip().startswith(text.rstrip("\ufffd").strip()) for decoded in texts):
        raise LostAnswer("in tokens of another tokenizer")
    return ids


def _encoded(text: str, reason: str, num_generated: int | None, seq: Sequence, tokenizer: Tokenizer) -> list[int]:
    """Returns the text's tokens, with the end token if the answer is complete. Raises LostAnswer."""
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    if tokenizer.decode(ids, skip_special=False) != text:
        raise LostAnswer("whose text does not encode to itself")
    is_whole = reason == "stop"
    if num_generated is not None and num_generated not in (len(ids), len(ids) + is_whole):
        raise LostAnswer("whose text encodes to another number of tokens than were made")
    if not is_whole or seq.params.stop or seq.params.stop_token_ids:
        return ids
    if tokenizer.end_token_id is None:
        raise LostAnswer("whose end token is ambiguous")
    return [*ids, tokenizer.end_token_id]
