"""Answers a suite's cases with a local model, with or without a drafter, or with an OpenAI-compatible endpoint.

LLMAnswerer(llm, EvalSampling(max_tokens=256))       EndpointAnswerer(client, "model", EvalSampling())
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from paceline.config import short_name
from paceline.engine.llm import LLM
from paceline.errors import TOKEN_PROMPTS, ConfigError, ContextLengthError, DownloadError, way_out
from paceline.loop.evals.config import EvalSampling
from paceline.loop.evals.scores import Reply
from paceline.loop.evals.suite import Case
from paceline.net.streaming import Client, Stream
from paceline.report.tables import Advance
from paceline.types import SamplingParams

__all__ = ["EndpointAnswerer", "EvalSampling", "LLMAnswerer", "post"]
TRIES = 2
"""Number of attempts per request. After the last failure the eval stops, because a score needs every answer."""


class LLMAnswerer:
    """Answers a suite's cases with a local model."""

    is_remote = False

    def __init__(self, llm: LLM, sampling: EvalSampling | None = None, name: str | None = None) -> None:
        self.llm, self.sampling = llm, sampling or EvalSampling()
        drafter = "" if llm.drafter.num_drafted == 0 else f" + {short_name(llm.config.drafter)}"
        self.name = name or f"{short_name(llm.config.model)}{drafter}"

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        """Returns a list of `samples` replies for each case. Calls `advance`, the progress callback, after each
        finished case.

        Checks all cases first. Raises ConfigError if a case has tokens outside the model's vocabulary, PromptError if
        the chat template fails, ContextLengthError if prompt and longest answer do not fit in the context.
        """
        ids, config = [self._ids(case) for case in cases], self.sampling
        shared = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        at_once = self.llm.target.cache.num_rows
        replies: list[list[Reply]] = [[] for _ in cases]
        jobs = [(place, sample) for place in range(len(cases)) for sample in range(samples)]
        for begin in range(0, len(jobs), at_once):
            part = jobs[begin : begin + at_once]
            params = [replace(shared, seed=config.seed_of(cases[place], sample)) for place, sample in part]
            completions = self.llm.generate_ids([ids[place] for place, _ in part], params)
            for (place, _), completion in zip(part, completions, strict=True):
                stats = completion.stats
                reason = str(completion.finish_reason)
                numbers = (stats.total_s, stats.num_prompt_tokens, stats.num_output_tokens, reason, stats.lossless)
                replies[place].append(Reply(completion.text, *numbers))
                if len(replies[place]) == samples:
                    advance("answering")
        return replies

    def _ids(self, case: Case) -> list[int]:
        ids, vocab = list(case.token_ids), self.llm.tokenizer.vocab_size
        if ids and max(ids) >= vocab:
            raise ConfigError(
                f"case {case.id} has tokens of another vocabulary: make the suite with this model's store"
            )
        with way_out(TOKEN_PROMPTS):
            ids = ids or self.llm.encode_chat(list(case.messages), case.tools, dict(case.variables))
        room = self.llm.target.cache.max_len
        if len(ids) + self.sampling.max_tokens > room:
            raise ContextLengthError(
                f"case {case.id}, {len(ids)} tokens, does not fit in {room} with an answer of "
                f"{self.sampling.max_tokens}: raise max_len or lower max_tokens"
            )
        return ids


class EndpointAnswerer:
    """Answers a suite's cases with an OpenAI-compatible server."""

    is_remote = True

    def __init__(
        self, client: Client, model: str, sampling: EvalSampling | None = None, name: str | None = None
    ) -> None:
        self.client, self.model, self.sampling = client, model, sampling or EvalSampling()
        self.name = name or f"{model} at {client.url}"

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        """Returns a list of `samples` replies for each case. Calls `advance`, the progress callback, after each
        finished case. Raises DownloadError, which names the case, if a request still fails after a retry."""
        jobs = [(case, sample) for case in cases for sample in range(samples)]
        replies: list[list[Reply]] = []
        with ThreadPoolExecutor(self.sampling.at_once) as pool:
            futures = [pool.submit(self._ask, case, sample) for case, sample in jobs]
            try:
                for place in range(len(cases)):
                    replies.append([future.result() for future in futures[place * samples : (place + 1) * samples]])
                    advance("answering")
            finally:
                pool.shutdown(cancel_futures=True)
        return replies

    def _ask(self, case: Case, sample: int) -> Reply:
        config = self.sampling
        body = {"model": self.model, "max_tokens": config.max_tokens, "temperature": config.temperature}
        path, prompt = case.prompt.api_request()
        body |= {"seed": config.seed_of(case, sample), **prompt}
        response, seconds = post(self.client, path, body, f"case {case.id}")
        try:
            choice, usage = response["choices"][0], response.get("usage") or {}
            text = choice["message"].get("content") if case.messages else choice["text"]
            counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            if not isinstance(text or "", str):
                raise TypeError("the content is no text")
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DownloadError(
                f"{self.client.url} answered case {case.id} with no completion: is it the right URL?"
            ) from error
        return Reply(
            text or "", seconds, *counts, str(choice.get("finish_reason")), response.get("lossless") is not False
        )


def post(client: Client, path: str, body: dict[str, Any], what: str) -> tuple[dict[str, Any], float]:
    """Sends `body` as JSON to the server's `path`; returns the response's JSON object and the seconds it took.

    Retries a failed request once, but not after status 400, 401, 403, 404 or 422, because a retry would fail, too.
    Raises DownloadError if there is no valid response. `what`: name of the request, for the error message.
    """
    data, stream = json.dumps(body).encode(), Stream(0.0)
    for attempt in range(TRIES):
        if attempt:
            time.sleep(0.5)
        stream = client.post(path, data)
        if stream.status in (400, 401, 403, 404, 422):
            break  # a retry would fail the same way
        if stream.status == 200 and not stream.failure:
            with contextlib.suppress(ValueError, RecursionError):
                response = json.loads(stream.body)
                if isinstance(response, dict):
                    return response, stream.ended_s - stream.sent_s
    reason = stream.failure or f"status {stream.status}: {' '.join(stream.body.decode(errors='replace').split())[:160]}"
    raise DownloadError(
        f"{client.url} did not answer {what} ({reason}): check the server, its key and the model's name"
    )
