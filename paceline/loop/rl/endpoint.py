"""Serves the policy to agents by OpenAI's API on this machine, and records each attempt's tokens.

    with Endpoint(rollouts) as endpoint:
        attempt = endpoint.begin("0.0-3")            agents use attempt.base_url as any OpenAI server's
        endpoint.end(attempt)                        attempt.sample() is the recorded conversation

It runs the production server (`serve/`) in a thread, on the engine of `Rollouts`. The path of an attempt's base URL
identifies the attempt. The rollouts determine the sampling, not the client; grammars are rejected. Earlier turns enter
the prompt as the tokens that the policy generated, not re-encoded from their text.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Self

from paceline.engine.engine import Chunk, Engine
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, RolloutError, needing
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts, Sample, seed_of
from paceline.report.statistics import Rounds
from paceline.types import Route

with needing(ConfigError, "agents talk to the policy through a server: pip install 'paceline[serve]'"):
    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.serve.admin.metrics import Metrics
    from paceline.serve.http.app import create_app
    from paceline.serve.http.failures import RequestRefused
    from paceline.serve.run import Server, listen, settings_of
    from paceline.serve.settings import ServeConfig
    from paceline.serve.worker.ticket import Job, Ticket
    from paceline.serve.worker.worker import EngineWorker

PATH = re.compile(r"/attempts/([0-9a-zA-Z._-]{1,100})(/.*)", re.ASCII)
TAG = b"x-paceline-tag"
NAME = "policy"
"""Model name under which the policy is served."""
START_SECONDS, MAX_QUEUE = 60.0, 1024


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of an agent within an attempt, with the policy's answer."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """Generated tokens, including the end token if one was generated."""
    logprobs: list[float]
    finish_reason: str

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(slots=True)
class Attempt:
    """One agent's attempt at a task: its requests and the policy's answers, as recorded by the endpoint."""

    name: str
    base_url: str
    """Base URL for the agent's OpenAI client."""
    model: str
    """Model name for the agent's OpenAI client."""
    turns: list[Turn] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)
    num_requests: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Token ids of a prompt -> number of requests with it; the count is part of the next answer's seed."""

    def chain(self) -> list[Turn]:
        """Returns the turns (requests of the agent) of the attempt's latest conversation, oldest first. The last one is
        the attempt's latest turn. Each other turn belongs to the conversation because the prompt of the turn after it
        begins with its prompt and answer."""
        chain = self.turns[-1:]
        for turn in reversed(self.turns[:-1]):
            if chain[0].prompt_ids[: len(turn.tokens)] == turn.tokens:
                chain.insert(0, turn)
        return chain

    @property
    def num_left_out(self) -> int:
        """Number of turns that are not in `chain` and not trained on, such as those of an abandoned conversation."""
        return len(self.turns) - len(self.chain())

    def sample(self) -> Sample:
        """Returns the conversation of `chain` as a training sample. All tokens after the first prompt are the
        completion. Raises RolloutError if the agent made no request."""
        chain = self.chain()
        if not chain:
            raise RolloutError(
                f"attempt {self.name}: the agent ended without asking the policy anything: nothing to learn from"
            )
        prompt_ids = chain[0].prompt_ids
        completion_ids, logprobs, mask = list[int](), list[float](), list[int]()
        for turn in chain:
            between = turn.prompt_ids[len(prompt_ids) + len(completion_ids) :]
            completion_ids += between + turn.answer_ids
            logprobs += [0.0] * len(between) + turn.logprobs
            mask += [0] * len(between) + [1] * len(turn.answer_ids)
        return Sample(prompt_ids, completion_ids, logprobs, mask, chain[-1].finish_reason)


