"""The policy behind OpenAI's API on this machine, for agents: what each attempt said is recorded token by token.

    with Endpoint(rollouts) as endpoint:
        attempt = endpoint.begin("0.0/3")            agents talk to attempt.base_url, as to any OpenAI server
        sample = endpoint.end(attempt)

It is the production server (`serve/`) in a thread, over the engine of `Rollouts`. An attempt is told by the path of its
address, so that any client serves which takes a base URL. How an answer is sampled is the rollouts' to say, not the client's:
temperature and seed are set, top-p and penalties are off, grammars are refused. What the policy said in an earlier turn goes
back into the prompt as the very tokens that were said, not as what a tokenizer makes of their text.
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

from paceline.engine.engine import Chunk
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, RolloutError, needing
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts, Sample, seed_of
from paceline.report.statistics import Rounds
from paceline.types import Route, Sequence

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
"""What the model is called."""
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the policy within an attempt."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """With the end token, where the policy said it."""
    logprobs: list[float]
    finish_reason: str

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(slots=True)
class Attempt:
    """One agent's try at a task, as its endpoint sees it. Answers are recorded by the engine's thread."""

    name: str
    base_url: str
    """What the agent's client takes for OpenAI's address."""
    model: str
    """And for the model's name."""
    turns: list[Turn] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """How often each prompt was asked: it is part of the answer's seed."""

    def chain(self) -> list[Turn]:
        """The latest turn and those that it goes on from: each one's tokens are the beginning of the next one's prompt."""
        chain = self.turns[-1:]
        for turn in reversed(self.turns[:-1]):
            if chain[0].prompt_ids[: len(turn.tokens)] == turn.tokens:
                chain.insert(0, turn)
        return chain

    @property
    def num_left_out(self) -> int:
        """Turns that the latest one does not go on from: no trainer sees them."""
        return len(self.turns) - len(self.chain())

    def sample(self) -> Sample:
        """The conversation as a trainer takes it: the first turn's prompt, then what was said by both sides, the policy's
        tokens masked 1. Raises RolloutError when the policy was asked nothing."""
        chain = self.chain()
        if not chain:
            raise RolloutError(
                f"attempt {self.name}: the agent ended without asking the policy anything: nothing to learn from"
            )
        prompt_ids = chain[0].prompt_ids
        said, logprobs, mask = list[int](), list[float](), list[int]()
        for turn in chain:
            between = turn.prompt_ids[len(prompt_ids) + len(said) :]
            said += between + turn.answer_ids
            logprobs += [0.0] * len(between) + turn.logprobs
            mask += [0] * len(between) + [1] * len(turn.answer_ids)
        return Sample(prompt_ids, said, logprobs, mask, chain[-1].finish_reason)


class Endpoint:
    """Serves one policy's attempts on a free port of the loopback address, while the `with` block lasts."""

    def __init__(self, rollouts: Rollouts, *, max_queue: int = 1024) -> None:
        self.rollouts = rollouts
        self.attempts: dict[str, Attempt] = {}
        """Those under way, by name."""
        most = rollouts.config.max_tokens
        settings = ServeConfig(
            port=0, max_queue=max_queue, deadline=0.0, drain_seconds=1.0, default_max_tokens=most, served_names=(NAME,)
        )
        self._worker = _Worker(self, settings)
        self._bound = listen(settings)
        self._bound.listen(max_queue)  # who comes before the server accepts waits
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
        """A new attempt; `name` is part of its seeds: letters, digits, points and dashes."""
        address = f"/attempts/{name}/v1"
        if not PATH.fullmatch(address) or name in self.attempts:
            raise ConfigError(
                f"an attempt cannot be called {name!r:.120}: take letters, digits, points and dashes, a name once"
            )
        attempt = self.attempts[name] = Attempt(name, self.url + address, NAME)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Nothing more is recorded of it; what it asked for has been recorded when this returns."""
        self.call(lambda _: None)  # the engine's thread has handed over all that its client has got
        del self.attempts[attempt.name]

    def call(self, function: Callable[[LLM], Any]) -> Any:
        """Run a function in the engine's thread between two steps, and wait; returns its result, raises its exception."""
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


