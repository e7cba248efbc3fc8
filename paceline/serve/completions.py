"""Chat and legacy completions: messages or raw prompts to jobs, answers to choices in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from paceline.errors import PacelineError
from paceline.model.tokenizer import Tokenizer
from paceline.serve.answers import Reply, finite
from paceline.serve.engine import ModelInfo
from paceline.serve.failures import RequestRefused
from paceline.serve.protocol import ChatRequest, CompletionRequest, Message, Tool
from paceline.serve.sampling import check_characters, grammar_of, jobs_of
from paceline.serve.settings import ServeConfig
from paceline.serve.ticket import Job
from paceline.serve.tools import Call, CallParser, forced_schema, prompt_messages, text_of, tools_of
from paceline.types import GrammarSpec, TokenLogprob

MAX_TOKENS = 16
"""Of a legacy completion that says nothing: OpenAI's default."""


def chat_jobs(request: ChatRequest, model: ModelInfo, config: ServeConfig) -> list[Job]:
    """A conversation as jobs; renders and encodes, so it belongs in a thread. Raises RequestRefused."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
    check_characters(map(text_of, request.messages), model)
    forced, grammar = forced_schema(request), grammar_of(request)
    if forced is not None and grammar is not None:
        raise RequestRefused("tool_choice asks for a call, response_format for something else", param="response_format")
    return jobs_of(
        request,
        [encode_chat(request.messages, model.tokenizer, tools_of(request), request.chat_template_kwargs)],
        model,
        config,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar if forced is None else GrammarSpec("json_schema", forced),
    )


def encode_chat(
    messages: list[Message], tokenizer: Tokenizer, tools: Sequence[Tool] = (), variables: dict[str, Any] | None = None
) -> list[int]:
    """Token ids of a conversation through the model's chat template. Raises RequestRefused when the template refuses."""
    rendered, more = prompt_messages(messages, tools, getattr(tokenizer, "chat_template", None))
    try:
        return tokenizer.encode_chat(rendered, (variables or {}) | more)
    except PacelineError as error:
        raise RequestRefused(str(error), param="messages") from error


def completion_jobs(request: CompletionRequest, model: ModelInfo, config: ServeConfig) -> tuple[list[Job], list[str]]:
    """Jobs, prompt after prompt, and with `echo` the text to put before each answer. Belongs in a thread.

    Raises RequestRefused.
    """
    if request.suffix:
        raise RequestRefused("suffix is not supported: put it into the prompt", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRefused("best_of must equal n: answers are not ranked", param="best_of")
    if request.echo and request.logprobs is not None:
        raise RequestRefused("echo does not go with logprobs: prompts are not scored", param="echo")
    prompts = [_encode(prompt, model) for prompt in _prompts(request.prompt)]
    jobs = jobs_of(
        request,
        prompts,
        model,
        config,
        max_tokens=request.max_tokens or MAX_TOKENS,
        logprobs=request.logprobs,
        grammar=grammar_of(request),
    )
    echoes = [model.tokenizer.decode(prompt) if request.echo else "" for prompt in prompts]
    return jobs, [echo for echo in echoes for _ in range(request.n or 1)]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestRefused("the prompt is empty: give some text", param="prompt")
    return cast(Any, [prompt] if isinstance(prompt[0], int) else prompt)


def _encode(prompt: str | list[int], model: ModelInfo) -> list[int]:
    check_characters([prompt] if isinstance(prompt, str) else [], model)
    ids = encode_text(prompt, model.tokenizer) if isinstance(prompt, str) else prompt
    if not ids:
        raise RequestRefused("the prompt is empty: give some text", param="prompt")
    return check_ids(ids, model)


def encode_text(text: str, tokenizer: Tokenizer, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a raw prompt. Raises RequestRefused when the tokenizer refuses."""
    try:
        return tokenizer.encode(text, add_special_tokens)
    except PacelineError as error:
        raise RequestRefused(str(error), param="prompt") from error


def check_ids(ids: list[int], model: ModelInfo) -> list[int]:
    """Raises RequestRefused on a token that the model does not have."""
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise RequestRefused(f"token {wrong} is outside the model's vocabulary of {model.vocab_size}")
    return ids


class ChatReply(Reply):
    """One choice of a chat completion."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: ChatRequest) -> None:
        super().__init__(index, tokenizer, request, has_logprobs=bool(request.logprobs))
        tools, is_forced = tools_of(request), forced_schema(request) is not None
        self._parser = CallParser(tools, is_whole=is_forced) if tools else None
        self._num_calls = 0
        self._is_begun = False

    def _shown(self, text: str, is_stream: bool) -> dict[str, Any] | None:
        calls: list[Call] = []
        if self._parser:
            text, calls = self._parser.push(text)
            if self.sequence:
                rest, more = self._parser.finish()
                text, calls = text + rest, calls + more
        if not text and not calls and self.sequence is None:
            return None
        numbered = [
            call.as_json() | ({"index": self._num_calls + place} if is_stream else {}) for place, call in enumerate(calls)
        ]
        self._num_calls += len(calls)
        called = {"tool_calls": numbered} if calls else {}
        if not is_stream:
            return {"message": {"role": "assistant", "content": None if calls and not text else text, "refusal": None} | called}
        delta: dict[str, Any] = {} if self._is_begun else {"role": "assistant", "content": ""}
        self._is_begun = True
        return {"delta": delta | ({"content": text} if text else {}) | called}

    def _reason(self) -> str | None:
        reason = super()._reason()
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    def _shown_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        shown = [
            self._token(each.token_id, each.logprob) | {"top_logprobs": [self._token(*pair) for pair in each.top]}
            for each in logprobs
        ]
        return {"content": shown, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """A part of a character has no text of its own, so its bytes are not told."""
        text = self.token_text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}


class TextReply(Reply):
    """One choice of a completion."""

    def __init__(self, index: int, tokenizer: Tokenizer, request: CompletionRequest, echo: str) -> None:
        super().__init__(index, tokenizer, request, has_logprobs=request.logprobs is not None)
        self._unsent_echo, self._offset = echo, 0

    def _shown(self, text: str, is_stream: bool) -> dict[str, Any] | None:
        if not text and self.sequence is None:
            return None
        echo, self._unsent_echo = self._unsent_echo, ""
        return {"text": echo + text}

    def _shown_logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        tokens = [self.token_text(each.token_id) for each in logprobs]
        *offsets, self._offset = accumulate(map(len, tokens), initial=self._offset)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(each.logprob) for each in logprobs],
            "top_logprobs": [{self.token_text(token): finite(value) for token, value in each.top} for each in logprobs],
            "text_offset": offsets,
        }
