"""Assembles the response to a request from its chunks: answers, token ids, usage and acceptance, as vLLM, SGLang and
paceline send them in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.loop.record.rounds import SGLANG_PREFIX
from paceline.serve.admin.traces import Lost

PARSED = ("tool_calls", "reasoning", "reasoning_content", "refusal", "audio", "function_call")
"""Fields of an answer's message that the server parsed from the model's output; the output itself is then unknown."""
RENDERED = frozenset({"tool_calls", "reasoning", "reasoning_content"})
"""The PARSED fields that a chat template can write again (`rendered.py`)."""


@dataclass(slots=True)
class Choice:
    """One answer in a response, assembled from the chunks of a stream or from a body."""

    text: str = ""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_parsed: bool = False
    """True if the server parsed some of the model's output into other fields than the text, such as tool calls. The
    output itself is then unknown."""
    is_rendered: bool = True
    """False if a chat template cannot write one of these fields again."""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    """Index of a tool call -> its `id`, `name` and `arguments`."""
    acceptance: Any = None
    """The engine's report on drafted and accepted tokens of this answer, for `rounds_of`; None without one."""

    def message(self) -> dict[str, Any]:
        """Returns the answer as an assistant message in OpenAI's format."""
        calls = []
        for _, call in sorted(self.calls.items()):
            function = {"name": call["name"], "arguments": call["arguments"]}
            calls.append({"id": call["id"] or None, "type": "function", "function": function})
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": calls} if calls else {})

    def add(self, part: dict[str, Any]) -> None:
        """Adds the part of this answer that one chunk contains. `part`: an element of the chunk's `choices` in OpenAI's
        format. Raises TypeError or ValueError if it is malformed."""
        message = part.get("delta") or part.get("message") or {}
        self.text += part.get("text") or message.get("content") or ""
        parsed = {name for name in PARSED if message.get(name)}
        self.is_parsed |= bool(parsed)
        self.is_rendered &= parsed <= RENDERED
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if isinstance(reasoning, str):
            self.reasoning += reasoning
        else:
            self.is_rendered = False
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._add_call(place if call.get("index") is None else int(call["index"]), call)
        self.finish_reason = text_or_none(part.get("finish_reason")) or self.finish_reason
        self.stop_reason = self.stop_reason if part.get("stop_reason") is None else part["stop_reason"]
        self.prompt_ids = part.get("prompt_token_ids") or self.prompt_ids
        if part.get("token_ids") is not None:
            self.token_ids = [*(self.token_ids or []), *part["token_ids"]]
        details = part.get("meta_info") or {}
        if any(name.startswith(SGLANG_PREFIX) for name in details):  # else it does not speculate
            self.acceptance = details

    def _add_call(self, place: int, call: dict[str, Any]) -> None:
        known = self.calls.setdefault(place, {"id": "", "name": "", "arguments": ""})
        function = call.get("function") or {}
        known["id"] = text_or_none(call.get("id")) or known["id"]
        known["name"] += text_or_none(function.get("name")) or ""
        known["arguments"] += text_or_none(function.get("arguments")) or ""


@dataclass(slots=True)
class Response:
    """The response to a request, assembled from its chunks. `choices`: index -> answer."""

    model: str | None = None
    prompt_ids: list[int] | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    is_sglang: bool = False
    """True if the answers have SGLang's field `matched_stop`."""

    @classmethod
    def of(cls, chunks: Iterable[dict[str, Any]]) -> Response:
        """Assembles the response from its chunks (parsed JSON objects). Raises Lost (the request cannot be recorded) if
        the server reports an error, if its speculation may have changed the answer ("lossless": false), or if the
        chunks are malformed."""
        response, acceptance = cls(), list[Any]()
        for chunk in chunks:
            if chunk.get("error"):
                raise Lost("failed")
            if chunk.get("lossless") is False:
                raise Lost("lossy")
            try:
                response._add(chunk, acceptance)
            except (AttributeError, TypeError, ValueError):
                raise Lost("unreadable") from None
        if sorted(response.choices) != [*range(len(response.choices))]:
            raise Lost("unreadable")
        is_complete = len(acceptance) == len(response.choices)
        for index, choice in response.choices.items() if acceptance else ():
            choice.acceptance = acceptance[index] if is_complete else acceptance
        return response

    def _add(self, chunk: dict[str, Any], acceptance: list[Any]) -> None:
        """Adds one chunk. `acceptance` receives the reports that belong to the whole response, one for each answer."""
        self.model = text_or_none(chunk.get("model")) or self.model
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        self.usage = dict(chunk.get("usage") or self.usage)
        for part in chunk.get("choices") or ():
            self.is_sglang |= "matched_stop" in part
            self.choices.setdefault(int(part.get("index") or 0), Choice()).add(part)
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict) and (details := metrics.get("speculative_decoding")) is not None:
            acceptance[:] = [details]
        if (more := chunk.get("sglext")) is not None:
            self._add_sglext(more, acceptance)

    def _add_sglext(self, more: dict[str, Any], acceptance: list[Any]) -> None:
        """Adds SGLang's extension of OpenAI's format (`SglExt` in its protocol.py)."""
        self.prompt_ids = more.get("input_ids") or self.prompt_ids
        for index, ids in enumerate(more.get("output_ids") or []):
            self.choices.setdefault(index, Choice()).token_ids = [*ids]
        if (details := more.get("spec_tokens_details")) is not None:
            acceptance[:] = details if isinstance(details, list) else [details]


def text_or_none(value: Any) -> str | None:
    """Returns `value` unchanged if it is a string or None; raises TypeError otherwise."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return value
