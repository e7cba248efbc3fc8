"""A request and its answer: as the proxy's bytes (`Observed`), and parsed in OpenAI's format (`Exchange`).

recording proxy:              Observed -> Exchange
vLLM's log or OTLP spans:                 Exchange
both, in reader.py:                       Exchange -> Reader -> Trace
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

RECORDED_PATHS = {"/chat/completions": True, "/completions": False}
"""Suffix of a recorded request's URL path -> True for chats, False for plain completions."""
ADDED: dict[str, dict[bool, tuple[str, ...]]] = {
    "none": {True: (), False: ()},
    "vllm": dict.fromkeys((True, False), ("return_token_ids",)),
    "sglang": {
        True: ("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_spec_tokens_details"),
        False: ("return_token_ids", "return_spec_tokens_details"),
    },
}
"""`RecordConfig.add_fields` -> True for chats, False for plain completions -> request fields that the proxy sets.
SGLang rejects return_token_ids in streamed chats."""
MAX_BYTES = 8 * 2**20
"""Size limit in bytes of a recorded request or answer; larger ones are forwarded, but not recorded."""
MAX_DECODED = 64 * 2**20
EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
"""End of a server-sent event: two line ends of any kind (HTML, 9.2.5). A \\r\\n is one line end."""
MAX_MEMBERS = 1000
"""Limit on the members (concatenated parts) of a gzip body: decompressing each one copies all later ones."""
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A parsed request to a model and its answer, from the proxy or from a log file."""

    is_chat: bool
    request: dict[str, Any]
    """Body of the chat completion or completion request."""
    chunks: list[dict[str, Any]]
    """Chunks of a streamed answer; for any other answer, its body as the only element."""
    ended: float | None = None
    """Time at which the answer ended, in seconds since 1970."""
    tag: str | None = None
    seconds: dict[str, float | None] = field(default_factory=dict)
    """Seconds from the request to the first token ("first_token") and to the end of the answer ("total"), if known."""
    has_sampling: bool = True
    """False if the log leaves out sampling fields that the client may have set."""
    logged_as: str = ""
    """Text that identifies the exchange in its log; empty if it comes from the proxy."""

    @property
    def mark(self) -> str | None:
        """Identifier of this exchange in its log file, by which a later import recognises and skips it: a hash of its
        text, in sixteen hex digits. None for an exchange from the proxy."""
        text = self.logged_as.encode(errors="replace")
        return hashlib.blake2b(text, digest_size=8).hexdigest() if text else None


class Body:
    """Collects the bytes of a request's or an answer's body; discards them all if they exceed 8 MiB (MAX_BYTES)."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.num_bytes = 0
        self.encoding = ""
        """Value of Content-Encoding."""

    def take(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        if self.num_bytes <= MAX_BYTES:
            self.pieces.append(piece)
        else:
            self.pieces.clear()

    def decoded(self) -> bytes:
        """Returns the decompressed body. Raises Lost (the request cannot be recorded) if it is too large, damaged, or
        in an unknown encoding."""
        data = b"".join(self.pieces)
        if self.num_bytes > MAX_BYTES:
            raise Lost("size")
        if self.encoding in ("", "identity"):
            return data
        if self.encoding not in ("gzip", "x-gzip", "deflate"):
            raise Lost("encoding")
        return _unpacked(data)


class Observed:
    """One request and its answer while the proxy forwards them: their bytes, and the times of the answer's first and
    last byte."""

    def __init__(self, is_chat: bool, headers: Headers) -> None:
        self.is_chat, self.tag = is_chat, headers.get("x-paceline-tag")
        self.request, self.answer = Body(), Body()
        self.request.encoding = headers.get("content-encoding", "").strip().lower()
        self.is_answered = False
        """True if the status is 200; failed requests are not recorded."""
        self._is_stream = False
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._ended = self._ended_s = 0.0

    @classmethod
    def of(cls, scope: Scope) -> Observed | None:
        """Returns an empty `Observed` for the request with this ASGI scope; None if it is not a chat or completion
        request."""
        is_chat = next((is_chat for end, is_chat in RECORDED_PATHS.items() if scope["path"].endswith(end)), None)
        return None if is_chat is None or scope["method"] != "POST" else cls(is_chat, Headers(scope=scope))

    @property
    def num_bytes(self) -> int:
        return self.request.num_bytes + self.answer.num_bytes

    def begins(self, status: int, raw: list[tuple[bytes, bytes]]) -> None:
        """Stores the answer's status, content type and encoding. `raw`: its headers, as (name, value) pairs."""
        headers = Headers(raw=[(name.lower(), value) for name, value in raw])
        self.is_answered = status == 200
        self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
        self.answer.encoding = headers.get("content-encoding", "").strip().lower()

    def take(self, piece: bytes) -> None:
        """Appends one piece of the answer's body. The first call stores the time of the first byte."""
        self._first_s = self._first_s or time.perf_counter()
        self.answer.take(piece)

    def ends(self) -> None:
        self._ended, self._ended_s = time.time(), time.perf_counter()

    def exchange(self) -> Exchange:
        """Parses the recorded bytes. This takes milliseconds, so the proxy does it in another thread. Raises Lost (the
        request cannot be recorded) if request or answer is too large, incomplete or invalid JSON."""
        request, answer = _object(self.request.decoded()), self.answer.decoded()
        first_token_s = self._first_s - self._began_s if self._first_s and self._is_stream else None
        return Exchange(
            is_chat=self.is_chat,
            request=request,
            chunks=_chunks(answer) if self._is_stream else [_object(answer)],
            ended=self._ended,
            tag=self.tag,
            seconds={"first_token": first_token_s, "total": self._ended_s - self._began_s},
        )


def with_fields(body: bytes, names: tuple[str, ...]) -> bytes:
    """Sets the fields `names` of the JSON object `body` to true, except those that it has already. All other bytes stay
    unchanged. A body that is not a JSON object is returned as it is."""
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        return body
    missing = [name for name in names if isinstance(request, dict) and name not in request]
    if not missing:
        return body
    added = ", ".join(f'"{name}": true' for name in missing) + (", " if request else "")
    before, brace, after = body.partition(b"{")
    return before + brace + added.encode() + after


def _unpacked(packed: bytes) -> bytes:
    """Decompresses gzip, with up to MAX_MEMBERS members (RFC 1952, 2.2), or zlib. Raises Lost."""
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
    """Parses the JSON objects of a stream of server-sent events. Raises Lost if the stream is incomplete."""
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
