"""Converts conversations and tools of OpenAI's API into one normal form for server, data rows, proxy, evals and
library.

In normal form, contents and call arguments are text, and old keys are replaced. It is itself a valid request for any
OpenAI-compatible server. `model/text/chat.py` renders it as a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import PromptError, shown

Message = dict[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the part's key that holds its text."""
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message in normal form."""
ALIASES = ("reasoning", "function_call", "refusal")
"""Old keys of a message; they are converted to `reasoning_content`, `tool_calls` and `content`."""
UNUSED_KEYS = {
    "annotations": "part of OpenAI's answers, which clients send back",
    "id": "clients' own name of the message",
    "index": "the message's place in a streamed answer",
    "opts": "clients' own notes",
    "parsed": "the content once more, as the openai package parsed it",
    "provider_specific_fields": "litellm's notes on the answer",
}
"""Message key that is accepted but not used for the prompt -> reason. Clients send it back with answers."""
UNUSED_PART_KEYS = {
    "annotations": "as of messages",
    "cache_control": "prefixes are always reused",
    "logprobs": "part of OpenAI's answers, which clients send back",
}
UNUSED_CALL_KEYS = {"index": "the call's place in a streamed answer", "provider_specific_fields": "as of messages"}
UNUSED_CALLED_KEYS = {
    "parsed_arguments": "the arguments once more, as the openai package parsed them",
    "provider_specific_fields": "as of messages",
}
"""Keys that are accepted but not used, in a content part (UNUSED_PART_KEYS), a tool call (UNUSED_CALL_KEYS), or its
function (UNUSED_CALLED_KEYS)."""
READ_KEYS = frozenset({*MESSAGE_KEYS, *ALIASES, *UNUSED_KEYS})
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
"""Keys of a tool's function in normal form, in the order of the prompt."""


class MessageError(PromptError):
    """Raised for a message that cannot become part of a prompt. `field` is the path of the invalid field, such as
    `messages[1].content`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def normalised(messages: Any) -> list[Message]:
    """Return a conversation's messages in normal form: contents and call arguments are text, and old keys of OpenAI's
    API are replaced by the current ones. Raises MessageError on an unknown key, a content part that is not text, or
    call arguments that are not a JSON object."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise MessageError("messages", 'must be a list of {"role": ..., "content": ...}')
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        example = "each message needs a role and a content, as in {'role': 'user', 'content': '...'}"
        raise MessageError(field, f"{example} (got {shown(message)})")
    own = {key: value for key, value in message.items() if value is not None}
    if unknown := own.keys() - READ_KEYS:
        names = ", ".join(sorted(map(str, unknown)))
        raise MessageError(
            f"{field}.{names}", f"no such field of a message: leave it out (known are {', '.join(MESSAGE_KEYS)})"
        )
    content_keys = {"content", "tool_calls", "function_call", "reasoning_content", "reasoning", "refusal"}
    if "content" not in message and not own.keys() & content_keys:
        raise MessageError(field, f"each message needs a role and a content (got {shown(message)})")
    text = content_text(own.get("content"), f"{field}.content") or _string(own, "refusal", field)
    normal: Message = {"role": own["role"], "content": text}
    normal |= {key: value for key in ("name", "tool_call_id") if (value := _string(own, key, field))}
    if calls := _calls(own, field):
        normal["tool_calls"] = calls
    if reasoning := _string(own, "reasoning_content", field) or _string(own, "reasoning", field):
        normal["reasoning_content"] = reasoning
    return normal


def _string(message: Message, key: str, field: str) -> str:
    value = message.get(key, "")
    if not isinstance(value, str):
        raise MessageError(f"{field}.{key}", f"must be text, not {type(value).__name__}")
    return value


