"""Sends requests to the audited server, and finds out which request fields it supports.

A prompt is sent as token ids; if the server does not accept them, as text; else as chat messages, which the server
renders. Some servers take settings such as top-k or penalties from the model's folder; these are switched off in each
request if the server has fields for them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import ConfigError, DownloadError
from paceline.loop.audit.answers import AnswerReader, ServerAnswer
from paceline.net.streaming import Client, Stream, check_key, error_text

OFF = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
IDS = {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
"""Request fields of vLLM for token ids and unchanged texts."""
KINDS = ("ids", "text", "chat")
EXTRAS = (OFF | IDS, OFF, {})
"""Sets of extra request fields, tried in this order; the first that the server accepts is sent with every request."""
TRIES, PAUSE_S = 4, 1.0
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that are worth a retry."""


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt in every form that a server may accept: token ids, text, and chat messages."""

    ids: tuple[int, ...]
    text: str
    text_ids: tuple[int, ...]
    """Token ids of `text` as a server would encode it, with the tokens that it adds at the beginning; often equal to
    `ids`."""
    messages: list[dict[str, Any]] | None
    """Chat messages; None if the prompt cannot be sent as messages."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request for one answer. `prompt`: index of its prompt in `Endpoint.prompts`."""

    prompt: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    seed: int | None = None
    stop: str | None = None
    logprobs: bool = False


@dataclass(slots=True)
class Endpoint:
    """Requests answers from one model on one server. Not every server accepts prompts as token ids, or all request
    fields; `determine_form` finds out what this one accepts. It sets `kind` (how prompts are sent: as "ids", "text" or
    "chat") and `extras` (fields added to every request)."""

    client: Client
    served_name: str
    prompts: Sequence[AuditPrompt]
    reader: AnswerReader
    kind: str = KINDS[0]
    extras: dict[str, Any] = field(default_factory=dict)
    has_seeds: bool = True
    has_logprobs: bool = True
    gives_ids: bool = False
    num_lossy: int = 0
    """Number of answers that the server itself declares as not lossless."""
    failures: list[str] = field(default_factory=list)
    """Errors of single requests."""

    def determine_form(self) -> None:
        """Find out, with test requests, whether the server accepts prompts as token ids, text or chat messages, and
        which request fields it supports. Raises ConfigError if it accepts none of these or rejects the API key,
        DownloadError if it does not answer."""
        probe, refused = Request(0, 1.0, 1), ""
        for self.kind in KINDS:
            for self.extras in EXTRAS:
                if self._body(probe) is None:
                    continue
                stream = self._post(probe)
                if stream.status == 200:
                    self._determine_fields(probe)
                    return
                refused = refused or f"status {stream.status}: {error_text(stream.body)}"
        raise ConfigError(
            f"{self.client.url} answers neither /v1/completions nor /v1/chat/completions ({refused}): is "
            f"{self.served_name!r} a model that writes text?"
        )

    def _determine_fields(self, probe: Request) -> None:
        self.has_seeds = self._post(replace(probe, seed=1)).status == 200
        answer = self._answer(self._post(replace(probe, logprobs=True)), probe)
        self.has_logprobs = answer is not None and bool(answer.logprobs)
        answer = self._answer(self._post(probe), probe)
        self.gives_ids = answer is not None and answer.has_ids

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """Returns the token ids of the prompt `prompts[index]` as the server's model receives them. If prompts are sent
        as text, the server encodes them itself, and the ids may differ from those of other forms."""
        prompt = self.prompts[index]
        return prompt.text_ids if self.kind == "text" else prompt.ids

    def ask(self, requests: Sequence[Request], num_at_once: int) -> Iterator[tuple[Request, ServerAnswer | None]]:
        """Send the requests, `num_at_once` at a time. Yields (request, answer) in order; the answer is None if its
        request failed. Raises DownloadError if the server does not answer any more, ConfigError if it rejects the API
        key."""
        with ThreadPoolExecutor(num_at_once) as pool:
            try:
                for request, stream in zip(requests, pool.map(self._post, requests), strict=True):
                    yield request, self._answer(stream, request)
            finally:
                pool.shutdown(cancel_futures=True)

    def _answer(self, stream: Stream, request: Request) -> ServerAnswer | None:
        answer = None
        if stream.status == 200:
            with contextlib.suppress(ValueError, RecursionError):
                answer = self.reader.read(json.loads(stream.body), request.stop is not None)
        if answer is None:
            self.failures.append(f"status {stream.status}: {error_text(stream.body)}")
        elif answer.is_lossy:
            self.num_lossy += 1
        return answer

    def _post(self, request: Request) -> Stream:
        """Send a request, with retries while the server is busy. Raises DownloadError, and ConfigError on a wrong
        key."""
        path = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        data = json.dumps(self._body(request)).encode()
        stream, attempt = self.client.post(path, data), 1
        while attempt < TRIES and (stream.failure or stream.status in PASSING):
            time.sleep(PAUSE_S * attempt)
            stream, attempt = self.client.post(path, data), attempt + 1
        if stream.failure:
            raise DownloadError(
                f"{self.client.url} does not answer any more ({stream.failure}): look at its log, and try again"
            )
        check_key(self.client.url, stream.status, self.client.has_key)
        return stream

    def _body(self, request: Request) -> dict[str, Any] | None:
        """Builds the request body; None if the prompt does not exist in this form."""
        prompt = self.prompts[request.prompt]
        body: dict[str, Any] = {"model": self.served_name, "max_tokens": request.max_tokens, "top_p": request.top_p}
        body |= {"temperature": request.temperature, **self.extras}
        body |= {} if request.seed is None else {"seed": request.seed}
        body |= {} if request.stop is None else {"stop": [request.stop]}
        body |= {"logprobs": True if self.kind == "chat" else 1} if request.logprobs else {}
        if self.kind == "chat":
            return None if prompt.messages is None else body | {"messages": prompt.messages}
        return body | {"prompt": list(prompt.ids) if self.kind == "ids" else prompt.text}
