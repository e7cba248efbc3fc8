"""Formats tools and tool calls in prompts, with the model's template or in Hermes format, and the JSON schema of calls.

For a template that does not use the variable `tools`, a system message describes the tools, earlier calls and results
become text, and the model is instructed to answer with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.messages import parsed_object
from paceline.errors import PromptError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ROLES = {"developer": "system", "function": "tool"}
"""Role of a message -> the name that templates use instead."""
Message = Mapping[str, Any]


def with_tools(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Convert normalised messages and tools to the form that a chat template reads: returns (messages, template
    variables).

    If the template uses a variable `tools`, the tools are passed in this variable. Otherwise tools, calls and results
    are written into the messages as text. `template`: source of the template, None for a model without one. Raises
    PromptError for too deeply nested JSON.
    """
    is_native = bool(template and re.search(r"\btools\b", template))
    plain = [_native(message) if is_native else _as_text(message) for message in messages]
    if not tools:
        return plain, {}
    if is_native:
        return plain, {"tools": [*tools]}
    text = _description(tools)
    if plain and plain[0]["role"] == "system":
        text = f"{plain.pop(0)['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *plain], {}


def call_schema(tools: Sequence[dict[str, Any]]) -> str:
    """Return the JSON schema, as text, that a call of one of these tools must match. Raises PromptError if the
    parameters of a tool are not of type object, or if two tools define the same name (in "$defs" or "definitions")
    with different schemas."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = [_call_schema(tool["function"], definitions) for tool in tools]
    return compact((calls[0] if len(calls) == 1 else {"anyOf": calls}) | definitions)


def compact(value: Any, error: type[Exception] = PromptError) -> str:
    """Encode a value as JSON on one line. Raises `error` if it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise error("the JSON is nested too deeply: flatten it") from None


def json_or(text: str, otherwise: Any) -> Any:
    """Decode JSON; returns `otherwise` if the text is invalid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _call_schema(function: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of one tool's call. Moves its definitions to `definitions`, as `$ref` is relative to the root."""
    parameters = function.get("parameters") or {}
    kind = parameters.get("type") or "object"
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise PromptError(f"the parameters of tool {function['name']!r:.80} must be of type object: correct its schema")
    arguments = _closed(parameters)
    for key in ("$defs", "definitions"):
        schemas = arguments.pop(key, None)
        for name, value in schemas.items() if isinstance(schemas, dict) else ():
            if definitions.setdefault(key, {}).setdefault(name, value) != value:
                raise PromptError(f"two tools define {name!r} differently: rename one of them")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Schema of a call's arguments; a tool without parameters accepts only {}."""
    if {key for key, value in parameters.items() if value} <= {"type", "title", "description", "$schema"}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return dict(parameters)


def _native(message: Message) -> dict[str, Any]:
    """A message for a template with tools: arguments as an object, and reasoning under both of its names."""
    native = {**message, "role": _role(message)}
    if "reasoning_content" in message:
        native["reasoning"] = message["reasoning_content"]
    if "tool_calls" in message:
        native["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": parsed_object(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return native


def _as_text(message: Message) -> dict[str, Any]:
    text, calls = message["content"], message.get("tool_calls", ())
    if _role(message) == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    for call in calls:
        arguments = parsed_object(call["function"]["arguments"])
        text += f"\n{OPEN}\n{compact({'name': call['function']['name'], 'arguments': arguments})}\n{CLOSE}"
    more = _native({key: value for key, value in message.items() if key != "tool_calls"})
    return {**more, "content": text.lstrip("\n") if calls else text}


def _role(message: Message) -> str:
    role: str = message["role"]
    return ROLES.get(role, role)


def _description(tools: Sequence[dict[str, Any]]) -> str:
    """System message in the wording of Hermes 2 Pro, which many models were trained with."""
    lines = "\n".join(compact(tool) for tool in tools)
    return (
        "You are a function calling AI model. You may call one or more functions to assist with the user query.\n"
        f"Here are the available tools:\n<tools>\n{lines}\n</tools>\n"
        "For each function call return a JSON object with the function's name and arguments within tool_call tags:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <args-object>}}\n{CLOSE}'
    )
