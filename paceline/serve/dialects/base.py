"""Base of the API translations: a request becomes a ChatRequest, and the chunks of its answer become the API's events.

`messages.py` and `message_replies.py` implement Anthropic's Messages, `responses.py` and `response_replies.py` OpenAI's
Responses.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.replies.events import Exchange, sse
from paceline.serve.requests.protocol import ChatRequest, Closed
from paceline.serve.worker.ticket import Ticket

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields of every translated chat: non-streamed answers are also built from its chunks."""


@dataclass(slots=True)
class Part:
    """One text or tool call of an answer."""

    call: dict[str, Any] | None = None
    """The call's id, name and arguments; None for a text."""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique part of the ids in the API's events."""


class Translated(Exchange):
    """A chat's answer in the form of another API: a sequence of parts, each opened, grown and closed.

    Non-streamed answers are built from the same events as streams.
    """

    end = b""

    def __init__(
        self,
        name: str,
        chat: ChatRequest,
        ticket: Ticket,
        replies: list[Any],
        *,
        is_stream: bool,
        lossless: bool = True,
    ) -> None:
        super().__init__("chat.completion", "chatcmpl", name, chat, ticket, replies, lossless=lossless)
        self.is_stream, self.name, self.chat = is_stream, name, chat
        self.key = uuid.uuid4().hex
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        """Token usage of the chat, set when the answer is complete."""
        self._is_begun = self._is_open = False

    @property
    def marks(self) -> dict[str, Any]:
        """Extra fields of all objects and events: lossless, if it is false."""
        return {name: self._head[name] for name in ("lossless",) if name in self._head}

    async def whole(self) -> dict[str, Any]:
        """Return the finished answer as one object."""
        await self.begin()
        try:
            async for chunks in self.chunks():
                for chunk in chunks:
                    for _ in self._events(chunk):
                        pass
            return self.body() | self.marks
        finally:
            self.close()

    def written(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk of the chat as server-sent events of this API."""
        return b"".join(map(self.sent, self._events(chunk)))

    def sent(self, event: dict[str, Any]) -> bytes:
        """Return one server-sent event, named by its type."""
        return sse(event | self.marks, event["type"])

    def _events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the API's events for a chunk of the chat."""
        if not self._is_begun:
            self._is_begun = True
            yield from self.begun()
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                if not self._is_open or self.parts[-1].call:
                    yield from self._next(Part())
                logprobs = (choice["logprobs"] or {}).get("content", [])
                self.parts[-1].text += text
                self.parts[-1].logprobs += logprobs
                yield from self.grown(self.parts[-1], text, logprobs)
            for call in choice["delta"].get("tool_calls", ()):
                yield from self._next(Part({"id": call["id"], **call["function"]}))
                yield from self.grown(self.parts[-1], call["function"]["arguments"], [])
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := chunk.get("usage"):
            self.usage = usage
            yield from self._closed()
            yield from self.finished()

    def _next(self, part: Part) -> Iterator[dict[str, Any]]:
        yield from self._closed()
        self.parts.append(part)
        self._is_open = True
        yield from self.opened(part)

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.parts[-1])

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the answer so far as one object."""

    @abstractmethod
    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the events before the first part."""

    @abstractmethod
    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events that open a part, the last one of `parts`."""

    @abstractmethod
    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events for new text of a part, or for its call's arguments."""

    @abstractmethod
    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events that close a part."""

    @abstractmethod
    def finished(self) -> Iterator[dict[str, Any]]:
        """Yield the events after the last part."""


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager that replaces fields of the chat by the client's fields (`names`: chat -> client) in
    ApiErrors."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        own = [name for name in names if param == name or param.startswith((f"{name}.", f"{name}["))]
        if not own:
            raise
        name = max(own, key=len)
        param = names[name] + param.removeprefix(name)
        message = error.message.replace(name, names[name])
        raise ApiError(error.status, message, param=param, code=error.code, headers=error.headers) from error


def check_keys(part: Closed, kind: str, keys: set[str], where: str, optional: tuple[str, ...] = ()) -> None:
    """Raises RequestRefused unless a part of this type has exactly the fields `keys`; `optional` ones may be
    missing."""
    given = {name for name in part.model_fields_set if getattr(part, name) is not None} - {"type"}
    for name in sorted(keys - given - {*optional}):
        raise RequestRefused(f"{where}.{name}: a part of type {kind} needs it", param=f"{where}.{name}")
    for name in sorted(given - keys):
        raise RequestRefused(f"{where}.{name} does not go with the type {kind}: leave it out", param=f"{where}.{name}")
