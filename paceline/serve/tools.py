"""Tools: into the prompt, through the model's template or as Hermes has it, and calls out of the answer.

A template that knows `tools` gets them. For any other a system message describes them, earlier calls and their results become
text, and the model is asked for `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; the parser reads that form from any
model, and a bare JSON call where the whole answer is one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.model.tokenizer import num_undecided
from paceline.serve.failures import RequestRefused, compact
from paceline.serve.protocol import ChatRequest, Message, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(tool, definitions) for tool in tools]
    return compact((calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions)


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Definitions move to the root of the document, which `$ref` counts from."""
    arguments = dict(tool.function.parameters or {"type": "object"})
    for key in ("$defs", "definitions"):
        found = arguments.pop(key, None)
        for name, value in found.items() if isinstance(found, dict) else ():
            if definitions.setdefault(key, {}).setdefault(name, value) != value:
                raise RequestRefused(f"two tools define {name!r} differently: rename one of them", param="tools")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def prompt_messages(
    messages: list[Message], tools: Sequence[Tool], template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for the chat template."""
    is_native = bool(template and re.search(r"\btools\b", template))
    plain = [_native(message) if is_native else _as_text(message) for message in messages]
    if not tools:
        return plain, {}
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    if is_native:
        return plain, {"tools": described}
    text = _description(described)
    if plain[0]["role"] == "system":
        text = f"{plain.pop(0)['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *plain], {}


def _native(message: Message) -> dict[str, Any]:
    calls = []
    for call in message.tool_calls or ():
        name, arguments = call.function.name, call.function.arguments
        # templates expect arguments as an object
        calls.append({"type": "function", "function": {"name": name, "arguments": _json(arguments, arguments)}})
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "tool_calls": calls or None}
    return {"role": _role(message), "content": text_of(message), **{key: value for key, value in more.items() if value}}


def _as_text(message: Message) -> dict[str, Any]:
    text = text_of(message)
    if _role(message) == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    for call in message.tool_calls or ():
        arguments = _json(call.function.arguments, {})
        text += f"\n{OPEN}\n{compact({'name': call.function.name, 'arguments': arguments})}\n{CLOSE}"
    return {"role": _role(message), "content": text.lstrip("\n") if message.tool_calls else text}


def _role(message: Message) -> str:
    return {"developer": "system", "function": "tool"}.get(message.role, message.role)


def text_of(message: Message) -> str:
    """A message's text. Raises RequestRefused on parts that are no text."""
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text") or part.text is None:
            raise RequestRefused(f"content of type {part.type!r} is not supported: this model reads text", param="messages")
    return "\n".join(part.text or "" for part in message.content)


def _description(tools: list[dict[str, Any]]) -> str:
    """The wording of Hermes 2 Pro, which many models were trained on."""
    lines = "\n".join(compact(tool) for tool in tools)
    return (
        "You are a function calling AI model. You may call one or more functions to assist with the user query.\n"
        f"Here are the available tools:\n<tools>\n{lines}\n</tools>\n"
        "For each function call return a JSON object with the function's name and arguments within tool_call tags:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <args-object>}}\n{CLOSE}'
    )


def read_call(text: str, names: set[str]) -> Call | None:
    """A call of one of these tools, if the text is just that."""
    value = _json(text.strip(), None)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _json(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


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
