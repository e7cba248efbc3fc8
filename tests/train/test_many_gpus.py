"""experiments/many_gpus.py: what it concludes from two runs, and what it says where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_gpus as script
import pytest
import torch
from safetensors.torch import save_file


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no GPU here.*--device cpu --processes 2 --tiny"):
        script.devices(script.read_options(["--out", "unused"]))
    options = script.read_options(["--out", "unused", "--device", "cpu", "--tiny"])
    assert script.devices(options) == [] and (options.processes, options.steps, options.prompts) == (2, 20, 96)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    options = script.read_options(["--out", "unused"])
    assert script.devices(options) == ["GPU 0", "GPU 1"] and options.processes == 2
    with pytest.raises(SystemExit, match="there are 2 GPUs here"):
        script.devices(script.read_options(["--out", "unused", "--processes", "3"]))


@pytest.fixture
def runs(tmp_path: Path) -> Callable[[float, float], dict[str, Any]]:
    """Beside one process: a run whose loss and one of whose weights are off by so much."""
    weight = torch.linspace(-1, 1, 12)

    def run_of(way: str, world: int, off: float) -> dict[str, Any]:
        return {
            "way": way,
            "processes": world,
            "precision": "float32",
            "objective": [4.0, 2.0 * (1 + off)],
            "blocks_per_s": world * 5,
        }

    def compared(loss: float, weight_off: float) -> dict[str, Any]:
        for name, off in (("replicated-1-float32", 0.0), ("sharded-2-float32", weight_off)):
            folder = tmp_path / name / "checkpoints" / "step-000002"
            folder.mkdir(parents=True, exist_ok=True)
            save_file({"same": weight, "other": weight + off}, folder / "model.safetensors")
        bench = script.Bench(script.read_options(["--out", str(tmp_path)]), tmp_path, time.monotonic())
        return script.beside(bench, run_of("sharded", 2, loss), run_of("replicated", 1, 0.0))

    return compared


def test_runs_are_compared_by_losses_and_weights(runs: Callable[[float, float], dict[str, Any]]) -> None:
    same = runs(0.0, 0.0)
    assert same["same_bits"] and same["is_within_limits"] and same["speedup"] == 2.0
    near = runs(5e-5, 5e-5)
    assert not near["same_bits"] and near["is_within_limits"]
    assert near["largest_loss_difference"] == pytest.approx(5e-5, rel=0.01)
    assert near["largest_weight_difference"] == pytest.approx(5e-5, rel=0.01)
    assert not runs(2e-4, 0.0)["is_within_limits"] and not runs(0.0, 2e-4)["is_within_limits"]
