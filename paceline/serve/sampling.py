"""A request's fields as the engine's SamplingParams: defaults of OpenAI, limits of this server, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from paceline.errors import PacelineError
from paceline.serve.engine import ModelInfo
from paceline.serve.failures import RequestRefused
from paceline.serve.protocol import ResponseFormat, Sampling
from paceline.serve.settings import ServeConfig
from paceline.serve.ticket import Job
from paceline.types import GrammarSpec, SamplingParams

MIN_TEMPERATURE = 1e-4
"""Below this sampling is greedy but for rounding."""
MAX_STOP_CHARACTERS = 1024
TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}", re.ASCII)
MAX_TOKEN_CHARACTERS = 64
"""No prompt's tokens have so many characters on average: what is longer is refused without being encoded."""


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
    """`n` jobs for each prompt, prompt after prompt. Without `max_tokens` an answer may fill the context, if `config` lets it.

    Raises RequestRefused on values that are impossible or beyond this server's limits.
    """
    n = request.n or 1
    if n > config.max_n:
        raise RequestRefused(f"n must be at most {config.max_n} on this server, not {n}", param="n")
    common, jobs = _params(request, model, logprobs, grammar), []
    most = min(model.max_len - 1, config.max_prompt_tokens or model.max_len)
    for prompt in prompts:
        if len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens, this server takes at most {most}: shorten it"
            raise RequestRefused(message, param="messages", code="context_length_exceeded")
        room = model.max_len - len(prompt)
        each = replace(common, max_tokens=max_tokens or min(room, config.default_max_tokens or room))
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


def _params(request: Sampling, model: ModelInfo, logprobs: int | None, grammar: GrammarSpec | None) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    try:
        return SamplingParams(
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_k=min(max(request.top_k or 0, 0), model.vocab_size),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=_logit_bias(request.logit_bias),
            seed=None if request.seed is None else request.seed % 2**63,
            stop=_stop(request.stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            logprobs=None if logprobs is None else min(logprobs, model.vocab_size),
            grammar=grammar,
            max_drafted=0 if request.speculate == "off" else request.speculate if isinstance(request.speculate, int) else None,
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


def compact(value: Any) -> str:
    """JSON as text. Raises RequestRefused when it is nested beyond reason."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestRefused("the JSON is nested too deeply: flatten it") from None
