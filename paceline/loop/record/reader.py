"""Converts exchanges to traces: reconstructs the prompt's and the answer's tokens.

The target's tokenizer and chat template encode the text; token ids from the server (vLLM's `return_token_ids`) are used
as they are, and its token counts must match. Tokens that cannot be reconstructed are dropped:

- the whole trace, if the prompt's token count differs, or the request has parts that are not rendered here (images, a
  chat template of its own);
- the answer but not the prompt, if the answer's text is not the model's output (the server parsed tool calls or
  reasoning), does not round-trip through the tokenizer, or has another token count;
- the last token of an answer that a limit or a stop string ended;
- the end token, unless the model certainly generated it.
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
"""Finish reason of a successful answer -> finish reason of its trace; `unknown` is used for logs without a reason."""
UNKNOWN = "unknown"
"""Finish reason of a trace without its answer."""
NOT_RENDERED = ("chat_template", "truncate_prompt_tokens", "functions")
"""Request fields that change the prompt in ways not reproduced here; the prompt is then known only if the server
returns its token ids."""
NOT_READ = {"echo": False, "suffix": None, "best_of": None, "prompt_embeds": None, "mm_processor_kwargs": None}
"""Request fields -> harmless value. With another value, prompt and answer are not plain token sequences, so the
exchange is dropped."""
DELIVERY = frozenset(
    {
        *("model", "stream", "stream_options", "logprobs", "top_logprobs", "parallel_tool_calls"),
        *("return_metrics", "return_token_ids", "return_timings", "paceline_timings"),
    }
)
"""Request fields that change only how the answer is delivered, not the tokens of prompt or answer; they are not
validated."""
PARSED = ("tool_calls", "reasoning", "reasoning_content", "refusal", "audio", "function_call")
"""Fields of an answer's message that the server parsed from the model's output; the output itself is then unknown."""


@dataclass(slots=True)
class _Choice:
    """One answer, assembled from its chunks."""

    text: str = ""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_parsed: bool = False
    """True if the message has PARSED parts."""


@dataclass(slots=True)
class _Response:
    """The response of a request, assembled from its chunks."""

    model: str | None = None
    prompt_ids: list[int] | None = None
    choices: dict[int, _Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Iterable[dict[str, Any]]) -> _Response:
        response = cls()
        for chunk in chunks:
            if chunk.get("error"):
                raise Lost("failed")
            if chunk.get("lossless") is False:
                raise Lost("lossy")
            try:
                response.model = _text(chunk.get("model")) or response.model
                response.prompt_ids = chunk.get("prompt_token_ids") or response.prompt_ids
                response.usage = dict(chunk.get("usage") or response.usage)
                for part in chunk.get("choices") or ():
                    response._add(part)
            except (AttributeError, TypeError, ValueError):
                raise Lost("unreadable") from None
        if sorted(response.choices) != [*range(len(response.choices))]:
            raise Lost("unreadable")
        return response

    def _add(self, part: dict[str, Any]) -> None:
        choice = self.choices.setdefault(int(part.get("index") or 0), _Choice())
        message = part.get("delta") or part.get("message") or {}
        choice.text += part.get("text") or message.get("content") or ""
        choice.is_parsed |= any(message.get(name) for name in PARSED)
        choice.finish_reason = _text(part.get("finish_reason")) or choice.finish_reason
        choice.stop_reason = choice.stop_reason if part.get("stop_reason") is None else part["stop_reason"]
        choice.prompt_ids = part.get("prompt_token_ids") or choice.prompt_ids
        if part.get("token_ids") is not None:
            choice.token_ids = [*(choice.token_ids or []), *part["token_ids"]]


class Reader:
    """Converts exchanges (requests and answers) of one model to traces (token ids); not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, served_names: Iterable[str] = ()) -> None:
        self.tokenizer, self._names = tokenizer, frozenset(served_names)
        self._vocab_size = tokenizer.vocab_size
        self._end = _end_token(tokenizer)

    def traces(self, exchange: Exchange) -> Iterator[Trace]:
        """Yields one trace per answer; if the answers' tokens are unknown, one trace per prompt, without an answer.

        Raises Lost (the exchange cannot be recorded) if a prompt's tokens are unknown, or the request failed, is for
        another model or has unsupported fields.
        """
        body = exchange.request
        if self._names and body.get("model") not in self._names:
            raise Lost("model")
        response = _Response.of(exchange.chunks)
        if not response.choices or any(choice.finish_reason not in FINISHED for choice in response.choices.values()):
            raise Lost("failed")
        try:
            request = _request(exchange)
            prompts = self._prompts(request, body, response)
            grammar = grammar_of(request)
            params = params_of(request, self._vocab_size, None, grammar[1] if grammar else None)
        except (ValidationError, ApiError, PacelineError):
            raise Lost("unsupported") from None
        sampling, is_default, n = given(params), request.temperature is None, request.n or 1
        if longest := getattr(request, "max_completion_tokens", None) or request.max_tokens:
            sampling["max_tokens"] = longest
        if is_default:
            sampling.pop("temperature", None)  # the server's default is unknown
        answers = self._answers(response, has_stops=bool(params.stop or params.stop_token_ids))
        common = {
            "ended": exchange.ended,
            "temperature": None if is_default else params.temperature,
            "sampling": sampling,
            "eos_token_ids": tuple(self.tokenizer.eos_token_ids),
            "seed": params.seed if n == 1 else None,
            "tag": exchange.tag,
            "model": response.model or body.get("model"),
            "num_reused": _num_reused(response.usage),
            "seconds": exchange.seconds,
        }
        for index, choice in response.choices.items():
            if answers is None and index % n:
                continue  # the same prompt again
            answer_ids = [] if answers is None else answers[index]
            reason = UNKNOWN if answers is None else FINISHED[str(choice.finish_reason)]
            mark = f"{exchange.mark}-{index}" if exchange.mark else None
            yield Trace(
                prompt_ids=prompts[index // n], answer_ids=answer_ids, finish_reason=reason, mark=mark, **common
            )

    def _prompts(
        self, request: ChatRequest | CompletionRequest, body: dict[str, Any], response: _Response
    ) -> list[list[int]]:
        """Returns the token ids of each prompt: the server's, else the rendered ones. Raises Lost on a mismatch."""
        n = request.n or 1
        firsts = [response.choices[index] for index in sorted(response.choices) if not index % n]
        reported = [choice.prompt_ids or response.prompt_ids for choice in firsts]
        if not all(reported) and any(body.get(name) is not None for name in NOT_RENDERED):
            raise Lost("unsupported")
        prompts = reported if all(reported) else self._rendered(request, body)
        if len(prompts) != len(firsts) or not all(map(self._is_valid, prompts)):
            raise Lost("mismatch")
        num_tokens = response.usage.get("prompt_tokens")
        if num_tokens is not None and num_tokens != sum(len(prompt or ()) for prompt in prompts):
            raise Lost("mismatch")
        return [list(prompt or ()) for prompt in prompts]

    def _rendered(self, request: ChatRequest | CompletionRequest, body: dict[str, Any]) -> list[list[int]]:
        tokenizer = self.tokenizer
        if isinstance(request, ChatRequest):
            if body.get("add_special_tokens"):
                raise Lost("unsupported")
            return [encode_request(request, tokenizer)]
        prompt, with_special = request.prompt, bool(body.get("add_special_tokens", True))
        many: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
        return [encode_text(each, tokenizer, with_special) if isinstance(each, str) else each for each in many]

    def _answers(self, response: _Response, *, has_stops: bool) -> dict[int, list[int]] | None:
        """Returns the token ids of every answer by index; None if one is unknown."""
        answers = {index: self._answer(choice, has_stops) for index, choice in response.choices.items()}
        known = {index: answer for index, answer in answers.items() if answer is not None}
        num_tokens, reported = sum(number for _, number in known.values()), response.usage.get("completion_tokens")
        if len(known) < len(answers) or (reported is not None and reported != num_tokens and not has_stops):
            return None
        return {index: ids for index, (ids, _) in known.items()}

    def _answer(self, choice: _Choice, has_stops: bool) -> tuple[list[int], int] | None:
        """Returns the certain token ids of an answer, and the number that the server must have counted; None if
        unknown."""
        tokenizer, ids = self.tokenizer, choice.token_ids
        if ids is not None:
            if ids and not self._is_valid(ids):
                raise Lost("mismatch")
            decoded = [tokenizer.decode(ids, skip) for skip in (True, False)]
            text = choice.text.rstrip(REPLACEMENT).strip()
            if not choice.is_parsed and not any(each.strip().startswith(text) for each in decoded):
                raise Lost("mismatch")  # the server's tokenizer differs
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

    def _is_valid(self, ids: Any) -> bool:
        """True for a non-empty list of token ids of the model's vocabulary."""
        return (
            isinstance(ids, list)
            and bool(ids)
            and all(type(token) is int and 0 <= token < self._vocab_size for token in ids)
        )


def _text(value: Any) -> str | None:
    """Returns a string or None unchanged. Raises TypeError on other values."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return value


def _num_reused(usage: dict[str, Any]) -> int | None:
    """Number of prompt tokens that the server reports as cached, or None."""
    details = usage.get("prompt_tokens_details")
    number = details.get("cached_tokens") if isinstance(details, dict) else None
    return number if type(number) is int and 0 <= number < 2**31 else None


def _request(exchange: Exchange) -> ChatRequest | CompletionRequest:
    """Validates the request, which must contain text only. Raises Lost, ValidationError and ApiError."""
    body = exchange.request
    if any(body.get(name) not in (None, usual) for name, usual in NOT_READ.items()):
        raise Lost("unsupported")
    model = ChatRequest if exchange.is_chat else CompletionRequest
    fields = {name: value for name, value in body.items() if name in model.model_fields.keys() - DELIVERY}
    if not exchange.is_chat:
        return CompletionRequest.model_validate(fields)
    chat = ChatRequest.model_validate(fields)
    for message in chat.messages:
        text_of(message)
    return chat


def _end_token(tokenizer: Tokenizer) -> int | None:
    """Returns the end-of-sequence token; of several, the tokenizer's own; None if ambiguous."""
    ends = tokenizer.eos_token_ids
    own = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    return own if own in ends else ends[0] if len(ends) == 1 else None
