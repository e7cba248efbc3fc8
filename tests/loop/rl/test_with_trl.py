"""TRL's GRPO, unmodified, over paceline's rollouts: the same samples and the same training with and without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.engine.llm import LLM
from paceline.errors import ConfigError, RolloutError
from paceline.loop.rl.agents import Access, AgentRollouts, by_code
from paceline.loop.rl.endpoint import Endpoint
from paceline.loop.rl.rollouts import RolloutConfig, Rollouts
from paceline.loop.rl.with_trl import agent_rollout_func, attempt_reward, check_trainer, rollout_func, task_rows

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 4, "max_len": 256}
NEEDS_TRL = "trl is not installed: pip install 'paceline[rl]'"


def trained(model: Path, out: Path, rewards: Any, rollouts: Any, rows: list[dict[str, Any]], steps: int) -> Any:
    """A trainer that has trained."""
    trl = pytest.importorskip("trl", reason=NEEDS_TRL)
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    settings = trl.GRPOConfig(
        output_dir=str(out), max_steps=steps, learning_rate=1e-2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=8, beta=0.0, temperature=1.0, report_to=[], use_cpu=True, bf16=False, logging_steps=1,
        save_strategy="no", gradient_checkpointing=False, seed=5, dataloader_pin_memory=False,
    )  # fmt: skip
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.pad_token = "<|im_end|>"
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer, reward_funcs=rewards, args=settings,
        train_dataset=datasets.Dataset.from_list(rows), rollout_func=rollouts,
    )  # fmt: skip
    trainer.train()
    return trainer


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in each) / 8 for each in completions]


@pytest.mark.filterwarnings("ignore")
def test_the_same_curve_with_and_without_drafts(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"number {number}: "} for number in range(8)]
    curves, weights = [], []
    for drafter in ("none", "random-dflash"):
        rollouts = Rollouts(LLM(str(model), drafter=drafter, **SETTINGS), RolloutConfig(seed=1, max_tokens=8))
        trainer = trained(model, tmp_path / drafter, letters, rollout_func(rollouts), rows, steps=2)
        log = [each for each in trainer.state.log_history if "reward" in each]
        curves.append([(each["reward"], each["loss"], each["grad_norm"]) for each in log])
        weights.append(trainer.model.state_dict())
        assert [each.step for each in rollouts.figures] == [0, 1]
        assert any(each["grad_norm"] > 0 for each in log)
    assert curves[0] == curves[1] and len(curves[0]) == 2
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.filterwarnings("ignore")
def test_attempts_of_an_agent(model: Path, tmp_path: Path) -> None:
    """Other speakers' tokens are masked; the trainer's log-probabilities equal those of the samples."""
    seen: list[dict[str, Any]] = []

    def agent(task: Any, access: Access) -> str:
        messages: list[Any] = [{"role": "user", "content": task["ask"]}]
        messages += [access.chat(messages, max_tokens=6), {"role": "user", "content": "more"}]
        return str(access.chat(messages, max_tokens=6)["content"])

    with Endpoint(Rollouts(LLM(str(model), drafter="ngram", **SETTINGS), RolloutConfig(seed=1))) as endpoint:
        agents = AgentRollouts(endpoint, agent, by_code(lambda task, each: sum(map(str.isalpha, each.result))))
        roll = agent_rollout_func(agents)

        def watched(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            seen.append(roll(prompts, trainer))
            seen[-1]["own"] = own_logprobs(trainer.model, seen[-1])
            return {name: value for name, value in seen[-1].items() if name != "own"}

        trainer = trained(model, tmp_path, attempt_reward, watched, task_rows([{"ask": "a"}, {"ask": "b"}]), steps=2)
    assert len([each for each in trainer.state.log_history if "reward" in each]) == 2
    for batch in seen:
        assert len(batch["prompt_ids"]) == 4 and any(0 in mask for mask in batch["env_mask"])
        for own, ours, mask in zip(batch["own"], batch["logprobs"], batch["env_mask"], strict=True):
            kept = [(one, other) for one, other, is_sampled in zip(own, ours, mask, strict=True) if is_sampled]
            assert [one for one, _ in kept] == pytest.approx([other for _, other in kept], abs=1e-4)


def own_logprobs(model: Any, batch: dict[str, Any]) -> list[list[float]]:
    """Log-probabilities of each completion's tokens, by the trainer's model."""
    logprobs = []
    for prompt, completion in zip(batch["prompt_ids"], batch["completion_ids"], strict=True):
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs.append(logprobs_TV.gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist())
    return logprobs


def fake_trainer(**changes: Any) -> Any:
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0} | changes
    return SimpleNamespace(args=SimpleNamespace(**args), accelerator=SimpleNamespace(num_processes=1))


def test_a_trainer_that_means_another_policy_is_refused(model: Path) -> None:
    rollouts = Rollouts(LLM(str(model), drafter="none", **SETTINGS))
    check_trainer(rollouts, fake_trainer())
    with pytest.raises(ConfigError, match=r"by 0\.7, rollouts by 1"):
        check_trainer(rollouts, fake_trainer(temperature=0.7))
    for changes in ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        with pytest.raises(ConfigError, match="whole distribution"):
            check_trainer(rollouts, fake_trainer(**changes))


def test_an_adapter_is_refused(model: Path) -> None:
    rollouts = Rollouts(LLM(str(model), drafter="none", **SETTINGS))
    trainer = fake_trainer()
    trainer.state, trainer.model = SimpleNamespace(global_step=0), None
    adapter = SimpleNamespace(state_dict=lambda: {"base_model.model.x.lora_A.weight": torch.ones(1)})
    trainer.accelerator.unwrap_model = lambda model: adapter
    with pytest.raises(ConfigError, match="adapter"):
        rollout_func(rollouts)(["a"], trainer)


def test_rows_are_tasks_and_rewards_come_from_attempts() -> None:
    assert [json.loads(row["prompt"]) for row in task_rows([{"b": 1, "a": 2}])] == [{"a": 2, "b": 1}]
    assert attempt_reward(["x", "y"], attempt_reward=[0.5, 1]) == [0.5, 1.0]
    with pytest.raises(RolloutError, match="agent_rollout_func"):
        attempt_reward(["x"])
