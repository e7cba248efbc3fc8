"""The server that is audited: how it is asked, and what it does not offer.

The prompt is sent as token ids; to a server that takes none, as their text, or else as messages, which the server renders
itself. Settings that some servers take from the model's folder when a request leaves them out (top-k, penalties) are sent as
off, as far as the server knows them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import ConfigError, DownloadError, ModelNotFoundError
from paceline.loop.audit.answers import AnswerReader, Told
from paceline.net.streaming import Client, Stream

OFF = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
IDS = {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False}
"""vLLM's."""
KINDS = ("ids", "text", "chat")
EXTRAS = (OFF | IDS, OFF, {})
"""The first of them that a server takes is sent with every request."""
TRIES, PAUSE_S = 4, 1.0
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that are worth another try."""


@dataclass(frozen=True, slots=True)
class AuditPrompt:
    """A prompt in every form that a server may take."""

    ids: tuple[int, ...]
    text: str
    text_ids: tuple[int, ...]
    """What the text encodes to, with the tokens that a server puts before it: often `ids`."""
    messages: list[dict[str, Any]] | None
    """None for a text that is no conversation."""

    def tokens(self, kind: str) -> tuple[int, ...]:
        """What the model is given when the prompt is sent in this way."""
        return self.text_ids if kind == "text" else self.ids


@dataclass(frozen=True, slots=True)
class Request:
    """One answer that is asked for."""

    prompt: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    seed: int | None = None
    stop: str | None = None
    logprobs: bool = False


@dataclass(slots=True)
class Endpoint:
    """One server, one of its models."""

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
    """Answers of which the server itself says that they are not lossless."""
    failures: list[str] = field(default_factory=list)
    """What went wrong with single requests."""

    def settle(self) -> None:
        """Find out how this server is to be asked. Raises ConfigError when it answers in no way, and on a wrong key."""
        probe, refused = Request(0, 1.0, 1), ""
        for self.kind in KINDS:
            for self.extras in EXTRAS:
                if self._body(probe) is None:
                    continue
                stream = self._post(probe)
                if stream.status == 200:
                    self._settle_fields(probe)
                    return
                refused = refused or _words(stream)
        raise ConfigError(
            f"{self.client.url} answers neither /v1/completions nor /v1/chat/completions ({refused}): is {self.served_name!r} "
            "a model that writes text?"
        )

    def _settle_fields(self, probe: Request) -> None:
        self.has_seeds = self._post(replace(probe, seed=1)).status == 200
        told = self._told(self._post(replace(probe, logprobs=True)), probe)
        self.has_logprobs = told is not None and bool(told.logprobs)
        plain = self._told(self._post(probe), probe)
        self.gives_ids = plain is not None and plain.has_ids

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """What the model is given of a prompt."""
        return self.prompts[index].tokens(self.kind)

    def ask(self, requests: Sequence[Request], num_at_once: int) -> Iterator[tuple[Request, Told | None]]:
        """Answers in the order asked, None for what failed. Raises DownloadError when the server is gone."""
        with ThreadPoolExecutor(num_at_once) as pool:
            waiting = [pool.submit(self._post, each) for each in requests]
            try:
                for request, answer in zip(requests, waiting, strict=True):
                    yield request, self._told(answer.result(), request)
            finally:
                for answer in waiting:
                    answer.cancel()

    def _told(self, stream: Stream, request: Request) -> Told | None:
        told = None
        if stream.status == 200:
            with contextlib.suppress(ValueError):
                told = self.reader.read(json.loads(stream.body), request.stop is not None)
        if told is None:
            self.failures.append(_words(stream))
        elif told.is_lossy:
            self.num_lossy += 1
        return told

    def _post(self, request: Request) -> Stream:
        """The answer to it; a server that is busy is asked again. Raises DownloadError, and ConfigError on a wrong key."""
        path = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        data = json.dumps(self._body(request)).encode()
        stream = self.client.post(path, data)
        for attempt in range(1, TRIES):
            if not stream.failure and stream.status not in PASSING:
                break
            time.sleep(PAUSE_S * attempt)
            stream = self.client.post(path, data)
        if stream.failure:
            raise DownloadError(
                f"{self.client.url} does not answer any more ({stream.failure}): look at its log, and try again"
            )
        check_key(self.client.url, stream.status, self.client.has_key)
        return stream

    def _body(self, request: Request) -> dict[str, Any] | None:
        """None where this prompt cannot be sent so."""
        prompt = self.prompts[request.prompt]
        body: dict[str, Any] = {"model": self.served_name, "max_tokens": request.max_tokens, "top_p": request.top_p}
        body |= {"temperature": request.temperature, **self.extras}
        body |= {} if request.seed is None else {"seed": request.seed}
        body |= {} if request.stop is None else {"stop": [request.stop]}
        if self.kind == "chat":
            body |= {"logprobs": True} if request.logprobs else {}
            return None if prompt.messages is None else body | {"messages": prompt.messages}
        body |= {"logprobs": 1} if request.logprobs else {}
        if self.kind == "ids":
            return body | {"prompt": list(prompt.ids)}
        return body | {"prompt": prompt.text}


def served_name(client: Client, asked: str | None) -> str:
    """What the server calls its model. Raises DownloadError (no server), ConfigError, ModelNotFoundError."""
    try:
        reply = client.get("/v1/models")
    except OSError as error:
        raise DownloadError(f"there is no server at {client.url} ({error}): start it, or check the address") from error
    check_key(client.url, reply.status, client.has_key)
    try:
        names = [str(each["id"]) for each in json.loads(reply.body)["data"]]
    except (ValueError, KeyError, TypeError):
        names = []
    if asked is None and not names:
        raise ConfigError(
            f"{client.url}/v1/models answered with status {reply.status} and no model: is it an OpenAI-compatible server? "
            "If so, name its model with --served-name"
        )
    if asked is not None and names and asked not in names:
        raise ModelNotFoundError(f"{client.url} does not serve {asked!r}: choose --served-name from {', '.join(names)}")
    return asked or names[0]


def check_key(url: str, status: int, has_key: bool) -> None:
    """Raises ConfigError when the server wants a key, or another one."""
    if status in (401, 403):
        had = "does not take this API key" if has_key else "wants an API key"
        raise ConfigError(f"{url} {had}: give the right one with --api-key or --api-key-file, or set PACELINE_API_KEY")


def sendable(prompts: Iterable[AuditPrompt], longest: int) -> list[AuditPrompt]:
    """Those that leave room for an answer."""
    return [each for each in prompts if all(1 < len(ids) <= longest for ids in (each.ids, each.text_ids))]


def _words(stream: Stream) -> str:
    """What a server said of a request that failed, in a line."""
    text = stream.body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"status {stream.status}: {' '.join(text.split())[:200]}"
