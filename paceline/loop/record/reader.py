"""Exchanges as traces: what was asked as the tokens that the target was given, what was said as the tokens that it wrote.

A server tells text. The target's own tokenizer and chat template make tokens of it, and whatever the server tells beside the
text is held against them: token ids (vLLM's, with `return_token_ids`) are taken as they are, numbers of tokens must agree. What
cannot be known is left out:

- the prompt, and with it the trace, where our rendering has another number of tokens, or a part of the request that we do not
  render (images, a template of its own) decides what the target was given;
- the answer where its text is not what the target wrote (tool calls and reasoning, which the server has parsed), does not
  encode to its tokens, or has another number of them: a prompt remains;
- the last token of an answer that a limit or a stop string ended, and its end token unless it surely wrote one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from paceline.errors import PacelineError
from paceline.loop.record.exchange import Exchange
from paceline.model.text.tokenizer import REPLACEMENT, Tokenizer
from paceline.serve.admin.traces import Lost, Trace, given
from paceline.serve.http.failures import ApiError
from paceline.serve.requests.completions import params_of
from paceline.serve.requests.grammars import grammar_of
from paceline.serve.requests.prompts import encode_request, encode_text
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.serve.requests.tools import text_of

FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop", "unknown": "unknown"}
"""How answers end that are no failures; `unknown` is a log's that does not tell."""
UNKNOWN = "unknown"
"""The finish reason of a trace without its answer."""
NOT_RENDERED = ("chat_template", "truncate_prompt_tokens", "functions")
"""Fields that change the prompt in ways that are not followed here."""
NOT_READ = {"echo": False, "suffix": None, "best_of": None, "prompt_embeds": None, "mm_processor_kwargs": None}
"""Fields that make a prompt or an answer of more than tokens that follow each other."""
DELIVERY = frozenset(
    {
        *("model", "stream", "stream_options", "logprobs", "top_logprobs", "parallel_tool_calls"),
        *("return_metrics", "return_token_ids", "return_timings", "paceline_timings"),
    }
)
"""Fields that say how an answer is sent: neither prompt nor answer depends on them, so the server's word is enough."""
NOT_SAID = ("tool_calls", "reasoning", "reasoning_content", "refusal", "audio", "function_call")
"""Parts of a message that are not the words of the target, but what the server has read from them."""


@dataclass(slots=True)
class _Choice:
    """One answer, put together."""

    text: str = ""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_parsed: bool = False
    """Whether there is more than its text."""


@dataclass(slots=True)
class _Said:
    """An answer's body, put together from its chunks."""

    model: str | None = None
    prompt_ids: list[int] | None = None
    choices: dict[int, _Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Iterable[dict[str, Any]]) -> _Said:
        said = cls()
        for chunk in chunks:
            if chunk.get("error"):
                raise Lost("failed")
            if chunk.get("lossless") is False:
                raise Lost("lossy")
            try:
                said.model = _text(chunk.get("model")) or said.model
                said.prompt_ids = chunk.get("prompt_token_ids") or said.prompt_ids
                said.usage = dict(chunk.get("usage") or said.usage)
                for part in chunk.get("choices") or ():
                    said._add(part)
            except (AttributeError, TypeError, ValueError):
                raise Lost("unreadable") from None
        if sorted(said.choices) != [*range(len(said.choices))]:
            raise Lost("unreadable")
        return said

    def _add(self, part: dict[str, Any]) -> None:
        choice = self.choices.setdefault(int(part.get("index") or 0), _Choice())
        message = part.get("delta") or part.get("message") or {}
        choice.text += part.get("text") or message.get("content") or ""
        choice.is_parsed |= any(message.get(name) for name in NOT_SAID)
        choice.finish_reason = _text(part.get("finish_reason")) or choice.finish_reason
        choice.stop_reason = choice.stop_reason if part.get("stop_reason") is None else part["stop_reason"]
        choice.prompt_ids = part.get("prompt_token_ids") or choice.prompt_ids
        if part.get("token_ids") is not None:
            choice.token_ids = [*(choice.token_ids or []), *part["token_ids"]]


