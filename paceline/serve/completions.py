"""Chat and legacy completions: messages or raw prompts to jobs, answers to choices in OpenAI's words.

A request's fields become the engine's SamplingParams: defaults of OpenAI, limits of this server, grammars.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

from paceline.errors import PacelineError
from paceline.lossy import Lossy
from paceline.model.tokenizer import Tokenizer
from paceline.serve.answers import Reply, finite
from paceline.serve.clock import Clock
from paceline.serve.engine import ModelInfo
from paceline.serve.failures import RequestRefused, compact
from paceline.serve.protocol import ChatRequest, CompletionRequest, Message, ResponseFormat, Sampling, Tool
from paceline.serve.settings import ServeConfig
from paceline.serve.ticket import Job
from paceline.serve.tools import Call, CallParser, forced_schema, prompt_messages, text_of, tools_of
from paceline.types import GrammarSpec, SamplingParams, TokenLogprob

MAX_TOKENS = 16
"""Of a legacy completion that says nothing: OpenAI's default."""
MIN_TEMPERATURE = 1e-4
"""Below this sampling is greedy but for rounding."""
MAX_STOP_CHARACTERS = 1024
SAME = {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "ignore_eos"}
"""Fields that mean the same in SamplingParams, whose defaults hold where they are left out."""
LOSSY_IS_OFF = (
    "lossy rules change what the model says, and this server does not allow them: leave lossy out, or let its owner "
    "start it with --allow-lossy"
)
TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}", re.ASCII)
MAX_TOKEN_CHARACTERS = 64
"""No prompt's tokens have so many characters on average: what is longer is refused without being encoded."""


def chat_jobs(request: ChatRequest, model: ModelInfo, config: ServeConfig, clock: Clock | None = None) -> list[Job]:
    """A conversation as jobs; renders and encodes, so it belongs in a thread; `clock` is told what that takes. Raises
    RequestRefused."""
    clock = clock or Clock()
    clock.mark("dispatch")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
    check_characters(map(text_of, request.messages), model)
    forced, grammar = forced_schema(request), grammar_of(request)
    if forced is not None and grammar is not None:
        raise RequestRefused("tool_choice asks for a call, response_format for something else", param="response_format")
    return jobs_of(
        request,
        [encode_chat(request.messages, model.tokenizer, tools_of(request), request.chat_template_kwargs, clock)],
        model,
        config,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar if forced is None else GrammarSpec("json_schema", forced),
    )


def encode_chat(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Tool] = (),
    variables: dict[str, Any] | None = None,
    clock: Clock | None = None,
) -> list[int]:
    """Token ids of a conversation through the model's chat template; `clock` is told how long the template took, and the
    tokenizer. Raises RequestRefused when the template refuses."""
    rendered, more = prompt_messages(messages, tools, getattr(tokenizer, "chat_template", None))
    clock = clock or Clock()
    try:
        text = tokenizer.apply_chat_template(rendered, variables=(variables or {}) | more)
        clock.mark("template")
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        clock.mark("tokenizer")
        return token_ids
    except PacelineError as error:
        raise RequestRefused(str(error), param="messages") from error


