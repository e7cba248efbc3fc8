"""States of optimisers that are restored, on the device where each kernel reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.train.config import OptimConfig
from paceline.train.learn.optimisers import FINAL_NORM, Optimisers
from paceline.train.processes.parallel import Replicated


class Network(nn.Module):
    """A matrix, a vector, and the norm that sets the scale of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.RMSNorm(3)
        assert FINAL_NORM in dict(self.named_parameters())


def stepped(name: Any, device: str = "cpu") -> Optimisers:
    """Optimisers after one step, their networks alike."""
    torch.manual_seed(0)
    network = Network()
    optimisers = Optimisers(network.to(device), OptimConfig(name))
    if device == "cpu":
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimisers.step(1.0)
    return optimisers


def states(optimisers: Optimisers) -> list[tuple[Tensor, str, Tensor, dict[str, Any]]]:
    """(parameter, key, tensor, group) of every state."""
    return [
        (parameter, key, tensor, group)
        for one in optimisers.every
        for group in one.param_groups
        for parameter in group["params"]
        for key, tensor in one.state[parameter].items()
    ]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_is_restored_lies_where_its_parameter_does(name: str) -> None:
    """A fused kernel on CUDA refuses a count of steps that is on the CPU; here "meta" is the GPU."""
    stored = {key: tensor.clone() for key, tensor in stepped(name).states()}
    moved = stepped(name, "meta")
    moved.fill(stored, Replicated.laid_out)
    restored = states(moved)
    assert len(restored) == len(stored) and any(key == "step" for _, key, _, _ in restored)
    for parameter, key, tensor, group in restored:
        assert tensor.device == parameter.device, key
        assert tensor.dtype == (torch.float32 if key == "step" else parameter.dtype), key
        assert key != "step" or group["fused"]


def test_states_in_another_dtype_become_the_parameters() -> None:
    stored = {key: tensor.double() for key, tensor in stepped("adamw").states()}
    again = stepped("adamw")
    again.fill(stored, Replicated.laid_out)
    assert {tensor.dtype for _, _, tensor, _ in states(again)} == {torch.float32}


def test_a_loop_over_parameters_keeps_its_counts_on_the_cpu() -> None:
    stored = {key: tensor.clone() for key, tensor in stepped("adamw").states()}
    moved = stepped("adamw", "meta")
    for one in moved.every:
        for group in one.param_groups:
            group["fused"] = False
    moved.fill(stored, Replicated.laid_out)
    assert {(key, tensor.device.type) for _, key, tensor, _ in states(moved) if key == "step"} == {("step", "cpu")}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_after_restoring_is_the_step_without_it(name: str) -> None:
    whole, first, again = stepped(name), stepped(name), stepped(name)
    again.fill({key: tensor.clone() for key, tensor in first.states()}, Replicated.laid_out)
    for optimisers in (whole, again):
        for parameter, *_ in states(optimisers):
            parameter.grad = torch.full_like(parameter, -0.3)
        optimisers.step(0.5)
    for (one, *_), (other, *_) in zip(states(whole), states(again), strict=True):
        assert torch.equal(one, other)