class Reader:
    """Reads exchanges with a model; belongs in one thread."""

    def __init__(self, tokenizer: Tokenizer, served_names: Iterable[str] = ()) -> None:
        self.tokenizer, self._names = tokenizer, frozenset(served_names)
        self._vocab_size = tokenizer.vocab_size
        self._end = _end_token(tokenizer)

    def traces(self, exchange: Exchange) -> Iterator[Trace]:
        """Each answer of it, or the prompt alone. Raises Lost when the prompt cannot be known, or the request failed."""
        asked = exchange.asked
        if self._names and asked.get("model") not in self._names:
            raise Lost("model")
        said = _Said.of(exchange.said)
        if not said.choices or any(choice.finish_reason not in FINISHED for choice in said.choices.values()):
            raise Lost("failed")
        try:
            request = _request(exchange)
            prompts = self._prompts(request, exchange, said)
            grammar = grammar_of(request)
            params = params_of(request, self._vocab_size, None, grammar[1] if grammar else None)
        except (ValidationError, ApiError, PacelineError):
            raise Lost("unsupported") from None
        sampling, is_default, n = given(params), request.temperature is None, request.n or 1
        if longest := getattr(request, "max_completion_tokens", None) or request.max_tokens:
            sampling["max_tokens"] = longest
        if is_default:
            sampling.pop("temperature", None)  # what the server takes then is its own affair
        answers = self._answers(said, has_stops=bool(params.stop or params.stop_token_ids))
        told = {
            "ended": exchange.ended,
            "temperature": None if is_default else params.temperature,
            "sampling": sampling,
            "eos_token_ids": tuple(self.tokenizer.eos_token_ids),
            "seed": params.seed if n == 1 else None,
            "tag": exchange.tag,
            "model": said.model or asked.get("model"),
            "num_reused": _num_reused(said.usage),
            "seconds": exchange.seconds,
        }
        for index, choice in said.choices.items():
            if answers is None and index % n:
                continue  # one prompt is enough
            answer_ids = [] if answers is None else answers[index]
            reason = UNKNOWN if answers is None else FINISHED[str(choice.finish_reason)]
            mark = f"{exchange.mark}-{index}" if exchange.mark else None
            yield Trace(prompt_ids=prompts[index // n], answer_ids=answer_ids, finish_reason=reason, mark=mark, **told)

    def _prompts(self, request: ChatRequest | CompletionRequest, exchange: Exchange, said: _Said) -> list[list[int]]:
        """The tokens of each prompt: the server's word, else as our template and tokenizer make them.

        Raises Lost when the server was given others.
        """
        asked, n = exchange.asked, request.n or 1
        firsts = [said.choices[index] for index in sorted(said.choices) if not index % n]
        told = [choice.prompt_ids or said.prompt_ids for choice in firsts]
        if not all(told) and any(asked.get(name) is not None for name in NOT_RENDERED):
            raise Lost("unsupported")
        prompts = told if all(told) else self._rendered(request, asked)
        if len(prompts) != len(firsts) or not all(map(self._are_ours, prompts)):
            raise Lost("mismatch")
        num_tokens = said.usage.get("prompt_tokens")
        if num_tokens is not None and num_tokens != sum(len(prompt or ()) for prompt in prompts):
            raise Lost("mismatch")
        return [list(prompt or ()) for prompt in prompts]

    def _rendered(self, request: ChatRequest | CompletionRequest, asked: dict[str, Any]) -> list[list[int]]:
        tokenizer = self.tokenizer
        if isinstance(request, ChatRequest):
            if asked.get("add_special_tokens"):
                raise Lost("unsupported")
            return [encode_request(request, tokenizer)]
        prompt, with_special = request.prompt, bool(asked.get("add_special_tokens", True))
        many: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
        return [encode_text(each, tokenizer, with_special) if isinstance(each, str) else each for each in many]

    def _answers(self, said: _Said, *, has_stops: bool) -> dict[int, list[int]] | None:
        """Token ids of every answer; None when they are not known."""
        found = {index: self._answer(choice, has_stops) for index, choice in said.choices.items()}
        told = said.usage.get("completion_tokens")
        num_tokens = 0
        for answer in found.values():
            if answer is None:
                return None
            num_tokens += answer[1]
        if told is not None and told != num_tokens and not has_stops:
            return None
        return {index: answer[0] for index, answer in found.items() if answer}

    def _answer(self, choice: _Choice, has_stops: bool) -> tuple[list[int], int] | None:
        """What is sure of an answer's tokens, and how many the server must have counted."""
        tokenizer, ids = self.tokenizer, choice.token_ids
        if ids is not None:
            if ids and not self._are_ours(ids):
                raise Lost("mismatch")
            texts = [tokenizer.decode(ids, skip) for skip in (True, False)]
            text = choice.text.rstrip(REPLACEMENT).strip()
            if not choice.is_parsed and not any(each.strip().startswith(text) for each in texts):
                raise Lost("mismatch")  # the ids of another tokenizer
            return ids, len(ids)
        if choice.is_parsed:
            return None
        try:
            ids = tokenizer.encode(choice.text, add_special_tokens=False) if choice.text else []
        except PacelineError:
            return None
        if tokenizer.decode(ids, False) != choice.text or choice.text.endswith(REPLACEMENT):
            return None
        is_whole = choice.finish_reason == "stop" and not has_stops and choice.stop_reason is None
        if not is_whole:
            return ids[:-1], len(ids)
        return ([*ids, self._end] if self._end is not None else ids), len(ids) + 1

    def _are_ours(self, ids: Any) -> bool:
        return (
            isinstance(ids, list) and bool(ids) and all(type(token) is int and 0 <= token < self._vocab_size for token in ids)
        )


def _text(value: Any) -> str | None:
    """A text or nothing. Raises TypeError on anything else."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return value


def _num_reused(usage: dict[str, Any]) -> int | None:
    """Tokens of the prompt that the server had in its cache, where it says so."""
    told = usage.get("prompt_tokens_details")
    number = told.get("cached_tokens") if isinstance(told, dict) else None
    return number if type(number) is int and 0 <= number < 2**31 else None


def _request(exchange: Exchange) -> ChatRequest | CompletionRequest:
    """What was asked, if it is of text alone. Raises Lost, ValidationError and ApiError."""
    asked = exchange.asked
    if any(asked.get(name) not in (None, usual) for name, usual in NOT_READ.items()):
        raise Lost("unsupported")
    model = ChatRequest if exchange.is_chat else CompletionRequest
    held = {name: value for name, value in asked.items() if name in model.model_fields.keys() - DELIVERY}
    if not exchange.is_chat:
        return CompletionRequest.model_validate(held)
    chat = ChatRequest.model_validate(held)
    for message in chat.messages:
        text_of(message)
    return chat


def _end_token(tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer: the tokenizer's own end where a model has several; None when it cannot be told."""
    ends = tokenizer.eos_token_ids
    own = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    return own if own in ends else ends[0] if len(ends) == 1 else None