def completion_jobs(
    request: CompletionRequest, model: ModelInfo, config: ServeConfig, clock: Clock | None = None
) -> tuple[list[Job], list[str]]:
    """Jobs, prompt after prompt, and with `echo` the text to put before each answer. Belongs in a thread.

    Raises RequestRefused.
    """
    if request.suffix:
        raise RequestRefused("suffix is not supported: put it into the prompt", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRefused("best_of must equal n: answers are not ranked", param="best_of")
    if request.echo and request.logprobs is not None:
        raise RequestRefused("echo does not go with logprobs: prompts are not scored", param="echo")
    clock = clock or Clock()
    clock.mark("dispatch")
    prompts = _encode(request.prompt, model)
    clock.mark("tokenizer")
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


def _encode(prompt: str | list[str] | list[int] | list[list[int]], model: ModelInfo) -> list[list[int]]:
    """Token ids of each prompt. Raises RequestRefused when there is none, or when one is empty, too long or no text."""
    is_one = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    prompts, encoded = cast("list[str | list[int]]", [prompt] if is_one else prompt), list[list[int]]()
    for each in prompts:
        check_characters([each] if isinstance(each, str) else [], model)
        encoded.append(check_ids(encode_text(each, model.tokenizer) if isinstance(each, str) else each, model))
    if not encoded or not all(encoded):
        raise RequestRefused("the prompt is empty: give some text", param="prompt")
    return encoded


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


def jobs_of(
    request: Sampling,
    prompts: list[list[int]],
    model: ModelInfo,
    config: ServeConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: GrammarSpec | None,
) -> list[Job]:
    """`n` jobs for each prompt, prompt after prompt. Without `max_tokens` an answer has `config.default_max_tokens`, or what is
    left of the context.

    Raises RequestRefused on values that are impossible or beyond this server's limits.
    """
    if grammar is not None and model.mocked:
        message = (
            f"this server mocks acceptance ({model.mocked}), which looks at no token and so keeps to no grammar: leave out "
            "response_format, guided_json, guided_regex and a forced tool_choice"
        )
        raise RequestRefused(message, param="response_format", code="mocked_acceptance")
    n = request.n or 1
    if n > config.max_n:
        raise RequestRefused(f"n must be at most {config.max_n} on this server, not {n}", param="n")
    common, jobs = params_of(request, model.vocab_size, logprobs, grammar), []
    if common.lossy and not config.allow_lossy:
        raise RequestRefused(LOSSY_IS_OFF, param="lossy", code="lossy_not_allowed", status=403)
    most = min(model.max_len - 1, config.max_prompt_tokens or model.max_len)
    for prompt in prompts:
        if len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens, this server takes at most {most}: shorten it"
            raise RequestRefused(message, param="messages", code="context_length_exceeded")
        room = model.max_len - len(prompt)
        each = replace(common, max_tokens=max_tokens or min(room, config.default_max_tokens))
        seeds = [None if each.seed is None else (each.seed + index) % 2**63 for index in range(n)]
        jobs += [Job(prompt, replace(each, seed=seed)) for seed in seeds]
    if len(jobs) > model.num_rows + config.max_queue:
        raise RequestRefused(f"{len(jobs)} answers in one request are more than this server queues: send fewer prompts")
    return jobs


def check_characters(texts: Iterable[str], model: ModelInfo) -> None:
    """Refuse what cannot fit before time is spent on it. Raises RequestRefused."""
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TOKEN_CHARACTERS * model.max_len:
        message = f"the prompt has {num_characters:,} characters, far more than {model.max_len} tokens hold: shorten it"
        raise RequestRefused(message, param="messages", code="context_length_exceeded")


def params_of(request: Sampling, vocab_size: int, logprobs: int | None, grammar: GrammarSpec | None) -> SamplingParams:
    """How the request wants its tokens chosen. Raises RequestRefused on impossible values."""
    temperature = 1.0 if request.temperature is None else request.temperature
    try:
        return SamplingParams(
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_k=min(max(request.top_k or 0, 0), vocab_size),
            logit_bias=_logit_bias(request.logit_bias),
            seed=None if request.seed is None else request.seed % 2**63,
            stop=_stop(request.stop),
            logprobs=None if logprobs is None else min(logprobs, vocab_size),
            grammar=grammar,
            lossy=None if request.lossy is None else Lossy.of(request.lossy),
            max_drafted=0 if request.speculate == "off" else request.speculate if isinstance(request.speculate, int) else None,
            **request.model_dump(include=SAME, exclude_none=True),
        )
    except PacelineError as error:
        raise RequestRefused.of(error) from error


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if sum(map(len, texts)) > MAX_STOP_CHARACTERS:
        raise RequestRefused(f"stop must not be longer than {MAX_STOP_CHARACTERS} characters", param="stop")
    return texts


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Keys must be plain decimal numbers: Python's int() would also take " 5", "+5", "1_0" and digits of other scripts."""
    wrong = next((token for token in bias or {} if not TOKEN_KEY.fullmatch(token)), None)
    if wrong is not None:
        message = f'logit_bias names tokens by their number, as in {{"42": -1}}: {wrong!r:.40} is none'
        raise RequestRefused(message, param="logit_bias")
    return {int(token): value for token, value in bias.items()} if bias else None


def grammar_of(request: Sampling) -> GrammarSpec | None:
    """What the answer has to be, if the request says so. Raises RequestRefused when it says so twice, or by halves."""
    guided_json = request.guided_json
    specs = [spec] if (spec := _format(request.response_format)) else []
    if request.guided_regex is not None:
        specs.append(GrammarSpec("regex", request.guided_regex))
    if guided_json is not None:
        specs.append(GrammarSpec("json_schema", guided_json if isinstance(guided_json, str) else compact(guided_json)))
    if len(specs) > 1:
        raise RequestRefused("only one of response_format, guided_regex and guided_json can hold", param="response_format")
    if not specs:
        return None
    try:
        specs[0].text.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused("the grammar is no valid Unicode text", param="response_format") from error
    return specs[0]


def _format(form: ResponseFormat | None) -> GrammarSpec | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return GrammarSpec("json_object")
    if form.type == "regex":
        if form.regex is None:
            raise RequestRefused('response_format of type "regex" needs the field regex', param="response_format")
        return GrammarSpec("regex", form.regex)
    if form.json_schema is None:
        raise RequestRefused('response_format of type "json_schema" needs the field json_schema', param="response_format")
    return GrammarSpec("json_schema", compact(form.json_schema.schema_))


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