def _record(attempt: Attempt, sequence: Sequence, reason: str) -> None:
    logprobs = [each.logprob for each in sequence.logprobs]
    assert len(logprobs) == sequence.num_output, "every token comes with its log-probability"
    attempt.turns.append(Turn(sequence.tokens[: sequence.prompt_len], sequence.output_ids, logprobs, reason))
    attempt.rounds = Rounds.sum([attempt.rounds, Rounds.counted(sequence.rounds)])


class _Worker(EngineWorker[LLM]):
    """Samples every answer as the rollouts are sampled."""

    def __init__(self, endpoint: Endpoint, settings: ServeConfig) -> None:
        rollouts = endpoint.rollouts
        super().__init__(self._policy, settings, Metrics(NAME))
        self._attempts, self._rollouts, self._has_begun = endpoint.attempts, rollouts, False

    def _policy(self) -> LLM:
        """The rollouts' own; after a crash with an engine anew."""
        llm = self._rollouts.llm
        if self._has_begun:
            llm.renew()
        self._has_begun = True
        return llm

    def _step(self, engine: Any) -> list[Chunk]:
        """Prompts are read in whole chunks: an agent waits for whole answers."""
        with engine.whole_chunks():
            return engine.step()

    def _hand_over(self, chunks: list[Chunk], now: float, step_s: float, *, is_prefilling: bool) -> None:
        """Answers that ended are recorded before their clients get them: an agent's next turn goes on from them at once."""
        for chunk in chunks:
            sequence, reason, live = chunk.sequence, chunk.finish_reason, self._live.get(chunk.sequence.request_id)
            attempt = self._attempts.get((live.ticket.tag if live else None) or "")
            if attempt and reason in ("stop", "length") and sequence.num_output:
                _record(attempt, sequence, reason)
        super()._hand_over(chunks, now, step_s, is_prefilling=is_prefilling)

    def submit(self, jobs: list[Job], tag: str | None = None, route: Route | None = None) -> Ticket:
        """As EngineWorker.submit. Raises RequestRefused for a request of no attempt, and for what would change the policy."""
        attempt = self._attempts.get(tag or "")
        if attempt is None:
            raise RequestRefused("this endpoint answers attempts under way: use the base_url that the agent was given")
        if len(jobs) > 1:
            raise RequestRefused("one answer a request: leave n out, an attempt goes on from what was said", param="n")
        return super().submit([_of_the_policy(jobs[0], attempt, self._rollouts.config, self.serving().tokenizer)], tag, route)


def _of_the_policy(job: Job, attempt: Attempt, config: RolloutConfig, tokenizer: Any) -> Job:
    """The job with exact tokens of earlier turns, sampled from the policy and nothing else."""
    asked = job.params
    if asked.grammar or asked.lossy:
        raise RequestRefused(
            "rollouts are the policy's own words: leave response_format, guided_json, guided_regex, lossy and a forced "
            "tool_choice out",
            param="response_format",
        )
    prompt_ids = with_exact_turns(job.prompt_ids, attempt.turns, tokenizer)
    seed = seed_of(config.seed, attempt.name, *map(str, prompt_ids), str(attempt.asked[tuple(prompt_ids)]))
    attempt.asked[tuple(prompt_ids)] += 1
    most = min(asked.max_tokens, config.max_tokens)
    params = replace(config.params(seed), max_tokens=most, stop=asked.stop, stop_token_ids=asked.stop_token_ids)
    return replace(job, prompt_ids=prompt_ids, params=params)


def with_exact_turns(prompt_ids: list[int], turns: list[Turn], tokenizer: Any) -> list[int]:
    """A prompt that repeats an earlier turn's text, with the tokens that were said in it in place of those that its text was
    encoded to; the prompt as it is where it repeats none."""
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
    """/attempts/NAME/v1/... is /v1/... with the attempt's name as its tag, whatever tag the client sent."""

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = PATH.fullmatch(scope["path"])
            headers = [(name, value) for name, value in scope["headers"] if name != TAG]
            if found:
                headers.append((TAG, found[1].encode()))
                scope = {**scope, "path": found[2], "raw_path": found[2].encode()}
            scope = {**scope, "headers": headers}
        await app(scope, receive, send)

    return routed
