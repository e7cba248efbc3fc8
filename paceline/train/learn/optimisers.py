"""The optimisers of a training run: AdamW, or Muon for the matrices with AdamW for the rest, driven by one learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.config import OptimConfig

WARM_UP_SHARE = 0.04
LAST_SHARE = 0.05
"""The cosine ends at this share of the peak."""
VECTOR_BOOST = 3.0
"""Norm weights learn this times as fast: they are few."""
FINAL_NORM, FINAL_BOOST = "norm.weight", 10.0
"""This weight, if a network has it, sets the scale of all logits. It begins small, to keep the first loss low, and grows."""


class Optimisers:
    """All parameters of a network under one or two optimisers, driven by one learning rate."""

    def __init__(self, network: nn.Module, config: OptimConfig) -> None:
        named = list(network.named_parameters())
        matrices = [parameter for _, parameter in named if parameter.ndim == 2]
        vectors = [parameter for name, parameter in named if parameter.ndim != 2 and name != FINAL_NORM]
        final = [parameter for name, parameter in named if name == FINAL_NORM]
        adam = {"betas": (0.9, config.beta2), "lr": config.lr, "fused": True}
        vector_groups = [
            {"params": vectors, "boost": VECTOR_BOOST, "weight_decay": 0.0},
            {"params": final, "boost": FINAL_BOOST, "weight_decay": 0.0},
        ]
        matrix_group = {"params": matrices, "boost": 1.0, "weight_decay": config.weight_decay}
        if config.name == "muon":
            muon = torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
            muon.param_groups[0]["boost"] = 1.0
            self.every: list[torch.optim.Optimizer] = [muon, torch.optim.AdamW(vector_groups, **adam)]
        else:
            self.every = [torch.optim.AdamW([matrix_group, *vector_groups], **adam)]
        self._lr = config.lr

    def step(self, lr_share: float) -> float:
        """One update at this share of the peak learning rate; returns the rate."""
        for optimiser in self.every:
            for group in optimiser.param_groups:
                group["lr"] = self._lr * lr_share * group["boost"]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return self._lr * lr_share

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of all states as (`optimiser.parameter.key`, tensor), by number; the first step makes them."""
        for number, optimiser in enumerate(self.every):
            for index, state in optimiser.state_dict()["state"].items():
                yield from ((f"{number}.{index}.{key}", tensor) for key, tensor in state.items())

    def fill(self, stored: dict[str, Tensor], laid_out: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Restore what `states` gave: moments as `laid_out(parameter, moment)`, on the parameter's device and in its
        dtype, counts of steps where the optimiser's kernel reads them."""
        slots = [[(each, group) for group in one.param_groups for each in group["params"]] for one in self.every]
        for name, tensor in stored.items():
            number, index, key = name.split(".")
            parameter, group = slots[int(number)][int(index)]
            state = self.every[int(number)].state[parameter]
            whole = tensor.to(parameter.dtype)
            state[key] = laid_out(parameter, whole) if tensor.ndim else _count(parameter, tensor, group)


def _count(parameter: Tensor, steps: Tensor, group: dict[str, Any]) -> Tensor:
    """A fused kernel reads the count of steps on the parameter's device, a loop over parameters reads it on the CPU."""
    is_on_device = group.get("fused") or group.get("capturable")
    return steps.to(parameter.device, torch.float32) if is_on_device else steps.cpu()


def learning_rate_share(progress: float) -> float:
    """Share of the peak rate at this share of the run: a linear warm-up, then a cosine down to `LAST_SHARE`."""
    if progress < WARM_UP_SHARE:
        return max(0.01, progress / WARM_UP_SHARE)
    along = min(1.0, (progress - WARM_UP_SHARE) / (1.0 - WARM_UP_SHARE))
    return LAST_SHARE + (1.0 - LAST_SHARE) * 0.5 * (1.0 + math.cos(math.pi * along))
