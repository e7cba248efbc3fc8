"""Answers in the format of OpenAI's Responses API, as one object or as stream events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.serve.dialects.base import Part, Translated
from paceline.serve.http.failures import ApiError


class ResponseExchange(Translated):
    """One request to OpenAI's Responses API. Converts its answer to that API's format."""

    def __init__(self, *arguments: Any, body: Any, **options: Any) -> None:
        """`body` is the ResponsesRequest (not named in the type, because its module imports this one)."""
        super().__init__(*arguments, is_stream=bool(body.stream), **options)
        self._body = body
        self._num_events = 0
        self._error: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return self._response() | {"output": [_item(part, self._status) for part in self.parts]}

    def sent(self, event: dict[str, Any]) -> bytes:
        self._num_events += 1
        return super().sent(event | {"sequence_number": self._num_events - 1})

    def failed(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = {"code": code, "message": error.message}
        return self.sent({"type": "response.failed", "response": self.body()})

    def begun(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self.body()}

    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        empty = Part(part.call and part.call | {"arguments": ""}, key=part.key)
        item = _item(empty, "in_progress")
        if not part.call:
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": self._place, "item": item}
        if not part.call:
            yield {"type": "response.content_part.added", **self._at(part), "part": _text(empty)}

    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if part.call:
            yield {"type": "response.function_call_arguments.delta", **self._at(part), "delta": text}
        else:
            yield {"type": "response.output_text.delta", **self._at(part), "delta": text, "logprobs": logprobs}

    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.call:
            names = {"name": part.call["name"], "arguments": part.call["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._at(part), **names}
        else:
            yield {"type": "response.output_text.done", **self._at(part), "text": part.text, "logprobs": part.logprobs}
            yield {"type": "response.content_part.done", **self._at(part), "part": _text(part)}
        status = self._status if self.finish_reason else "completed"
        yield {"type": "response.output_item.done", "output_index": self._place, "item": _item(part, status)}

    def finished(self) -> Iterator[dict[str, Any]]:
        yield {"type": f"response.{self._status}", "response": self.body()}

    @property
    def _status(self) -> str:
        if self._error:
            return "failed"
        if not self.finish_reason:
            return "in_progress"
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _at(self, part: Part) -> dict[str, Any]:
        place = {"output_index": self._place, "item_id": _item_id(part)}
        return place if part.call else place | {"content_index": 0}

    def _response(self) -> dict[str, Any]:
        """Return the response object without its output."""
        request, status = self._body, self._status
        plain = request.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self.name,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": plain.get("text") or {"format": {"type": "text"}},
            "tool_choice": plain.get("tool_choice") or "auto",
            "tools": [{"parameters": None, "strict": None} | tool for tool in plain.get("tools", [])],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._counts(),
        } | self.marks

    def _counts(self) -> dict[str, Any] | None:
        if not self.usage:
            return None
        return {
            "input_tokens": self.usage["prompt_tokens"],
            "input_tokens_details": self.usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": self.usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage["total_tokens"],
        }


def _item_id(part: Part) -> str:
    return f"{'fc' if part.call else 'msg'}_{part.key}"


def _text(part: Part) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _item(part: Part, status: str) -> dict[str, Any]:
    """Return a part as an item of the response's output."""
    known = {"id": _item_id(part), "status": "incomplete" if status == "failed" else status}
    if part.call is None:
        return {"type": "message", "role": "assistant", "content": [_text(part)], **known}
    call = {name: part.call[name] for name in ("name", "arguments")}
    return {"type": "function_call", "call_id": part.call["id"], **call, **known}
