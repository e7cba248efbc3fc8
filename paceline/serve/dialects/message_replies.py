"""Answers in the format of Anthropic's Messages API, as one object or as stream events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.serve.dialects.base import Part, Translated
from paceline.serve.http.failures import ApiError
from paceline.serve.replies.events import sse

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Finish reason of a chat -> stop reason of a message."""


class MessageExchange(Translated):
    """One request to Anthropic's Messages API. Converts its answer to that API's format."""

    def body(self) -> dict[str, Any]:
        return self._message() | {
            "content": [_block(part, is_whole=True) for part in self.parts],
            **self._stopped(),
            "usage": self._counts(),
        }

    def failed(self, error: ApiError) -> bytes:
        return sse(error.anthropic_body, "error")

    def begun(self) -> Iterator[dict[str, Any]]:
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._num_tokens()["prompt_tokens"], "output_tokens": 0}
        yield {"type": "message_start", "message": self._message() | empty | {"usage": usage}}

    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_start", "index": self._place, "content_block": _block(part, is_whole=False)}

    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        kind, key = ("input_json_delta", "partial_json") if part.call else ("text_delta", "text")
        yield {"type": "content_block_delta", "index": self._place, "delta": {"type": kind, key: text}}

    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": self._place}

    def finished(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stopped(), "usage": self._counts()}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {"id": f"msg_{self.key}", "type": "message", "role": "assistant", "model": self.name} | self.marks

    def _stopped(self) -> dict[str, Any]:
        stop = self._stop_sequence() if self.finish_reason == "stop" else None
        return {
            "stop_reason": "stop_sequence" if stop else REASONS.get(self.finish_reason or ""),
            "stop_sequence": stop,
        }

    def _stop_sequence(self) -> str | None:
        """Return the stop string, or the text of the stop token, that ended the answer."""
        (seq,) = self._sequences
        last = self._replies[0].token_text(seq.tokens[-1])
        return seq.stopped_by or (last if last in seq.params.stop else None)

    def _counts(self) -> dict[str, int]:
        """Return the token usage; Anthropic's input_tokens exclude cached tokens."""
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": self.usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage["completion_tokens"],
        }


def _block(part: Part, *, is_whole: bool) -> dict[str, Any]:
    """Return a content block; without `is_whole`, an empty one for the event that opens it."""
    if part.call is None:
        return {"type": "text", "text": part.text if is_whole else ""}
    arguments = json.loads(part.call["arguments"]) if is_whole else {}
    return {"type": "tool_use", "id": part.call["id"], "name": part.call["name"], "input": arguments}
