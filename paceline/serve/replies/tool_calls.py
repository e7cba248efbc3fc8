"""Parses tool calls in answers, streamed or complete; arguments keep the model's own JSON text.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` is a call anywhere in an answer; several objects in one tag
are several calls. Calls without tags are recognised if they are the whole answer, bare or in one Markdown fence.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.data.messages import parsed_object
from paceline.model.text.tokenizer import num_undecided
from paceline.model.text.tools import CLOSE, OPEN

QUOTE_OR_BRACE, IN_STRING = re.compile(r'["{}]'), re.compile(r'["\\]')
FENCE = re.compile(r"```[A-Za-z_]*[ \t]*\n")
FENCE_SO_FAR = re.compile(r"`{1,2}|```[A-Za-z_]*[ \t]*")
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in an answer: the tool's name, and its arguments as JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call as OpenAI's tool call object, with a new random id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def read_call(text: str, names: set[str]) -> Call | None:
    """Parse `text`, a JSON object, as a call of one of the tools `names`; None if it is not one."""
    try:
        spans = _members(text.strip(SPACE))
        name = json.loads(spans.get("name", "null"))
        arguments = spans.get("arguments", spans.get("parameters", "{}"))
        if arguments.startswith('"'):
            arguments = json.loads(arguments) or "{}"
        if arguments == "null":
            arguments = "{}"
        parsed_object(arguments)
    except (ValueError, RecursionError):
        return None
    return Call(name, arguments) if isinstance(name, str) and name in names else None


def _members(text: str) -> dict[str, str]:
    """Return key -> source text of the value in a JSON object. Raises ValueError, or RecursionError on deep nesting."""
    parsed_object(text)  # raises if it is not well-formed
    decoder, place, members = json.JSONDecoder(), _skip(text, 1), dict[str, str]()
    while text[place] != "}":
        key, place = decoder.raw_decode(text, place)
        begin = _skip(text, _skip(text, place) + 1)
        _, place = decoder.raw_decode(text, begin)
        members[key] = text[begin:place]
        place = _skip(text, place)
        place = _skip(text, place + 1) if text[place] == "," else place
    return members


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in SPACE:
        place += 1
    return place


class ObjectScan:
    """Finds the end of the JSON object at the offset `begin` in a text that still grows. Each character is read
    once."""

    def __init__(self, begin: int) -> None:
        self._place, self._depth, self._is_string = begin, 0, False

    def end(self, text: str) -> int | None:
        """Return the offset after the object's closing brace, None if it has not arrived yet. `text`: all of the text
        so far."""
        while mark := (IN_STRING if self._is_string else QUOTE_OR_BRACE).search(text, self._place):
            self._place = mark.end()
            if mark[0] == "\\":
                if self._place == len(text):
                    self._place -= 1  # the escaped character has not arrived
                    return None
                self._place += 1
            elif mark[0] == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth == 0:
                    return self._place
        self._place = len(text)
        return None


@dataclass(slots=True)
class _Objects:
    """Consecutive calls at one place in a text."""

    calls: list[Call]
    end: int
    """Offset after the calls and white space."""
    is_open: bool
    """True if more text may add calls."""
    is_wrong: bool = False
    """True if an object is not a call."""
    is_inside: bool = False
    """True if the text ends within an object that starts at `end`."""


def _read_objects(text: str, place: int, names: set[str]) -> _Objects:
    calls: list[Call] = []
    while True:
        place = _skip(text, place)
        if place == len(text):
            return _Objects(calls, place, is_open=True)
        if text[place] != "{":
            return _Objects(calls, place, is_open=False, is_wrong=not calls)
        end = ObjectScan(place).end(text)
        if end is None:
            return _Objects(calls, place, is_open=True, is_inside=True)
        call = read_call(text[place:end], names)
        if call is None:
            return _Objects(calls, place, is_open=False, is_wrong=True)
        calls.append(call)
        place = end


Piece = str | Call
"""A part of an answer: a text, or a tool call."""


class CallParser:
    """Splits a streamed answer into texts and tool calls, in order. `push` takes the answer in pieces of any size. Text
    that could be the beginning of a call is held back until later text shows whether it is one. White space before a
    call and after the last call is dropped."""

    def __init__(self, names: Iterable[str], *, is_whole: bool = False, most: int | None = None) -> None:
        """`names`: the tools that may be called. `is_whole`: the whole answer is calls without tags, or text, and is
        parsed at its end. `most`: maximum number of calls; later ones are dropped."""
        self._names = set(names)
        self._held, self._is_whole, self._most = "", is_whole, most
        self._num_calls = 0
        self._scan: ObjectScan | None = None
        """Scan of the unfinished object at the end of the held text."""
        self._is_start, self._has_text = True, False

    def push(self, text: str) -> list[Piece]:
        """Add the next text of the answer. Returns the texts that can be sent now and the complete calls, in order."""
        self._held += text
        if self._is_whole or (self._scan and self._scan.end(self._held) is None):
            return []
        self._scan = None
        self._is_start = self._is_start and self._whole(is_end=False) is not None
        return [] if self._is_start else [piece for piece in self._read(is_end=False) if piece]

    def finish(self) -> list[Piece]:
        """End the answer. Returns the texts and calls in the text that was held back, in order."""
        if self._is_whole or self._is_start:
            calls = self._whole(is_end=True)
            if calls:
                self._held = ""
                return [*self._counted(calls)]
        if self._is_whole:
            text, self._held = self._held, ""
            return [text] if text else []
        return [piece for piece in self._read(is_end=True) if piece]

    def _counted(self, calls: list[Call]) -> list[Call]:
        """Count calls; returns those within the limit."""
        left = len(calls) if self._most is None else max(self._most - self._num_calls, 0)
        self._num_calls += len(calls)
        return calls[:left]

    def _whole(self, *, is_end: bool) -> list[Call] | None:
        """Return the calls if they are the whole answer; an empty list while that is possible, else None."""
        text = self._held.strip(SPACE) if is_end else self._held.lstrip(SPACE)
        fence = FENCE.match(text)
        if fence is None and text.startswith("`"):
            return None if is_end or not FENCE_SO_FAR.fullmatch(text) else []
        objects = _read_objects(text, fence.end() if fence else 0, self._names)
        if objects.is_wrong:
            return None
        rest = text[objects.end :]
        if is_end:
            closes = rest in ("", "```") if fence else not rest
            return (objects.calls or None) if closes else None
        if objects.is_inside:
            self._scan = ObjectScan(len(self._held) - len(text) + objects.end)
        if objects.is_open or (fence and "```".startswith(rest.rstrip(SPACE))):
            return []
        return None

    def _read(self, *, is_end: bool) -> list[Piece]:
        """Return texts, which may be empty, and tagged calls of the held text; keeps what is undecided."""
        pieces: list[Piece] = []
        while True:
            if self._num_calls and not self._has_text:
                self._held = self._held.lstrip(SPACE)
            begin = self._held.find(OPEN)
            if begin < 0:
                is_over = is_end and not (self._num_calls and not self._held.strip(SPACE))
                safe = len(self._held) if is_over else self._num_safe()
                text, self._held = self._held[:safe], self._held[safe:]
                self._has_text |= bool(text)
                return [*pieces, text]
            tagged = _read_objects(self._held, begin + len(OPEN), self._names)
            rest = self._held[tagged.end :]
            is_undecided = tagged.is_open or (not tagged.is_wrong and CLOSE.startswith(rest))
            if is_undecided and not is_end:
                safe = len(self._held[:begin].rstrip(SPACE))
                text, self._held = self._held[:safe], self._held[safe:]
                self._has_text |= bool(text)
                self._scan = ObjectScan(tagged.end - safe) if tagged.is_inside else None
                return [*pieces, text]
            has_ended = rest.startswith(CLOSE) or (is_end and is_undecided and not rest.startswith("{"))
            if tagged.is_wrong or not tagged.calls or not has_ended:
                pieces.append(self._held[: begin + len(OPEN)])
                self._held, self._has_text = self._held[begin + len(OPEN) :], True
                continue
            pieces += [text := self._held[:begin].rstrip(SPACE), *self._counted(tagged.calls)]
            self._held = rest.removeprefix(CLOSE) if rest.startswith(CLOSE) else ""
            self._has_text |= bool(text)

    def _num_safe(self) -> int:
        """Return the number of held characters that are text: no partial tag, and no white space that may precede
        one."""
        size = len(self._held) - num_undecided(self._held, (OPEN,))
        return len(self._held[:size].rstrip(SPACE))
