"""Who answers a suite: a model here, with a drafter or without, or an OpenAI-compatible endpoint.

LLMAnswerer(llm, EvalSampling(max_tokens=256))       EndpointAnswerer(url, "model", EvalSampling())
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
"""Times that a request is sent; then the eval stops: a score without an answer is none."""


def named(model: str) -> str:
    """What a model is called: of a path its last part."""
    return model.rstrip("/").rpartition("/")[2] or model


class LLMAnswerer:
    """A model that is loaded here."""

    is_remote = False

    def __init__(self, llm: LLM, sampling: EvalSampling | None = None, name: str | None = None) -> None:
        self.llm, self.sampling = llm, sampling or EvalSampling()
        drafter = "" if llm.drafter.num_drafted == 0 else f" + {named(llm.config.drafter)}"
        self.name = name or f"{named(llm.config.model)}{drafter}"

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        """Raises ContextLengthError, before anything is answered, when a case does not fit; PromptError."""
        ids = [self._ids(case) for case in cases]
        at_once = self.llm.target.cache.num_rows
        found: list[list[Reply]] = [[] for _ in cases]
        jobs = [(place, sample) for place in range(len(cases)) for sample in range(samples)]
        for begin in range(0, len(jobs), at_once):
            part = jobs[begin : begin + at_once]
            params = [self._params(cases[place], sample) for place, sample in part]
            done = self.llm.generate_ids([ids[place] for place, _ in part], params)
            for (place, _), each in zip(part, done, strict=True):
                stats = each.stats
                reason = str(each.finish_reason)
                numbers = (stats.total_s, stats.num_prompt_tokens, stats.num_output_tokens, reason, stats.lossless)
                found[place].append(Reply(each.text, *numbers))
                if len(found[place]) == samples:
                    advance("answering")
        return found

    def _params(self, case: Case, sample: int) -> SamplingParams:
        asked = self.sampling
        return SamplingParams(temperature=asked.temperature, max_tokens=asked.max_tokens, seed=asked.seed_of(case, sample))

    def _ids(self, case: Case) -> list[int]:
        ids, vocab = list(case.token_ids), self.llm.tokenizer.vocab_size
        if ids and max(ids) >= vocab:
            raise ConfigError(f"case {case.id} has tokens of another vocabulary: make the suite with this model's store")
        with way_out(TOKEN_PROMPTS):
            ids = ids or self.llm.encode_chat(list(case.messages), case.tools, dict(case.variables))
        room = self.llm.target.cache.max_len
        if len(ids) + self.sampling.max_tokens > room:
            raise ContextLengthError(
                f"case {case.id}, {len(ids)} tokens, does not fit in {room} with an answer of {self.sampling.max_tokens}: "
                "raise max_len or lower max_tokens"
            )
        return ids


class EndpointAnswerer:
    """An OpenAI-compatible server: chats go to /v1/chat/completions, exact tokens to /v1/completions."""

    is_remote = True

    def __init__(
        self,
        client: Client,
        model: str,
        sampling: EvalSampling | None = None,
        name: str | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        """`more`: further fields of every request."""
        self.client, self.model, self.sampling = client, model, sampling or EvalSampling()
        self.name, self._more = name or f"{model} at {client.url}", more or {}

    def answers(self, cases: Sequence[Case], samples: int, advance: Advance) -> list[list[Reply]]:
        """Raises DownloadError when a request has failed twice, naming the case and what the server said."""
        jobs = [(case, sample) for case in cases for sample in range(samples)]
        found: list[list[Reply]] = []
        with ThreadPoolExecutor(self.sampling.at_once) as pool:
            waiting = [pool.submit(self._ask, case, sample) for case, sample in jobs]
            try:
                for place in range(len(cases)):
                    found.append([each.result() for each in waiting[place * samples : (place + 1) * samples]])
                    advance("answering")
            finally:
                for each in waiting:
                    each.cancel()
        return found

    def _ask(self, case: Case, sample: int) -> Reply:
        asked = self.sampling
        body = {"model": self.model, "max_tokens": asked.max_tokens, "temperature": asked.temperature, **self._more}
        body["seed"] = asked.seed_of(case, sample)
        path, own = case.prompt.api_request()
        body |= own
        told, seconds = post(self.client, path, body, f"case {case.id}")
        try:
            choice, usage = told["choices"][0], told.get("usage") or {}
            text = choice["message"].get("content") if case.messages else choice["text"]
            counts = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise DownloadError(
                f"{self.client.url} answered case {case.id} with no completion: is it the right URL?"
            ) from error
        return Reply(text or "", seconds, *counts, str(choice.get("finish_reason")), told.get("lossless") is not False)


def post(client: Client, path: str, body: dict[str, Any], what: str) -> tuple[dict[str, Any], float]:
    """The JSON object that a server answers, and the seconds it took. Raises DownloadError after TRIES failures."""
    data, stream = json.dumps(body).encode(), Stream(0.0)
    for attempt in range(TRIES):
        if attempt:
            time.sleep(0.5)
        stream = client.post(path, data)
        if stream.status in (400, 401, 403, 404, 422):
            break  # asked again it would be the same
        if stream.status == 200 and not stream.failure:
            with contextlib.suppress(ValueError, RecursionError):
                told = json.loads(stream.body)
                if isinstance(told, dict):
                    return told, stream.ended_s - stream.sent_s
    said = stream.failure or f"status {stream.status}: {' '.join(stream.body.decode(errors='replace').split())[:160]}"
    raise DownloadError(f"{client.url} did not answer {what} ({said}): check the server, its key and the model's name")
