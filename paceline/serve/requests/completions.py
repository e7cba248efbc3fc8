"""Converts chat and text completion requests to jobs: SamplingParams with OpenAI's defaults and this server's
limits."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.errors import PacelineError
from paceline.lossy import Lossy
from paceline.plan.speculate import Speculation
from paceline.serve.http.clock import Clock
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.grammars import GRAMMAR_FIELDS, forced_schema, grammar_of
from paceline.serve.requests.prompts import chat_ids, completion_ids, prediction_ids, prompts_of
from paceline.serve.requests.protocol import ChatRequest, CompletionRequest, Sampling
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.engine import ModelInfo
from paceline.serve.worker.ticket import Job
from paceline.types import GrammarSpec, SamplingParams

MAX_TOKENS = 16
"""Default of `max_tokens` in text completions, as in OpenAI's API."""
MIN_TEMPERATURE = 1e-4
"""Temperatures below this are treated as greedy, which they are up to rounding."""
MAX_STOP_CHARACTERS = 1024
SAME = {"top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
SAME |= {"stop_token_ids", "ignore_eos", "skip_special_tokens"}
"""Fields passed to SamplingParams unchanged; missing ones get its defaults."""
LOSSY_IS_OFF = (
    "lossy rules change what the model says, and this server does not allow them: leave lossy out, or let its owner "
    "start it with --allow-lossy"
)
TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}", re.ASCII)


