"""A request and its answer: as bytes that passed by (`Observed`), and in OpenAI's words (`Exchange`), from wherever they come.

    Proxy -> Observed -> Exchange \\
    a log of vLLM, OTLP spans -> Exchange -> Reader (reader.py) -> Trace
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from paceline.serve.admin.traces import Lost

KEPT_PATHS = {"/chat/completions": True, "/completions": False}
"""Ends of the paths whose answers are kept, and whether they are conversations."""
MAX_BYTES = 8 * 2**20
"""Of a request, and of an answer, that is kept; longer ones only pass."""
MAX_DECODED = 64 * 2**20
EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
"""Two ends of a line, of whichever kind (HTML, 9.2.5). A \\r\\n is one end, never two."""
MAX_MEMBERS = 1000
"""Members of a gzip body: each costs a copy of what follows it."""
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked and answered."""

    is_chat: bool
    asked: dict[str, Any]
    """The request's body: of a chat completion, or of a completion."""
    said: list[dict[str, Any]]
    """The answer's body, or the chunks of its stream."""
    ended: float | None = None
    """Seconds since 1970."""
    tag: str | None = None
    seconds: dict[str, float | None] = field(default_factory=dict)
    """As a Trace has them."""
    logged_as: str = ""
    """What tells it from all others where it was logged; empty when it was not."""

    @property
    def mark(self) -> str | None:
        """Sixteen letters that stand for that: read again it is the same."""
        return hashlib.blake2b(self.logged_as.encode(errors="replace"), digest_size=8).hexdigest() if self.logged_as else None


class Kept:
    """Pieces of a body as they pass; forgotten when they are too many."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.encoding = ""
        """As of Content-Encoding."""

    def take(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if self.num_bytes <= MAX_BYTES:
            self.pieces.append(piece)
        else:
            self.pieces.clear()

    def decoded(self) -> bytes:
        """The body's bytes. Raises Lost when they are too many, or packed in a way that we do not know."""
        data = b"".join(self.pieces)
        if self.num_bytes > MAX_BYTES:
            raise Lost("size")
        if self.encoding in ("", "identity"):
            return data
        if self.encoding not in ("gzip", "x-gzip", "deflate"):
            raise Lost("encoding")
        return _unpacked(data)


class Observed:
    """An exchange on its way through the proxy: references to the pieces that pass, and when they did."""

    def __init__(self, is_chat: bool, headers: Headers) -> None:
        self.is_chat, self.tag = is_chat, headers.get("x-paceline-tag")
        self.asked, self.said = Kept(), Kept()
        self.asked.encoding = headers.get("content-encoding", "").strip().lower()
        self.is_answered = self._is_stream = False
        """Whether the status is 200: nothing is kept of failures."""
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._ended = self._ended_s = 0.0

    @classmethod
    def of(cls, scope: Scope) -> Observed | None:
        """None for a request whose answer is no completion."""
        is_chat = next((is_chat for end, is_chat in KEPT_PATHS.items() if scope["path"].endswith(end)), None)
        return None if is_chat is None or scope["method"] != "POST" else cls(is_chat, Headers(scope=scope))

    @property
    def num_bytes(self) -> int:
        return self.asked.num_bytes + self.said.num_bytes

    def begins(self, status: int, raw: list[tuple[bytes, bytes]]) -> None:
        """The head of the answer."""
        headers = Headers(raw=[(name.lower(), value) for name, value in raw])
        self.is_answered = status == 200
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self.said.encoding = headers.get("content-encoding", "").strip().lower()

    def take(self, piece: bytes) -> None:
        """A piece of the answer."""
        self._first_s = self._first_s or time.perf_counter()
        self.said.take(piece)

    def ends(self) -> None:
        self._ended, self._ended_s = time.time(), time.perf_counter()

    def exchange(self) -> Exchange:
        """Read what passed. Raises Lost when it is no answer to a completion; takes milliseconds."""
        asked = _object(self.asked.decoded())
        said = self.said.decoded()
        first_token_s = self._first_s - self._began_s if self._first_s and self._is_stream else None
        return Exchange(
            is_chat=self.is_chat,
            asked=asked,
            said=_chunks(said) if self._is_stream else [_object(said)],
            ended=self._ended,
            tag=self.tag,
            seconds={"first_token": first_token_s, "total": self._ended_s - self._began_s},
        )


def _unpacked(packed: bytes) -> bytes:
    """The contents of gzip, of up to MAX_MEMBERS members in a row (RFC 1952, 2.2), or of zlib. Raises Lost."""
    data, is_first, num_members = b"", True, 0
    while is_first or packed.startswith(GZIP):
        num_members += 1
        if num_members > MAX_MEMBERS:
            raise Lost("unreadable")
        unpacking = zlib.decompressobj(wbits=47)
        try:
            data += unpacking.decompress(packed, MAX_DECODED + 1 - len(data))
        except zlib.error:
            raise Lost("unreadable") from None
        if len(data) > MAX_DECODED:
            raise Lost("size")
        if not unpacking.eof:
            raise Lost("unreadable")
        packed, is_first = unpacking.unused_data, False
    return data


def _chunks(data: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream of server-sent events. Raises Lost when it has not come to its end."""
    events = [_data_of(event) for event in EVENT_END.split(data.removeprefix(BOM))]
    if DONE not in events:
        raise Lost("failed")
    return [_object(event) for event in events[: events.index(DONE)] if event]


def _data_of(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Lost("unreadable") from None
    if not isinstance(value, dict):
        raise Lost("unreadable")
    return value
