"""TRL integration: a `rollout_func` for an unmodified GRPOTrainer.

    trainer = GRPOTrainer(model=folder, reward_funcs=[reward], args=GRPOConfig(...), train_dataset=rows,
                          rollout_func=rollout_func(rollouts))

Before each generation, changed weights of the trainer are loaded into the engine; then each prompt gets one answer (TRL
repeats a prompt for every sample of its group). TRL receives token ids, log-probabilities and, for agents, `env_mask`:
1 for tokens of the policy.
"""

from __future__ import annotations

import importlib
import itertools
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
"""Name of the column with the attempts' rewards, which TRL passes to reward functions."""


def trl() -> Any:
    """Imports and returns the module TRL, which takes seconds. Raises ConfigError if it is not installed."""
    with needing(ConfigError, "GRPO is TRL's: pip install 'paceline[rl]'"):
        return importlib.import_module("trl")


def rollout_func(rollouts: Rollouts) -> RolloutFunc:
    """Returns the `rollout_func` for TRL's GRPOTrainer that samples one answer per prompt. A prompt is a text, or
    messages for the chat template."""

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        check_trainer(rollouts, trainer)
        sync(rollouts, trainer)
        return columns(rollouts.sample([encoded(rollouts, prompt) for prompt in prompts]))

    return roll


def agent_rollout_func(agents: AgentRollouts) -> RolloutFunc:
    """Returns the `rollout_func` for TRL's GRPOTrainer that runs an agent once per prompt. Each prompt is a task, as
    written by `task_rows`.

    Adjacent equal prompts are attempts at the same task. The rollout function computes their rewards together, as one
    group. GRPOTrainer also needs a reward function: pass `attempt_reward`, which returns the computed rewards.
    """

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rollouts = agents.rollouts
        check_trainer(rollouts, trainer)
        agents.endpoint.call(lambda _: sync(rollouts, trainer))
        attempts = [attempt for group in agents.run(_groups(prompts)) for attempt in group]
        samples = [attempt.sample for attempt in attempts]
        masks, rewards = [each.mask for each in samples], [each.reward for each in attempts]
        return columns(samples) | {"env_mask": masks, REWARD: rewards}

    return roll


def attempt_reward(completions: list[Any], **columns: Any) -> list[float]:
    """Reward function for TRL: returns the rewards that the rollout function from `agent_rollout_func` has computed.
    TRL passes them in `columns`. Raises RolloutError if they are missing, because the trainer uses another rollout
    function."""
    if REWARD not in columns:
        raise RolloutError("attempt_reward goes with agent_rollout_func: give the trainer that as its rollout_func")
    return [float(reward) for reward in columns[REWARD]]


def task_rows(tasks: Sequence[Any]) -> list[dict[str, str]]:
    """Converts JSON-serialisable tasks to rows of a data set for GRPOTrainer: {"prompt": the task as JSON}."""
    return [{"prompt": json.dumps(task, sort_keys=True)} for task in tasks]


def sync(rollouts: Rollouts, trainer: Any) -> None:
    """Loads the trainer's weights into the engine, unless weights of the trainer's current step are already loaded."""
    if rollouts.step != trainer.state.global_step:
        model = trainer.accelerator.unwrap_model(trainer.model)
        rollouts.load_weights(_whole(model.state_dict()), trainer.state.global_step)


def columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """Converts samples to the dict that TRL expects of a rollout function: "prompt_ids", "completion_ids" and
    "logprobs", each a list with one entry per sample."""
    return {
        "prompt_ids": [each.prompt_ids for each in samples],
        "completion_ids": [each.completion_ids for each in samples],
        "logprobs": [each.logprobs for each in samples],
    }


def encoded(rollouts: Rollouts, prompt: Any) -> list[int]:
    """Returns the token ids of a prompt from TRL: text, or messages for the chat template. Raises PromptError if the
    template is missing or fails, or a message is malformed."""
    llm = rollouts.llm
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.encode_chat(prompt)


def check_trainer(rollouts: Rollouts, trainer: Any) -> None:
    """Checks that TRL's trainer assumes the same sampling as the rollouts. Raises ConfigError if its temperature
    differs, if it sets top_p, top_k, min_p or repetition_penalty, or if it runs in several processes."""
    args, config = trainer.args, rollouts.config
    refuse(
        ConfigError,
        (
            args.temperature != config.temperature,
            f"the trainer divides logits by {args.temperature:g}, rollouts by {config.temperature:g}: give both the "
            "same",
        ),
        (
            (args.top_p or 1.0) != 1.0
            or bool(args.top_k)
            or bool(args.min_p)
            or (args.repetition_penalty or 1.0) != 1.0,
            "rollouts are drawn from the whole distribution of the policy: leave top_p, top_k, min_p and "
            "repetition_penalty out of GRPOConfig",
        ),
        (
            trainer.accelerator.num_processes > 1,
            "several processes train, and paceline's rollouts are of one: start the training without a launcher",
        ),
    )


def _groups(prompts: list[Any]) -> list[tuple[Any, int]]:
    """Returns (task, number of attempts) for each run of equal prompts."""
    return [(json.loads(prompt), len(list(equal))) for prompt, equal in itertools.groupby(prompts)]


def _whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the state dict unchanged. Raises ConfigError for an adapter's, which lacks the model's weights."""
    if any(".lora_" in name or name.startswith("base_model.") for name in state):
        raise ConfigError(
            "the trainer trains an adapter (peft), and the engine takes whole weights: leave peft_config out, or "
            "merge it"
        )
    return state
