"""Base of the API translations: a request becomes a ChatRequest, and the chunks of its answer become the API's events.

`messages.py` implements Anthropic's Messages, `responses.py` OpenAI's Responses.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.replies.events import Exchange, sse
from paceline.serve.replies.tool_calls import Call
from paceline.serve.requests.protocol import ChatRequest, Closed
from paceline.serve.worker.ticket import Ticket

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields set in every translated ChatRequest: non-streamed answers are built from stream chunks too."""


@dataclass(slots=True)
class Part:
    """One part of an answer: a text or a tool call."""

    call: dict[str, Any] | None = None
    """The call's id, name and arguments; None for a text."""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Random hex string that makes the part's ids unique."""


class Translated(Exchange):
    """A request to Anthropic's Messages or OpenAI's Responses API. It is translated to a chat request, and this class
    converts the chat's answer to the events of the client's API. An answer is a sequence of parts, each a text or a
    tool call. A part has events for its beginning, for each new text, and for its end. A request without streaming gets
    one response object, built from the same events."""

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
        self.is_stream, self.name = is_stream, name
        for reply in replies:
            reply.in_order = deque()
        self.key = uuid.uuid4().hex
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        """Token usage of the chat, set when the answer is complete."""
        self._is_begun = self._is_open = False

    @property
    def marks(self) -> dict[str, Any]:
        """Fields added to every response object and event: {"lossless": False} if acceptance is mocked or the request
        has a lossy acceptance rule, else {}."""
        return {"lossless": False} if "lossless" in self._head else {}

    @property
    def _place(self) -> int:
        """Index of the newest part."""
        return len(self.parts) - 1

    async def whole(self) -> dict[str, Any]:
        """Wait for the end of the answer and return it as one response object."""
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
        """Convert one chunk of the chat's stream to the API's events, encoded as server-sent events."""
        return b"".join(map(self.sent, self._events(chunk)))

    def sent(self, event: dict[str, Any]) -> bytes:
        """Encode one event as a server-sent event, whose name is the event's "type"."""
        return sse(event | self.marks, event["type"])

    def _events(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the API's events for a chunk of the chat."""
        if not self._is_begun:
            self._is_begun = True
            yield from self.begun()
        for choice in chunk["choices"]:
            logprobs = (choice["logprobs"] or {}).get("content", [])
            for piece in self._replies[choice["index"]].in_order.popleft():
                if isinstance(piece, Call):
                    call = piece.as_json()
                    yield from self._next(Part({"id": call["id"], **call["function"]}))
                    yield from self.grown(self.parts[-1], piece.arguments, [])
                    continue
                if not self._is_open or self.parts[-1].call:
                    yield from self._next(Part())
                self.parts[-1].text += piece
                self.parts[-1].logprobs += logprobs
                yield from self.grown(self.parts[-1], piece, logprobs)
                logprobs = []
            if logprobs and self._is_open and not self.parts[-1].call:  # of tokens without text, such as the end token
                self.parts[-1].logprobs += logprobs
                yield from self.grown(self.parts[-1], "", logprobs)
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
        """Return the answer so far as one response object of the API."""

    @abstractmethod
    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the events at the start of the answer, before its first part."""

    @abstractmethod
    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events that begin `part`, the newest of `self.parts`."""

    @abstractmethod
    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events for `text`, which was just added to `part`: to the text of a text part, or to the arguments
        of a tool call. `logprobs`: those of the new tokens in OpenAI's format; empty for a tool call, or if not
        requested."""

    @abstractmethod
    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield the events that end `part`."""

    @abstractmethod
    def finished(self) -> Iterator[dict[str, Any]]:
        """Yield the events at the end of the answer, after its last part."""


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager for code that checks a translated chat request: an ApiError then names the field of the client's
    own request, not that of the chat. `names`: field of the chat -> field of the client's request."""
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
    """Raises RequestRefused unless `part`, an object in a request, has exactly the fields of its type `kind`. `keys`:
    names of all these fields without "type"; only those in `optional` may be missing. Null counts as missing. `where`:
    path of the object in the request, for the error message."""
    given = {name for name in part.model_fields_set if getattr(part, name) is not None} - {"type"}
    for name in sorted(keys - given - {*optional}):
        raise RequestRefused(f"{where}.{name}: a part of type {kind} needs it", param=f"{where}.{name}")
    for name in sorted(given - keys):
        raise RequestRefused(f"{where}.{name} does not go with the type {kind}: leave it out", param=f"{where}.{name}")
