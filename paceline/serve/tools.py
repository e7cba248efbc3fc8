"""Tools: into the prompt, as `model/tools.py` has it, and calls out of the answer.

The parser reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` from any model, and a bare JSON call where the whole
answer is one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PromptError
from paceline.model.tokenizer import num_undecided
from paceline.model.tools import CLOSE, OPEN, call_schema, json_or, with_tools
from paceline.serve.failures import RequestRefused
from paceline.serve.protocol import ChatRequest, Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the answer; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def tools_of(request: ChatRequest) -> list[Tool]:
    """The tools that this answer may call. Raises RequestRefused when the choice names none of them."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, ToolCall) and choice.function.name not in {tool.function.name for tool in tools}:
        raise RequestRefused(f"tool_choice names {choice.function.name!r}, which is not among the tools", param="tool_choice")
    if choice == "required" and not tools:
        raise RequestRefused("tool_choice is required, but there are no tools", param="tool_choice")
    return [] if choice == "none" else tools


def forced_schema(request: ChatRequest) -> str | None:
    """JSON schema of the one call that the answer must be, or None when it may also be text."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tools = tools_of(request)
    if isinstance(choice, ToolCall):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    try:
        return call_schema(_plain(tools))
    except PromptError as error:
        raise RequestRefused(str(error), param="tools") from error


def prompt_messages(
    messages: list[Message], tools: Sequence[Tool], template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for the chat template. Raises RequestRefused on parts that are no text."""
    said = [message.model_dump(exclude_none=True) | {"content": text_of(message)} for message in messages]
    try:
        return with_tools(said, _plain(tools), template)
    except PromptError as error:
        raise RequestRefused(str(error), param="messages") from error


def _plain(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def text_of(message: Message) -> str:
    """A message's text. Raises RequestRefused on parts that are no text."""
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestRefused(f"content of type {part.type!r} is not supported: this model reads text", param="messages")
    return "\n".join(part.text or "" for part in message.content)


def read_call(text: str, names: set[str]) -> Call | None:
    """A call of one of these tools, if the text is just that."""
    value = json_or(text.strip(), None)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


class CallParser:
    """Parts an answer, as it grows, into text for people and calls. Text that may be the beginning of a call waits."""

    def __init__(self, tools: list[Tool], *, is_whole: bool = False) -> None:
        """`is_whole`: the answer is one bare call, or text."""
        self._names = {tool.function.name for tool in tools}
        self._held, self._is_whole = "", is_whole
        self._is_start = True

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; returns what is now text, and the calls that are now complete."""
        self._held += text
        if self._is_whole:
            return "", []
        shown, calls = "", []
        while (begin := self._held.find(OPEN)) >= 0:
            before = "" if self._held[:begin].isspace() else self._held[:begin]
            end = self._held.find(CLOSE, begin)
            if end < 0:
                self._held = self._held[begin:]
                return shown + before, calls
            inside, after = self._held[begin + len(OPEN) : end], end + len(CLOSE)
            call = read_call(inside, self._names)
            shown += before if call else self._held[:after]
            calls += [call] if call else []
            self._held, self._is_start = self._held[after:], False
        if self._is_start and self._held.lstrip()[:1] in ("", "{"):
            return shown, calls  # the whole answer may be one bare call
        self._is_start = False
        safe = len(self._held) - num_undecided(self._held, (OPEN,))
        text, self._held = self._held[:safe], self._held[safe:]
        return shown + text, calls

    def finish(self) -> tuple[str, list[Call]]:
        """No more text: what waited is a call, or text after all."""
        held, self._held = self._held, ""
        call = read_call(held.removeprefix(OPEN), self._names)
        return ("", [call]) if call else (held, [])