def content_text(content: Any, field: str = "content") -> str:
    """Return the text of a message's content; several text parts are joined by line breaks, as in vLLM. `field`: path
    of the content, for error messages. Raises MessageError on other content, such as images."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise MessageError(field, f"must be text or a list of text parts, not {type(content).__name__}")
    return "\n".join(_part(part, f"{field}[{place}]") for place, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(field, f'must be a part as {{"type": "text", "text": ...}}, not {type(part).__name__}')
    kind = part.get("type") or "text"
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise MessageError(field, f"content of type {kind!r:.80} is not supported: this model reads text")
    key = TEXT_PARTS[kind]
    _refuse_unknown(part, {"type", key, *UNUSED_PART_KEYS}, field, f"a {kind} part")
    if not isinstance(part.get(key), str):
        raise MessageError(f"{field}.{key}", f"must be text, not {type(part.get(key)).__name__}")
    return str(part[key])


def _refuse_unknown(given: Mapping[Any, Any], known: set[str], field: str, what: str) -> None:
    """Raise MessageError if `given` has another field than the known ones; it names the first of them."""
    if unknown := {name for name, value in given.items() if value is not None} - known:
        raise MessageError(f"{field}.{sorted(map(str, unknown))[0]}", f"no such field of {what}: leave it out")


def _calls(message: Message, field: str) -> list[dict[str, Any]]:
    calls, old = message.get("tool_calls") or [], message.get("function_call")
    if not isinstance(calls, Iterable) or isinstance(calls, (str, bytes, Mapping)):
        raise MessageError(f"{field}.tool_calls", "must be a list of calls")
    if calls and old is not None:
        raise MessageError(f"{field}.function_call", "a message has either tool_calls or the older function_call")
    if old is not None:
        return [{"type": "function", "function": _called(old, f"{field}.function_call")}]
    return [_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(calls)]


def _call(call: Any, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or call.get("type") not in (None, "function"):
        raise MessageError(
            field, 'must be {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        )
    _refuse_unknown(call, {"id", "type", "function", *UNUSED_CALL_KEYS}, field, "a call")
    name = _string(dict(call), "id", field) if call.get("id") is not None else ""
    function = _called(call.get("function"), f"{field}.function")
    return ({"id": name} if name else {}) | {"type": "function", "function": function}


def _called(function: Any, field: str) -> dict[str, Any]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageError(f"{field}.name", "a call needs the name of its function")
    _refuse_unknown(function, {"name", "arguments", *UNUSED_CALLED_KEYS}, field, "a called function")
    return {"name": function["name"], "arguments": _arguments(function.get("arguments"), f"{field}.arguments")}


def _arguments(given: Any, field: str) -> str:
    """Return the arguments of a call as the JSON text of an object; text is returned unchanged."""
    if given is None or given == "":
        return "{}"
    if not isinstance(given, (str, Mapping)):
        raise MessageError(field, f"must be a JSON object, or the text of one, not {type(given).__name__}")
    try:
        text = given if isinstance(given, str) else json.dumps(dict(given), ensure_ascii=False, allow_nan=False)
        arguments = parsed_object(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise MessageError(
            field, f"must be the text of a JSON object ({str(error)[:100]}), not {str(given)[:80]!r}"
        ) from None
    return text if arguments or text.strip() == "{}" else "{}"


def parsed_object(text: str) -> dict[str, Any]:
    """Parse the text of a JSON object. Raises ValueError if it is another value or has a number that is NaN or out of
    range; RecursionError if it is nested too deeply."""
    value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    if not isinstance(value, dict):
        raise ValueError(f"it is of type {type(value).__name__}")
    return value


def _refuse_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:20]} is too large a number")
    return value


def normalised_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools in normal form, as prompts show them: each function's keys are in a fixed order, and null values are
    left out. Raises MessageError unless each tool has a function with a name."""
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise MessageError("tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]


def _tool(tool: Any, field: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(field, 'must be {"type": "function", "function": {"name": ...}}')
    known = {key: function[key] for key in FUNCTION_KEYS if function.get(key) is not None}
    more = {key: value for key, value in function.items() if key not in FUNCTION_KEYS and value is not None}
    return {"type": "function", "function": known | more}
