"""Legacy completions: raw prompts, continued as they are."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from paceline.errors import PacelineError
from paceline.model.tokenizer import Tokenizer
from paceline.serve.answers import Reply, finite
from paceline.serve.engine import ModelInfo
from paceline.serve.failures import RequestRefused
from paceline.serve.protocol import CompletionRequest
from paceline.serve.sampling import check_characters, grammar_of, jobs_of
from paceline.serve.settings import ServeConfig
from paceline.serve.ticket import Job
from paceline.types import TokenLogprob

MAX_TOKENS = 16
"""OpenAI's default."""


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
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [each for each in prompt if not isinstance(each, int)]


def _encode(prompt: str | list[int], model: ModelInfo) -> list[int]:
    check_characters([prompt] if isinstance(prompt, str) else [], model)
    try:
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    except PacelineError as error:
        raise RequestRefused(str(error), param="prompt") from error
    if not ids:
        raise RequestRefused("the prompt is empty: give some text", param="prompt")
    return check_ids(ids, model)


def check_ids(ids: list[int], model: ModelInfo) -> list[int]:
    """Raises RequestRefused on a token that the model does not have."""
    wrong = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if wrong is not None:
        raise RequestRefused(f"token {wrong} is outside the model's vocabulary of {model.vocab_size}")
    return ids


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
