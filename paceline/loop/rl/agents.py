"""Runs agents as rollouts: groups of attempts at the same task, each with a reward, through the policy's endpoint.

    def agent(task, access): ...       calls access.chat(messages), or passes access.base_url to any OpenAI client;
                                       returns a result for the reward: a number, a text, a conversation
    with Endpoint(rollouts) as endpoint:
        agents = AgentRollouts(endpoint, agent, by_code(lambda task, attempt: float(attempt.result == task["answer"])))
        trainer = GRPOTrainer(..., reward_funcs=[attempt_reward], rollout_func=agent_rollout_func(agents))

An agent that raises after its first request has failed: the attempt gets the reward `failed` and is trained on. An
agent that raises before its first request, or in every attempt, is defective and ends the run.
`experiments/grpo_agents.py` uses LangGraph agents.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.errors import RolloutError
from paceline.loop.rl.endpoint import Endpoint
from paceline.loop.rl.rollouts import Sample
from paceline.net.streaming import Client
from paceline.report.statistics import Rounds

log = logging.getLogger("paceline.loop.rl")
REQUEST_SECONDS = 3600.0
"""Timeout of a request, which includes queueing behind all other attempts."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access of an agent to the policy: pass `base_url`, `model` and `api_key` to any OpenAI client, or call `chat`."""

    base_url: str
    model: str
    api_key: str = "none"

    def chat(self, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Sends the messages to the policy; returns its answer as a message in OpenAI's format.

        `more`: further fields of the chat request, such as tools, stop, max_tokens. Raises RolloutError with the
        server's error message, ConnectionError if there is no response.
        """
        body = json.dumps({"model": self.model, "messages": list(messages), **more}).encode()
        client = Client(self.base_url, timeout_s=REQUEST_SECONDS, keeps=False)
        stream = client.post("/v1/chat/completions", body)
        if stream.failure:
            raise ConnectionError(stream.failure)
        answer = json.loads(stream.body)
        if stream.status != 200:
            raise RolloutError(f"the policy refused a request: {answer['error']['message']}")
        return answer["choices"][0]["message"]


Agent = Callable[[Any, Access], Any]
"""An agent: (task, access) -> result. May be async."""


@dataclass(slots=True)
class Trajectory:
    """One finished attempt of an agent at a task, with its reward."""

    task: Any
    result: Any
    """The agent's return value; None if it raised."""
    sample: Sample
    texts: tuple[str, ...]
    """Texts of the policy's answers, one per turn (request of the agent)."""
    rounds: Rounds
    num_turns: int
    num_left_out: int
    """Turns missing from `sample`, because the agent rewrote the conversation after them."""
    error: str = ""
    """The agent's exception, as text."""
    reward: float = 0.0


Reward = Callable[[list[Trajectory]], list[float]]
"""Computes one reward for each of the attempts at one task whose agent raised no error. May raise RolloutError."""


def by_code(function: Callable[[Any, Trajectory], float]) -> Reward:
    """Makes a `Reward` (reward function of `AgentRollouts`) that calls `function(task, trajectory)` for each attempt
    whose agent raised no error. The number that `function` returns is the attempt's reward."""
    return lambda group: [float(function(each.task, each)) for each in group]


class AgentRollouts:
    """Runs an agent on tasks, several attempts per task. The sampled tokens do not depend on how many attempts run
    concurrently."""

    def __init__(
        self, endpoint: Endpoint, agent: Agent, reward: Reward, *, failed: float = 0.0, at_once: int | None = None
    ) -> None:
        """`failed`: reward of an attempt whose agent raised an exception. `at_once`: number of concurrent attempts
        [default: the engine's batch size]."""
        self.endpoint, self.rollouts = endpoint, endpoint.rollouts
        self.agent, self.reward, self.failed = agent, reward, failed
        self.at_once = at_once or self.rollouts.llm.target.cache.num_rows

    def run(self, tasks: Sequence[tuple[Any, int]], *, place: str | None = None) -> list[list[Trajectory]]:
        """Runs the agent on each task, several times. `tasks`: pairs (task, number of attempts). Returns one list of
        attempts per task, in the same order.

        `place`: name of an earlier batch, to run it again with the same seeds; nothing is then recorded in
        `rollouts.figures` [default: a new batch]. Raises RolloutError if an agent made no request, if all attempts
        failed, or if a reward is invalid.
        """
        is_repeated = place is not None
        place = place or self.rollouts.next_place()
        began = time.perf_counter()
        attempts = [
            (number, f"{place}-{number}.{attempt}", task)
            for number, (task, count) in enumerate(tasks)
            for attempt in range(count)
        ]
        with ThreadPoolExecutor(self.at_once, "paceline-agent") as pool:
            trajectories = list(pool.map(lambda each: self._attempt(each[1], each[2]), attempts))
        seconds = time.perf_counter() - began
        total, failures = len(trajectories), [each.error for each in trajectories if each.error]
        if failures and len(failures) == total:
            raise RolloutError(
                f"all {total} attempts failed, the first with {failures[0]}: run the agent by itself first"
            )
        groups: list[list[Trajectory]] = [[] for _ in tasks]
        for (number, _, _), trajectory in zip(attempts, trajectories, strict=True):
            groups[number].append(trajectory)
        for group in groups:
            self._judge(group)
        if is_repeated:
            return groups
        figures = {
            "reward": sum(each.reward for each in trajectories) / total,
            "turns": sum(each.num_turns for each in trajectories) / total,
            "turns_left_out": sum(each.num_left_out for each in trajectories) / total,
            "failed": len(failures) / total,
        }
        rounds = Rounds.sum(each.rounds for each in trajectories)
        self.rollouts.keep([each.sample for each in trajectories], seconds, rounds, figures)
        return groups

    def _attempt(self, name: str, task: Any) -> Trajectory:
        attempt = self.endpoint.begin(name)
        result, error = None, ""
        try:
            result = self.agent(task, Access(attempt.base_url, attempt.model))
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as raised:  # any error of the agent makes a failed attempt
            log.warning("attempt %s failed", name, exc_info=True)
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.endpoint.end(attempt)
        if error and not attempt.turns:
            raise RolloutError(
                f"the agent failed before the policy said anything, with {error}: run it by itself first"
            )
        texts = tuple(self.rollouts.llm.tokenizer.decode(turn.answer_ids) for turn in attempt.turns)
        counts = len(attempt.turns), attempt.num_left_out
        return Trajectory(task, result, attempt.sample(), texts, attempt.rounds, *counts, error, self.failed)

    def _judge(self, group: list[Trajectory]) -> None:
        """Sets the rewards of the attempts that did not fail."""
        succeeded = [each for each in group if not each.error]
        rewards = self.reward(succeeded) if succeeded else []
        if len(rewards) != len(succeeded):
            raise RolloutError(
                f"the reward gave {len(rewards)} numbers for {len(succeeded)} attempts: it must give one for each"
            )
        for trajectory, reward in zip(succeeded, rewards, strict=True):
            if not math.isfinite(reward):
                raise RolloutError(f"the reward of an attempt is {reward}: it must be a finite number")
            trajectory.reward = reward
