"""The scripts of reinforcement learning: their task, its reward, and the estimate that a drafter is taught by."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import drafter_rl
import pytest
import torch
from grpo_agents import CALL, EXAMPLE, plain_agent, problems, reward, value_of

from paceline.loop.rl.agents import Trajectory
from paceline.loop.rl.rollouts import Sample
from paceline.report.statistics import Rounds


def attempt(*texts: str) -> Trajectory:
    return Trajectory(None, None, Sample([1], [2], [-1.0], [1], "stop"), texts, Rounds(), len(texts), 0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12 + 7", 19), (" 3*(4-6) ", -6), ("2 ** 9", None), ("9 / 3", None), ("1e3", None), ("True + 1", None), ("", None),  # noqa: E501
     ("__import__('os')", None), ("999999999 * 999999999", None), ("(" * 50, None), ("1" * 61, None)],
)  # fmt: skip
def test_the_calculator(expression: str, value: int | None) -> None:
    assert value_of(expression) == value


def test_problems_and_rewards() -> None:
    rows = problems(200, 3)
    assert rows == problems(200, 3) != problems(200, 4)
    assert all(isinstance(each["answer"], int) and each["question"].endswith("?") for each in rows)
    task = {"question": "?", "answer": 19}
    answers = [("none",), ("<tool>what</tool>",), ("<tool>1+1</tool>", "It is 2."), ("<tool>12+7</tool>", "It is 18.")]
    answers += [("<tool>12+7</tool>", "12 and 7: The answer is 19.")]
    assert [reward(task, attempt(*texts)) for texts in answers] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.0])


def test_the_agent_hands_the_result_on() -> None:
    conversations: list[Any] = []

    class Access:
        def chat(self, messages: list[Any]) -> dict[str, Any]:
            conversations.append(list(messages))
            return {"content": "<tool>80 - 5</tool>" if len(conversations) == 1 else "The answer is 75."}

    access: Any = Access()
    assert plain_agent({"question": "How many?"}, access) == ["<tool>80 - 5</tool>", "The answer is 75."]
    assert conversations[1][len(EXAMPLE) + 1 :] == [
        {"role": "assistant", "content": "<tool>80 - 5</tool>"},
        {"role": "user", "content": "Result: 75"},
    ]
    assert CALL.search(EXAMPLE[2]["content"])


def test_the_estimate_is_the_gradient_of_the_expected_kept_tokens() -> None:
    """Over all blocks of two slots and three tokens, weighted by how often they are drawn."""
    torch.manual_seed(0)
    logits_KV = torch.randn(2, 3, requires_grad=True)
    first_V, second_VV = torch.rand(3), torch.rand(3, 3)
    q_KV = logits_KV.softmax(-1)
    expected = sum(
        q_KV[0, a] * first_V[a] * (1 + sum(q_KV[1, b] * second_VV[a, b] for b in range(3))) for a in range(3)
    )
    (gradient,) = torch.autograd.grad(torch.as_tensor(expected), logits_KV, retain_graph=True)
    estimate: Any = 0.0
    for a, b in itertools.product(range(3), range(3)):
        gain_K = drafter_rl.reward_to_go(torch.stack([first_V[a], second_VV[a, b]]))
        weight = (q_KV[0, a] * q_KV[1, b]).detach()
        estimate = estimate + weight * (gain_K[0] * q_KV[0, a].log() + gain_K[1] * q_KV[1, b].log())
    (estimated,) = torch.autograd.grad(estimate, logits_KV)
    assert torch.allclose(estimated, gradient, atol=1e-6)


@pytest.mark.slow
def test_both_arms_of_a_drafter_learn_and_are_served(tmp_path: Path) -> None:
    words = [
        "--tiny",
        "--out",
        str(tmp_path),
        "--seeds",
        "1",
        "--seconds",
        "0.2",
        "--max-tokens",
        "12",
        "--heldout",
        "4",
    ]
    for _ in range(2):  # the second time there is nothing to do
        drafter_rl.run(drafter_rl.arguments().parse_args(words))
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [each["arm"] for each in lines] == ["begun", "supervised", "rl"]
    assert all(each["tokens_per_round"] >= 1.0 for each in lines) and all(each["steps"] >= 1 for each in lines[1:])
