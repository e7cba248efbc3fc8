"""Reads OpenTelemetry spans of model calls (GenAI semantic conventions) as exchanges.

The file is OTLP JSON lines, each an object with `resourceSpans`, as written by the collector's file exporter. A span is
usable if it contains the messages: `gen_ai.input.messages`, `gen_ai.output.messages`, `gen_ai.system_instructions`,
`gen_ai.tool.definitions`, structured or as JSON text. Instrumented clients write them if configured to; vLLM's own
spans contain no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import PromptError, reraised
from paceline.loop.record.exchange import Exchange

OPERATIONS = ("chat", "generate_content")
FAILED = 2
"""Value of a span's status.code if the call failed."""
SAME = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty", "model")
REQUEST = {**{name: name for name in SAME}, "stop_sequences": "stop", "choice.count": "n"}
"""Suffix of the span attribute gen_ai.request.* -> name of the field in OpenAI's API."""
USAGE = {
    "prompt_tokens": ("input_tokens", "prompt_tokens"),
    "completion_tokens": ("output_tokens", "completion_tokens"),
}
"""OpenAI's name of a token count -> suffixes of the span attribute gen_ai.usage.*, newest convention first."""
FINISHED = {"tool_call": "tool_calls"}
DAMAGED = (ValueError, RecursionError, TypeError, AttributeError, KeyError)
"""Exceptions that reading a damaged line may raise."""


def exchanges(path: Path) -> Iterator[Exchange]:
    """Yields the model calls (request and answer) in a file of OpenTelemetry spans. Skips spans that failed, or that do
    not contain the text of request and answer. Raises PromptError naming a damaged line, or if no span is usable."""
    num_spans = num_exchanges = 0
    with reraised(PromptError, f"cannot read {path}", "check --import", OSError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where, remedy = f"{path}, line {number}", "this is no OTLP JSON of spans, an object of resourceSpans a line"
            with reraised(PromptError, where, remedy, *DAMAGED):
                spans = list(_spans(json.loads(line)))
                parsed = [exchange for span in spans if (exchange := _exchange(span))]
            num_spans += len(spans)
            num_exchanges += len(parsed)
            yield from parsed
    if not num_exchanges:
        raise PromptError(
            f"{path} holds {num_spans} spans, none of an answered request with its text (gen_ai.input.messages and "
            "gen_ai.output.messages): vLLM's own have none; let the client's instrumentation record contents"
        )


def _spans(line: Any) -> Iterator[dict[str, Any]]:
    if "resourceSpans" not in line:
        raise ValueError(f"no resourceSpans but {', '.join(map(str, line))[:80] or 'nothing'}")
    for resource in line["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


def _exchange(span: dict[str, Any]) -> Exchange | None:
    """Parses one span; returns None if it failed, is another operation, or contains no text."""
    attributes = {each["key"]: _value(each["value"]) for each in span.get("attributes", ())}
    inputs = _structured(attributes.get("gen_ai.input.messages"))
    outputs = _structured(attributes.get("gen_ai.output.messages"))
    is_wrong = attributes.get("gen_ai.operation.name", "chat") not in OPERATIONS or "error.type" in attributes
    if is_wrong or not inputs or not outputs or (span.get("status") or {}).get("code") in (FAILED, "STATUS_CODE_ERROR"):
        return None
    system = _structured(attributes.get("gen_ai.system_instructions"))
    messages = [_message({"role": "system", "parts": system})] if system else []
    messages += [_message(each) for each in inputs]
    request = {
        openai: attributes[f"gen_ai.request.{name}"]
        for name, openai in REQUEST.items()
        if f"gen_ai.request.{name}" in attributes
    }
    if tools := _structured(attributes.get("gen_ai.tool.definitions")):
        request["tools"] = [_tool(each) for each in tools]
    usage = {
        openai: int(attributes[f"gen_ai.usage.{name}"])
        for openai, names in USAGE.items()
        for name in reversed(names)
        if f"gen_ai.usage.{name}" in attributes
    }
    model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
    ids = span.get("traceId"), span.get("spanId")
    began, ended = (int(span.get(f"{name}TimeUnixNano") or 0) / 1e9 for name in ("start", "end"))
    return Exchange(
        is_chat=True,
        request={**request, "messages": messages},
        chunks=[{"model": model, "choices": [_choice(*each) for each in enumerate(outputs)], "usage": usage}],
        ended=ended or None,
        seconds={"total": ended - began if began and ended else None},
        logged_as=" ".join(map(str, ids)) if all(ids) else json.dumps(span, sort_keys=True),
    )


def _choice(index: int, message: dict[str, Any]) -> dict[str, Any]:
    reason = message.get("finish_reason") or "unknown"
    return {"index": index, "message": _message(message), "finish_reason": FINISHED.get(reason, reason)}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Converts a message to OpenAI's format. Unknown parts become an `audio` part, which the reader rejects."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    role = message["role"]
    for part in message.get("parts") or ():
        kind = part["type"]
        if kind == "text":
            texts.append(part["content"])
        elif kind == "tool_call":
            arguments = part.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            function = {"name": part["name"], "arguments": text}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result"))
            texts.append(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))
            more["tool_call_id"] = part.get("id")
        elif kind == "reasoning":
            more["reasoning"] = part.get("content") or True
        else:
            more["audio"] = kind
    return {"role": role, "content": "\n".join(texts) or None, **({"tool_calls": calls} if calls else {}), **more}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _structured(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _value(value: dict[str, Any]) -> Any:
    """Converts an OTLP AnyValue, in which 64-bit integers are text."""
    if not value:
        return None
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", ())]
    if kind == "kvlistValue":
        return {each["key"]: _value(each["value"]) for each in content.get("values", ())}
    return int(content) if kind == "intValue" else content
