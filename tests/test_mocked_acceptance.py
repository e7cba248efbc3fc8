"""experiments/vllm_mocked_acceptance.py: the kernel does what vLLM's own does, the prediction is asked for rightly."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_mocked_acceptance as script
import vllm_mocked_kernel as kernel
from command_lines import parse

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def mocked(uniform: list[float], *, is_greedy: list[bool] | None = None) -> list[list[int]]:
    """Rounds of two requests with three and two drafts; the first is accepted at 1, the second at 0.5, then none."""
    output = torch.full((2, 4), -1, dtype=torch.int32)
    kernel.greedy(
        output,
        torch.tensor([3, 5], dtype=torch.int32),
        torch.tensor([11, 12, 13, 21, 22], dtype=torch.int32),
        torch.tensor([91, 92, 93, 94, 95]),
        torch.tensor([[81], [82]]),
        None if is_greedy is None else torch.tensor(is_greedy),
        3,
        torch.tensor(uniform, dtype=torch.float64),
        torch.tensor([1.0, 0.5, 0.0]),
        True,
    )
    return output.tolist()


def test_the_kernel_accepts_by_rate_and_then_takes_the_targets_token() -> None:
    assert mocked([0.9, 0.4, 0.1, 0.9, 0.4]) == [[11, 12, 93, -1], [21, 22, 82, -1]]
    assert mocked([0.9, 0.6, 0.0, 0.9, 0.6]) == [[11, 92, -1, -1], [21, 95, -1, -1]]
    assert mocked([0.9] * 5, is_greedy=[False, True])[0] == [-1] * 4, "another kernel's request"


def test_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survival as vLLM mocks a length, and a command line that our parser takes."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    assert script.curve(1.0, 3) == "survival:0,0,0" and script.curve(2.5, 3) == "survival:1,0.5,0"
    arguments = list[Any]()

    def paceline(*words: object) -> dict[str, Any]:
        arguments.extend(map(str, words))
        return {"curve": [[0, 1.0], [1, 1.1], [2, 1.2], [3, 1.3]], "overhead": {"ms": 5.0}}

    monkeypatch.setattr(script, "paceline", paceline)
    args = argparse.Namespace(max_tokens=256, dtype="float32", num_drafted=3)
    assert script.predicted(args, Path("model"), Path("plain.log"), 1000, 4.0)["speedup"] == 1.3
    options = parse(arguments)
    assert options["config.max_draft"] == 3 if "config.max_draft" in options else options["max_draft"] == 3
