"""The seam to TRL: a `rollout_func` for GRPOTrainer, which is used as it is.

    trainer = GRPOTrainer(model=folder, reward_funcs=[reward], args=GRPOConfig(...), train_dataset=rows,
                          rollout_func=rollout_func(rollouts))

Before each generation the trainer's weights go into the engine, if they have changed since; then its prompts are answered, one
answer for each (TRL repeats a prompt for every attempt of its group). TRL gets token ids, log-probabilities and, of agents,
`env_mask`: which tokens the policy said.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.errors import ConfigError, RolloutError, needing, refuse
from paceline.loop.rl.rollouts import Rollouts, Sample

if TYPE_CHECKING:
    from paceline.loop.rl.agents import AgentRollouts

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
REWARD = "attempt_reward"
"""What the reward of an agent's attempt is called among the columns that TRL hands to reward functions."""


def trl() -> Any:
    """The library, when it is needed: importing it takes seconds. Raises ConfigError."""
    with needing(ConfigError, "GRPO is TRL's: pip install 'paceline[rl]'"):
        return importlib.import_module("trl")


def rollout_func(rollouts: Rollouts) -> RolloutFunc:
    """Answers of one turn. Prompts may be text, or lists of messages for the model's chat template."""

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        check_trainer(rollouts, trainer)
        sync(rollouts, trainer)
        return columns(rollouts.sample([encoded(rollouts, prompt) for prompt in prompts]))

    return roll


def agent_rollout_func(agents: AgentRollouts) -> RolloutFunc:
    """Attempts of an agent: each prompt is the JSON of a task (`task_rows`), equal prompts in a row are a group of attempts.

    Rewards are there when the attempts are: give TRL `attempt_reward` as its reward function.
    """

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rollouts = agents.rollouts
        check_trainer(rollouts, trainer)
        agents.endpoint.call(lambda _: sync(rollouts, trainer))
        attempts = [attempt for group in agents.run(_groups(prompts)) for attempt in group]
        samples = [attempt.sample for attempt in attempts]
        return columns(samples) | {
            "env_mask": [each.mask for each in samples],
            REWARD: [attempt.reward for attempt in attempts],
        }

    return roll


def attempt_reward(completions: list[Any], **columns: Any) -> list[float]:
    """The reward function for `agent_rollout_func`: what the attempts were found worth."""
    if REWARD not in columns:
        raise RolloutError("attempt_reward goes with agent_rollout_func: give the trainer that as its rollout_func")
    return [float(reward) for reward in columns[REWARD]]


def task_rows(tasks: Sequence[Any]) -> list[dict[str, str]]:
    """Rows of a data set for GRPOTrainer, of tasks that JSON can hold."""
    return [{"prompt": json.dumps(task, sort_keys=True)} for task in tasks]


def sync(rollouts: Rollouts, trainer: Any) -> None:
    """Put the trainer's weights into the engine, unless those of this step are there."""
    if rollouts.step != trainer.state.global_step:
        model = trainer.accelerator.unwrap_model(trainer.model)
        rollouts.load_weights(_whole(model.state_dict()), trainer.state.global_step)


def columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """What TRL asks of a rollout function."""
    return {
        "prompt_ids": [each.prompt_ids for each in samples],
        "completion_ids": [each.completion_ids for each in samples],
        "logprobs": [each.logprobs for each in samples],
    }


def encoded(rollouts: Rollouts, prompt: Any) -> list[int]:
    """Token ids of a prompt of TRL's: text as it is, messages through the chat template. Raises PromptError."""
    llm = rollouts.llm
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.encode_chat(prompt)


def check_trainer(rollouts: Rollouts, trainer: Any) -> None:
    """Raises ConfigError where the trainer would take the samples for another policy's than they are."""
    args, config = trainer.args, rollouts.config
    refuse(
        ConfigError,
        (
            args.temperature != config.temperature,
            f"the trainer divides logits by {args.temperature:g}, rollouts by {config.temperature:g}: give both the same",
        ),
        (
            (args.top_p or 1.0) != 1.0 or bool(args.top_k) or bool(args.min_p) or (args.repetition_penalty or 1.0) != 1.0,
            "rollouts are drawn from the whole distribution of the policy: leave top_p, top_k, min_p and repetition_penalty "
            "out of GRPOConfig",
        ),
        (
            trainer.accelerator.num_processes > 1,
            "several processes train, and paceline's rollouts are of one: start the training without a launcher",
        ),
    )


def _groups(prompts: list[Any]) -> list[tuple[Any, int]]:
    """(task, number of attempts) of equal prompts in a row."""
    groups: list[tuple[str, int]] = []
    for prompt in prompts:
        if groups and groups[-1][0] == prompt:
            groups[-1] = prompt, groups[-1][1] + 1
        else:
            groups.append((prompt, 1))
    return [(json.loads(prompt), number) for prompt, number in groups]


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Raises ConfigError where only an adapter is trained: its weights are not those of a model."""
    if any(".lora_" in name or name.startswith("base_model.") for name in state):
        raise ConfigError(
            "the trainer trains an adapter (peft), and the engine takes whole weights: leave peft_config out, or merge it"
        )
    return state