def chat_jobs(request: ChatRequest, model: ModelInfo, config: ServeConfig, clock: Clock | None = None) -> list[Job]:
    """Convert a chat request to jobs for the engine, one for each of its `n` answers. Call it in a thread, because the
    chat template and the tokenizer are slow; `clock` measures both. Raises RequestRefused for fields that are invalid
    or contradict each other, and for values beyond this server's limits."""
    clock = clock or Clock()
    clock.mark("dispatch")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
    longest = {limit for limit in (request.max_completion_tokens, request.max_tokens) if limit is not None}
    if len(longest) > 1:
        message = "max_completion_tokens and max_tokens differ: leave max_tokens, the older name, out"
        raise RequestRefused(message, param="max_tokens")
    forced, grammar = forced_schema(request), grammar_of(request)
    if forced is not None and grammar is not None:
        raise RequestRefused(f"tool_choice asks for a call, {grammar[0]} for something else", param=grammar[0])
    jobs = jobs_of(
        request,
        [chat_ids(request, model, clock)],
        model,
        config,
        max_tokens=next(iter(longest), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar if forced is None else ("tool_choice", GrammarSpec("json_schema", forced)),
    )
    if prediction := prediction_ids(request, model):
        jobs = [replace(job, params=replace(job.params, prediction=prediction)) for job in jobs]
        clock.mark("tokenizer")
    return jobs


def completion_jobs(
    request: CompletionRequest, model: ModelInfo, config: ServeConfig, clock: Clock | None = None
) -> tuple[list[Job], list[str]]:
    """Convert a text completion request to (jobs for the engine, texts to put before the answers). There are `n` jobs
    (answers) for each prompt, in the order of the prompts, and a text for each job: with `echo` its prompt, else "".
    Call it in a thread, because encoding is slow; `clock` measures it. Raises RequestRefused for fields that are
    invalid or contradict each other, and for values beyond this server's limits."""
    if request.suffix:
        raise RequestRefused("suffix is not supported: put it into the prompt", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRefused("best_of must equal n: answers are not ranked", param="best_of")
    clock = clock or Clock()
    clock.mark("dispatch")
    prompts = completion_ids(request, model)
    clock.mark("tokenizer")
    jobs = jobs_of(
        request,
        prompts,
        model,
        config,
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        grammar=grammar_of(request),
    )
    if request.echo and request.logprobs is not None:
        jobs = [replace(job, params=replace(job.params, prompt_logprobs=job.params.logprobs)) for job in jobs]
    texts = prompts_of(request) if request.echo else [""] * len(prompts)
    # Special tokens are part of the text, as in its log-probabilities.
    echoes = [text if isinstance(text, str) else model.tokenizer.decode(text, skip_special=False) for text in texts]
    return jobs, [echo for echo in echoes for _ in range(request.n or 1)]


def jobs_of(
    request: Sampling,
    prompts: list[list[int]],
    model: ModelInfo,
    config: ServeConfig,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: tuple[str, GrammarSpec] | None,
) -> list[Job]:
    """Return `n` jobs (answers to generate) for each prompt (token ids), in the order of the prompts. `max_tokens`:
    longest answer in tokens; None allows `config.default_max_tokens` for a chat and 16 (MAX_TOKENS) for a text
    completion, or fewer if the context has less room. `logprobs`: number of most probable tokens to return at each
    position; None for no log-probabilities. `grammar`: (name of its request field, grammar). Raises RequestRefused for
    values that are invalid or beyond this server's limits."""
    field, spec = grammar or (None, None)
    if spec is not None and model.mocked:
        message = (
            f"this server mocks acceptance ({model.mocked}), which looks at no token and so keeps to no grammar: leave "
            f"out {', '.join(GRAMMAR_FIELDS)} and a forced tool_choice"
        )
        raise RequestRefused(message, param=field, code="mocked_acceptance")
    if request.stream_options is not None and not request.stream:
        raise RequestRefused("stream_options goes with stream: true only: leave it out", param="stream_options")
    n = request.n or 1
    if n > config.max_n:
        raise RequestRefused(f"n must be at most {config.max_n} on this server, not {n}", param="n")
    if (request.seed or 0) + n > 2**63:
        raise RequestRefused(
            f"seed: the seeds of {n} answers, one after the other, must stay below 2**63", param="seed"
        )
    common, jobs = params_of(request, model.vocab_size, logprobs, spec), list[Job]()
    if common.lossy and not config.allow_lossy:
        raise RequestRefused(LOSSY_IS_OFF, param="lossy", code="lossy_not_allowed", status=403)
    for name, tokens in (("logit_bias", common.logit_bias or {}), ("stop_token_ids", common.stop_token_ids)):
        if wrong := next((token for token in tokens if not 0 <= token < model.vocab_size), None):
            message = f"{name} names token {wrong}, outside the vocabulary of {model.vocab_size}: remove it"
            raise RequestRefused(message, param=name)
    is_chat = isinstance(request, ChatRequest)
    prompt_field, default = ("messages", config.default_max_tokens) if is_chat else ("prompt", MAX_TOKENS)
    most = min(model.max_len - 1, config.max_prompt_tokens or model.max_len)
    for prompt in prompts:
        if len(prompt) > most:
            message = f"the prompt has {len(prompt)} tokens, this server takes at most {most}: shorten it"
            raise RequestRefused(message, param=prompt_field, code="context_length_exceeded")
        room = model.max_len - len(prompt)
        longest = max_tokens or min(room, default)
        try:
            each = replace(common, max_tokens=longest, min_tokens=request.min_tokens or 0)
        except PacelineError as error:
            raise RequestRefused.of(error) from error
        seeds = [None if each.seed is None else each.seed + index for index in range(n)]
        jobs += [Job(prompt, replace(each, seed=seed), grammar_field=field) for seed in seeds]
    if len(jobs) > model.num_rows + config.max_queue:
        raise RequestRefused(f"{len(jobs)} answers in one request are more than this server queues: send fewer prompts")
    return jobs


def params_of(request: Sampling, vocab_size: int, logprobs: int | None, grammar: GrammarSpec | None) -> SamplingParams:
    """Return the request's sampling parameters, without max_tokens and min_tokens, which `jobs_of` sets. `logprobs`:
    number of most probable tokens to return at each position; None for no log-probabilities. This number and top_k are
    limited to `vocab_size`. Raises RequestRefused for invalid values."""
    temperature = 1.0 if request.temperature is None else request.temperature
    is_greedy = temperature < MIN_TEMPERATURE or request.top_p == 0  # top_p always keeps the most likely token
    try:
        return SamplingParams(
            temperature=0.0 if is_greedy else temperature,
            top_k=min(max(request.top_k or 0, 0), vocab_size),
            logit_bias=_logit_bias(request.logit_bias),
            seed=None if request.seed == -1 else request.seed,
            stop=_texts("stop", [request.stop] if isinstance(request.stop, str) else request.stop),
            bad_words=_texts("bad_words", request.bad_words),
            logprobs=None if logprobs is None else min(logprobs, vocab_size),
            grammar=grammar,
            lossy=_lossy(request.lossy),
            max_drafted=None if request.speculate is None else Speculation.of(str(request.speculate)).num_drafted,
            **request.model_dump(include=SAME if request.top_p else SAME - {"top_p"}, exclude_none=True),
        )
    except PacelineError as error:
        raise RequestRefused.of(error) from error


def _lossy(rule: str | dict[str, str | float] | None) -> Lossy | None:
    try:
        return None if rule is None else Lossy.of(rule)
    except PacelineError as error:  # it names the values of the rule
        raise RequestRefused(str(error), param="lossy") from error


def _texts(field: str, texts: list[str] | None) -> tuple[str, ...]:
    if sum(map(len, texts or ())) > MAX_STOP_CHARACTERS:
        raise RequestRefused(f"{field} must not be longer than {MAX_STOP_CHARACTERS} characters", param=field)
    return tuple(texts or ())


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Parse the token ids. Keys must be plain decimal numbers: int() would also accept " 5", "+5", "1_0" and other
    digits."""
    wrong = next((token for token in bias or {} if not TOKEN_KEY.fullmatch(token)), None)
    if wrong is not None:
        message = f'logit_bias names tokens by their number, as in {{"42": -1}}: {wrong!r:.40} is none'
        raise RequestRefused(message, param="logit_bias")
    return {int(token): value for token, value in bias.items()} if bias else None
