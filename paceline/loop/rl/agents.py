"""Agents that learn by trying: groups of attempts at the same task, over the policy's endpoint, with a reward for each.

    def agent(task, access): ...       asks access.chat(messages), or gives access.base_url to any OpenAI client; returns
                                       whatever the reward looks at: a number, a text, a conversation
    with Endpoint(rollouts) as endpoint:
        agents = AgentRollouts(endpoint, agent, by_code(lambda task, attempt: float(attempt.result == task["answer"])))
        trainer = GRPOTrainer(..., reward_funcs=[attempt_reward], rollout_func=agent_rollout_func(agents))

An agent that raises after it has asked something is a failed attempt, which is worth `failed` and learned from; one that raises
before, or in every attempt, is a defect of the agent, and ends the run. LangGraph and the like need nothing of ours: see
`experiments/grpo_agents.py`.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from paceline.errors import RolloutError
from paceline.loop.rl.endpoint import Attempt, Endpoint
from paceline.loop.rl.rollouts import Sample
from paceline.report.statistics import Rounds

log = logging.getLogger("paceline.loop.rl")
REQUEST_SECONDS = 3600.0
"""A request waits for its turn among all attempts."""


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent gets: the policy's address, as any OpenAI client takes it, and a plain client for those who want none."""

    base_url: str
    model: str
    api_key: str = "none"

    def chat(self, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
        """The policy's next message. `more`: fields of a chat request such as tools, stop, max_tokens. Raises RolloutError with
        the server's words."""
        parts, body = urlsplit(self.base_url), json.dumps({"model": self.model, "messages": list(messages), **more})
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=REQUEST_SECONDS)
        try:
            connection.request("POST", f"{parts.path}/chat/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            told = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status != 200:
            raise RolloutError(f"the policy refused a request: {told['error']['message']}")
        return told["choices"][0]["message"]


Agent = Callable[[Any, Access], Any]
"""An agent, plain or async: a task and its access to the policy to what came of it."""


@dataclass(slots=True)
class Trajectory:
    """One attempt that ended: what was said, and what it was worth."""

    task: Any
    result: Any
    """What the agent returned; None of one that raised."""
    sample: Sample
    texts: tuple[str, ...]
    """What the policy said, turn by turn."""
    rounds: Rounds
    num_turns: int
    num_left_out: int
    """Turns that are no part of `sample`: an agent that rewrites what was said loses what stood before."""
    error: str = ""
    """What the agent raised."""
    reward: float = 0.0


class Reward(Protocol):
    """What the attempts at one task were worth, in their order. Raises RolloutError when it cannot tell."""

    def __call__(self, group: list[Trajectory], /) -> list[float]: ...


def by_code(function: Callable[[Any, Trajectory], float]) -> Reward:
    """Make a Reward that scores each attempt on its own, as `function(task, trajectory)`."""
    return lambda group: [float(function(each.task, each)) for each in group]


class AgentRollouts:
    """Attempts of an agent as rollouts. Samples do not depend on how many attempts run at once."""

    def __init__(
        self, endpoint: Endpoint, agent: Agent, reward: Reward, *, failed: float = 0.0, at_once: int | None = None
    ) -> None:
        """`failed`: what an attempt is worth whose agent raised; `at_once`: attempts under way [default: as many as the engine
        has rows]."""
        self.endpoint, self.rollouts, self.agent, self.reward, self.failed = endpoint, endpoint.rollouts, agent, reward, failed
        self.at_once = at_once or self.rollouts.llm.target.cache.num_rows

    def run(self, asked: Sequence[tuple[Any, int]], *, place: str | None = None) -> list[list[Trajectory]]:
        """Groups of attempts: (task, how many) each. `place`: of a batch that is made once more; its samples are the same, as
        long as the weights are, and `rollouts` notes nothing of it.

        Raises RolloutError when an agent asked the policy nothing, when all attempts failed, or when no reward can be told.
        """
        is_again, place, began = place is not None, place or self.rollouts.next_place(), time.perf_counter()
        tries = [
            (number, f"{place}-{number}.{attempt}", task)
            for number, (task, count) in enumerate(asked)
            for attempt in range(count)
        ]
        with ThreadPoolExecutor(self.at_once, "paceline-agent") as pool:
            ended = list(pool.map(lambda each: self._attempt(each[1], each[2]), tries))
        seconds = time.perf_counter() - began
        failures = [each.error for each in ended if each.error]
        if failures and len(failures) == len(ended):
            raise RolloutError(f"all {len(ended)} attempts failed, the first with {failures[0]}: run the agent by itself first")
        groups = [
            [each for (number, _, _), each in zip(tries, ended, strict=True) if number == one] for one in range(len(asked))
        ]
        for group in groups:
            self._judge(group)
        if is_again:
            return groups
        told = {
            "reward": sum(each.reward for each in ended) / len(ended),
            "turns": sum(each.num_turns for each in ended) / len(ended),
            "turns_left_out": sum(each.num_left_out for each in ended) / len(ended),
            "failed": len(failures) / len(ended),
        }
        self.rollouts.keep([each.sample for each in ended], seconds, Rounds.sum(each.rounds for each in ended), told)
        return groups

    def _attempt(self, name: str, task: Any) -> Trajectory:
        attempt = self.endpoint.begin(name)
        result, error = None, ""
        try:
            result = self.agent(task, Access(attempt.base_url, attempt.model))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as raised:  # an agent may fail in any way, which its group learns from
            log.warning("attempt %s failed", name, exc_info=True)
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.endpoint.end(attempt)
        if error and not attempt.turns:
            raise RolloutError(f"the agent failed before the policy said anything, with {error}: run it by itself first")
        return self._trajectory(task, result, attempt, error)

    def _trajectory(self, task: Any, result: Any, attempt: Attempt, error: str) -> Trajectory:
        tokenizer = self.rollouts.llm.tokenizer
        texts = tuple(tokenizer.decode(turn.answer_ids) for turn in attempt.turns)
        counts = len(attempt.turns), attempt.num_left_out
        return Trajectory(task, result, attempt.sample(), texts, attempt.rounds, *counts, error, self.failed)

    def _judge(self, group: list[Trajectory]) -> None:
        sound = [each for each in group if not each.error]
        rewards = self.reward(sound) if sound else []
        if len(rewards) != len(sound):
            raise RolloutError(f"the reward gave {len(rewards)} numbers for {len(sound)} attempts: it must give one for each")
        for each, reward in zip(sound, rewards, strict=True):
            if not abs(reward) < float("inf"):
                raise RolloutError(f"the reward of an attempt is {reward}: it must be a finite number")
            each.reward = reward
