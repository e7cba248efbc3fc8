"""Converts exchanges to traces: reconstructs the prompt's and the answer's tokens.

The target's tokenizer and chat template encode the text; token ids from the server (vLLM's `return_token_ids`) are used
as they are, and its token counts must match. Tokens that cannot be reconstructed are dropped:

- the whole trace, if the prompt's token count differs, or the request has parts that are not rendered here (images, a
  chat template of its own);
- the answer but not the prompt, if it does not round-trip through the tokenizer, or has another token count; an answer
  of which the server parsed tool calls or reasoning is rendered again (`rendered.py`), and needs that count;
- the last token of an answer that a limit or a stop string ended;
- the end token, unless the model certainly generated it.

Sampling fields that the request leaves out get the server's defaults, if they are known (`defaults.py`). The engine's
acceptance report becomes the trace's rounds (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from paceline.errors import PacelineError
from paceline.loop.record.exchange import Exchange
from paceline.loop.record.rendered import rendered_ids
from paceline.loop.record.response import Choice, Response
from paceline.loop.record.rounds import rounds_of
from paceline.model.text.tokenizer import REPLACEMENT, Tokenizer
from paceline.serve.admin.traces import Lost, Trace, given
from paceline.serve.http.failures import ApiError
from paceline.serve.requests.completions import params_of
from paceline.serve.requests.grammars import grammar_of
from paceline.serve.requests.prompts import encode_request, encode_text, text_of
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest
from paceline.types import Round

FINISHED = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop", "unknown": "unknown"}
"""Finish reason of a successful answer -> finish reason of its trace; `unknown` is used for logs without a reason."""
UNKNOWN = "unknown"
"""Finish reason of a trace without its answer."""
NOT_RENDERED = ("chat_template", "truncate_prompt_tokens", "functions")
"""Request fields that change the prompt in ways not reproduced here; the prompt is then known only if the server
returns its token ids."""
NOT_READ = {"echo": False, "suffix": None, "best_of": None, "prompt_embeds": None, "mm_processor_kwargs": None}
NOT_READ |= {"use_beam_search": False}
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


class Reader:
    """Converts exchanges (requests and answers) of one model to traces (token ids); not thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        served_names: Iterable[str] = (),
        defaults: dict[str, float] | None = None,
        lose: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`defaults`: the server's values of sampling fields that a request leaves out; None if they are unknown.
        `lose` counts a part of a trace that is left out, by reason."""
        self.tokenizer, self._names = tokenizer, frozenset(served_names)
        self.defaults, self._lose = defaults, lose
        self._vocab_size = tokenizer.vocab_size
        self._end = tokenizer.end_token_id

    def traces(self, exchange: Exchange) -> Iterator[Trace]:
        """Yields one trace per answer. If the tokens of any answer cannot be determined, yields one trace per prompt
        instead, without an answer.

        Raises Lost (the request cannot be recorded) in these cases:
        - The request failed, or is for a model that is not recorded.
        - The request has unsupported fields.
        - The response is malformed, or the server declares that its speculation may have changed the answer.
        - The tokens of a prompt cannot be determined, or token ids from the server do not fit the model's tokenizer."""
        body = exchange.request
        if self._names and body.get("model") not in self._names:
            raise Lost("model")
        response = Response.of(exchange.chunks)
        if not response.choices or any(choice.finish_reason not in FINISHED for choice in response.choices.values()):
            raise Lost("failed")
        try:
            request = self._with_defaults(_request(exchange), exchange, response)
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
        has_stops = bool(params.stop or params.stop_token_ids)
        answers = self._answers(request, prompts, response, has_stops=has_stops)
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
            rounds = self._rounds(response, choice)
            yield Trace(
                prompt_ids=prompts[index // n],
                answer_ids=[] if answers is None else answers[index],
                finish_reason=UNKNOWN if answers is None else FINISHED[str(choice.finish_reason)],
                mark=f"{exchange.mark}-{index}" if exchange.mark else None,
                drafted=None if rounds is None else [each.num_drafted for each in rounds],
                accepted=None if rounds is None else [each.num_accepted for each in rounds],
                **common,
            )

    def _with_defaults(
        self, request: ChatRequest | CompletionRequest, exchange: Exchange, response: Response
    ) -> ChatRequest | CompletionRequest:
        """Fills sampling fields that the client left out with the server's defaults, if they are known."""
        if self.defaults is None or not exchange.has_sampling:
            return request
        # SGLang's text completions have constant defaults, whatever the model's are.
        known = {"temperature": 1.0} | ({} if response.is_sglang and not exchange.is_chat else self.defaults)
        missing = {name: value for name, value in known.items() if getattr(request, name) is None}
        return request.model_copy(update=missing)

    def _rounds(self, response: Response, choice: Choice) -> list[Round] | None:
        """Returns the rounds that the engine reports; None without a report, or if it is wrong, which is counted."""
        if choice.acceptance is None:
            return None
        num_tokens = response.usage.get("completion_tokens") if len(response.choices) == 1 else None
        try:
            return rounds_of(choice.acceptance, num_tokens)
        except (ValueError, TypeError, KeyError):
            self._lose("rounds")
            return None

    def _prompts(
        self, request: ChatRequest | CompletionRequest, body: dict[str, Any], response: Response
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

    def _answers(
        self, request: ChatRequest | CompletionRequest, prompts: list[list[int]], response: Response, *, has_stops: bool
    ) -> dict[int, list[int]] | None:
        """Returns the token ids of every answer by index; None if one is unknown."""
        known: dict[int, tuple[list[int], int]] = {}
        is_rendered = False
        for index, choice in response.choices.items():
            if choice.is_parsed and choice.token_ids is None:
                is_rendered = True
                ids = rendered_ids(request, choice, prompts[index // (request.n or 1)], self.tokenizer)
                answer = None if ids is None or has_stops else (ids, len(ids))
            else:
                answer = self._answer(choice, has_stops)
            if answer is None:
                return None
            known[index] = answer
        num_tokens, reported = sum(number for _, number in known.values()), response.usage.get("completion_tokens")
        is_checked = is_rendered or (reported is not None and not has_stops)
        if is_checked and reported != num_tokens:
            return None
        return {index: ids for index, (ids, _) in known.items()}

    def _answer(self, choice: Choice, has_stops: bool) -> tuple[list[int], int] | None:
        """Returns (token ids of an answer that are certain, number of tokens that the server must have counted); None
        if they are unknown."""
        tokenizer, ids = self.tokenizer, choice.token_ids
        if ids is not None:
            if ids and not self._is_valid(ids):
                raise Lost("mismatch")
            decoded = [tokenizer.decode(ids, skip) for skip in (True, False)]
            text = choice.text.rstrip(REPLACEMENT).strip()
            if not choice.is_parsed and not any(each.strip().startswith(text) for each in decoded):
                raise Lost("mismatch")  # the server's tokenizer differs
            return ids, len(ids)
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
        if not isinstance(ids, list) or not ids:
            return False
        return all(type(token) is int and 0 <= token < self._vocab_size for token in ids)


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
