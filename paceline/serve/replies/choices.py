"""Choices of chat completions and text completions in OpenAI's format."""

from __future__ import annotations

import math
from collections import deque
from itertools import accumulate
from typing import Any

from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.replies.events import Reply, finite
from paceline.serve.replies.tool_calls import Call, CallParser, Piece
from paceline.serve.requests.grammars import forced_schema
from paceline.serve.requests.prompts import tools_of
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.serve.worker.ticket import Event
from paceline.types import TokenLogprob


class ChatReply(Reply):
    """One answer of a chat completion, as an entry of OpenAI's `choices`."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: ChatRequest) -> None:
        super().__init__(index, tokenizer, request, has_logprobs=bool(request.logprobs))
        tools, is_forced = tools_of(request), forced_schema(request) is not None
        names, most = [tool.function.name for tool in tools], 1 if request.parallel_tool_calls is False else None
        self._parser = CallParser(names, is_whole=is_forced, most=most) if tools else None
        self.in_order: deque[list[Piece]] | None = None
        """Texts and calls of each chunk in the answer's order, which a chat's chunk does not have; None: not kept."""
        self._num_calls = 0
        self._is_begun = False

    def _shown(self, text: str, is_stream: bool) -> dict[str, Any] | None:
        pieces: list[Piece] = [text] if text else []
        if self._parser:
            pieces = self._parser.push(text) + (self._parser.finish() if self.sequence else [])
        if not pieces and self.sequence is None:
            return None
        if self.in_order is not None:
            self.in_order.append(pieces)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, Call)]
        numbered = [
            call.as_json() | ({"index": self._num_calls + place} if is_stream else {})
            for place, call in enumerate(calls)
        ]
        self._num_calls += len(calls)
        called = {"tool_calls": numbered} if calls else {}
        if not is_stream:
            content = None if calls and not text else text
            return {"message": {"role": "assistant", "content": content, "refusal": None} | called}
        delta: dict[str, Any] = {} if self._is_begun else {"role": "assistant", "content": ""}
        self._is_begun = True
        return {"delta": delta | ({"content": text} if text else {}) | called}

    def _reason(self) -> str | None:
        reason = super()._reason()
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _shown_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        shown = [
            self._token(token.token_id, token.logprob) | {"top_logprobs": [self._token(*pair) for pair in token.top]}
            for token in logprobs
        ]
        return {"content": shown, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }


class TextReply(Reply):
    """One answer of a text completion, as an entry of OpenAI's `choices`."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: CompletionRequest, echo: str) -> None:
        super().__init__(index, tokenizer, request, has_logprobs=request.logprobs is not None)
        self._unsent_echo, self._offset = echo, 0
        self._scores_prompt = bool(request.echo and request.logprobs is not None)

    def take(self, event: Event) -> None:
        if self._scores_prompt:  # the prompt's log-probabilities are complete when the first token arrives
            first, *_ = event.chunk.sequence.tokens
            self._logprobs += [TokenLogprob(first, math.nan), *event.chunk.sequence.prompt_logprobs]
            self._scores_prompt = False
        super().take(event)

    def _shown(self, text: str, is_stream: bool) -> dict[str, Any] | None:
        if not text and self.sequence is None and not self._unsent_echo:
            return None
        echo, self._unsent_echo = self._unsent_echo, ""
        return {"text": echo + text}

    def _shown_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Return OpenAI's logprobs object of text completions; a prompt's first token has null."""
        sizes = [len(self.token_text(one.token_id)) for one in logprobs]
        if sizes and not self._offset:  # decoding drops a first space
            sizes[0] = len(self.tokenizer.decode([logprobs[0].token_id], skip_special=False))
        *offsets, self._offset = accumulate(sizes, initial=self._offset)
        is_first = [math.isnan(one.logprob) for one in logprobs]
        tops = [{self._name(token): finite(value) for token, value in one.top} for one in logprobs]
        return {
            "tokens": [self._name(one.token_id) for one in logprobs],
            "token_logprobs": [
                None if first else finite(one.logprob) for one, first in zip(logprobs, is_first, strict=True)
            ],
            "top_logprobs": [None if first else top for top, first in zip(tops, is_first, strict=True)],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """Return the token's text, or its bytes if it is a part of a character."""
        text = self.token_text(token)
        if "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.tokenizer.token_bytes(token))