class Endpoint:
    """HTTP server that serves one policy to agents on a free port of this machine, within a `with` block."""

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.attempts: dict[str, Attempt] = {}
        """Running attempts, by name."""
        most = rollouts.config.max_tokens
        settings = ServeConfig(
            port=0, max_queue=MAX_QUEUE, deadline=0.0, drain_seconds=1.0, default_max_tokens=most, served_names=(NAME,)
        )
        self._worker = _Worker(self, settings)
        self._bound = listen(settings)
        self._bound.listen(MAX_QUEUE)  # connections wait until the server accepts
        self._server = Server(settings_of(_by_attempt(create_app(self._worker)), settings), self._worker)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-rollouts", daemon=True)
        self._is_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._bound.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_up.wait(START_SECONDS) or self._worker.failure:
            raise RolloutError(f"the policy's server does not start ({self._worker.failure}): look at the log")
        return self

    def __exit__(self, *error: object) -> None:
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._server.drain)
        self._thread.join(START_SECONDS)
        self._bound.close()

    def begin(self, name: str) -> Attempt:
        """Starts an attempt called `name`: 1 to 100 letters, digits, points, dashes and underscores. The seeds of its
        answers are derived from the name.

        Raises ConfigError for an invalid name, or if an attempt of this name is running.
        """
        address = f"/attempts/{name}/v1"
        if not PATH.fullmatch(address) or name in self.attempts:
            raise ConfigError(
                f"an attempt cannot be called {name!r:.120}: take 1 to 100 letters, digits, points, dashes and "
                "underscores, a name once"
            )
        attempt = self.attempts[name] = Attempt(name, self.url + address, NAME)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Ends an attempt. Before that, waits until every answer that the agent received is recorded in it."""
        self.call(lambda _: None)  # waits for the engine's thread, which records answers before it sends them
        del self.attempts[attempt.name]

    def call(self, function: Callable[[LLM], Any]) -> Any:
        """Runs `function(llm)` in the engine's thread between two engine steps; returns its result or raises its
        exception."""
        assert self._loop, "the endpoint is used within its `with` block"
        future: Future[Any] = asyncio.run_coroutine_threadsafe(self._worker.call(function), self._loop)
        return future.result()

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._worker.start()
            try:
                await self._worker.loaded()
            finally:
                self._is_up.set()
            await self._server.serve(sockets=[self._bound])

        asyncio.run(serve())


class _Worker(EngineWorker):
    """Engine worker that samples every answer with the rollouts' settings and records it."""

    def __init__(self, endpoint: Endpoint, settings: ServeConfig) -> None:
        rollouts = endpoint.rollouts
        super().__init__(self._policy, settings, Metrics(NAME))
        self._attempts, self._rollouts, self._has_begun = endpoint.attempts, rollouts, False

    def _policy(self) -> LLM:
        """Returns the rollouts' LLM; after a crash with a new engine."""
        llm = self._rollouts.llm
        if self._has_begun:
            llm.renew()
        self._has_begun = True
        return llm

    def _step(self, engine: Engine) -> list[Chunk]:
        """Runs a step with full prefill chunks: agents wait for whole answers, so streaming latency does not matter."""
        with engine.whole_chunks():
            return engine.step()

    def _hand_over(self, chunks: list[Chunk], now: float, step_s: float, *, is_prefilling: bool) -> None:
        """Records finished answers before their clients receive them, because the next turn may follow immediately."""
        for chunk in chunks:
            sequence, reason, live = chunk.sequence, chunk.finish_reason, self._live.get(chunk.sequence.request_id)
            attempt = self._attempts.get((live.ticket.tag if live else None) or "")
            if attempt and reason in ("stop", "length") and sequence.num_output:
                logprobs = [each.logprob for each in sequence.logprobs]
                assert len(logprobs) == sequence.num_output, "every token has a log-probability"
                attempt.turns.append(
                    Turn(sequence.tokens[: sequence.prompt_len], sequence.output_ids, logprobs, reason)
                )
                attempt.rounds = Rounds.sum([attempt.rounds, Rounds.counted(sequence.rounds)])
        super()._hand_over(chunks, now, step_s, is_prefilling=is_prefilling)

    def submit(self, jobs: list[Job], tag: str | None = None, route: Route | None = None) -> Ticket:
        """Submits as EngineWorker does. Raises RequestRefused without an attempt, and for fields that change the
        policy."""
        attempt = self._attempts.get(tag or "")
        if attempt is None:
            raise RequestRefused("this endpoint answers attempts under way: use the base_url that the agent was given")
        if len(jobs) > 1:
            raise RequestRefused("one answer a request: leave n out, an attempt goes on from what was said", param="n")
        return super().submit(
            [_of_the_policy(jobs[0], attempt, self._rollouts.config, self.serving().tokenizer)], tag, route
        )


def _of_the_policy(job: Job, attempt: Attempt, config: RolloutConfig, tokenizer: Any) -> Job:
    """Returns the job with the exact tokens of earlier turns and the rollouts' sampling. Raises RequestRefused."""
    requested = job.params
    if requested.grammar or requested.lossy:
        raise RequestRefused(
            "rollouts are the policy's own words: leave response_format, guided_json, guided_regex, lossy and a forced "
            "tool_choice out",
            param="response_format",
        )
    prompt_ids = with_exact_turns(job.prompt_ids, attempt.turns, tokenizer)
    seed = seed_of(config.seed, attempt.name, *map(str, prompt_ids), str(attempt.num_requests[tuple(prompt_ids)]))
    attempt.num_requests[tuple(prompt_ids)] += 1
    most = min(requested.max_tokens, config.max_tokens)
    params = replace(config.params(seed), max_tokens=most, stop=requested.stop, stop_token_ids=requested.stop_token_ids)
    return replace(job, prompt_ids=prompt_ids, params=params)


def with_exact_turns(prompt_ids: list[int], turns: list[Turn], tokenizer: Any) -> list[int]:
    """Replaces the beginning of a prompt by the exact tokens of an earlier turn (its prompt and the policy's answer).

    The reason: a client sends earlier answers as text, and encoding this text may give other tokens than the policy
    generated. Of `turns`, uses the longest one whose text the prompt begins with. Without such a turn, returns the
    prompt unchanged.
    """
    text = ""
    for turn in sorted(turns, key=lambda each: len(each.tokens), reverse=True):
        if prompt_ids[: len(turn.tokens)] == turn.tokens:
            return prompt_ids
        text = text or tokenizer.decode(prompt_ids, False)
        before = tokenizer.decode(turn.tokens, False)
        if text.startswith(before) and len(text) > len(before):
            return turn.tokens + tokenizer.encode(text[len(before) :], False)
    return prompt_ids


def _by_attempt(app: ASGIApp) -> ASGIApp:
    """Maps /attempts/NAME/v1/... to /v1/... with the attempt's name as the tag, replacing a tag from the client."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            match = PATH.fullmatch(scope["path"])
            headers = [(name, value) for name, value in scope["headers"] if name != TAG]
            if match:
                headers.append((TAG, match[1].encode()))
                scope = {**scope, "path": match[2], "raw_path": match[2].encode()}
            scope = {**scope, "headers": headers}
        await app(scope, receive, send)

    return routed
