"""The optimisers of a training run, driven by one learning rate: AdamW, or Muon for matrices with AdamW for the
rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.train.config import OptimConfig

WARM_UP_SHARE = 0.04
LAST_SHARE = 0.05
"""Share of the peak learning rate at the end of the cosine."""
VECTOR_BOOST = 3.0
"""Factor on the learning rate of norm weights."""
FINAL_NORM, FINAL_BOOST = "norm.weight", 10.0
"""Name of the final norm's weight, and the factor on its learning rate. It scales all logits, starts small and must
grow."""


class Optimisers:
    """The optimisers of a network: AdamW for all parameters, or Muon for matrices and AdamW for the rest. All follow
    one learning-rate schedule."""

    def __init__(self, network: nn.Module, config: OptimConfig) -> None:
        named = [each for each in network.named_parameters() if each[1].requires_grad]
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
            muon = torch.optim.Muon(
                matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            muon.param_groups[0]["boost"] = 1.0
            self.every: list[torch.optim.Optimizer] = [muon, torch.optim.AdamW(vector_groups, **adam)]
        else:
            self.every = [torch.optim.AdamW([matrix_group, *vector_groups], **adam)]
        self._lr = config.lr

    def step(self, lr_share: float) -> float:
        """Takes one optimiser step with the learning rate `lr_share` * peak learning rate, and deletes the gradients;
        returns this rate. Vectors, such as norm weights, have 3 times this rate, the final norm's weight 10 times."""
        for optimiser in self.every:
            for group in optimiser.param_groups:
                group["lr"] = self._lr * lr_share * group["boost"]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return self._lr * lr_share

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of all optimiser states, for a checkpoint. A name such as "0.3.exp_avg" has the number
        of the optimiser, the number of the parameter, and PyTorch's key. Yields nothing before the first step."""
        for number, optimiser in enumerate(self.every):
            for index, state in optimiser.state_dict()["state"].items():
                yield from ((f"{number}.{index}.{key}", tensor) for key, tensor in state.items())

    def fill(self, stored: dict[str, Tensor], laid_out: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Restores the optimiser states of a checkpoint. `stored`: name -> tensor, as from `states`; each gets the
        dtype of its parameter. `laid_out`, given by the caller: (parameter, complete state) -> the part of the state
        that this process holds."""
        slots = [[(weight, group) for group in one.param_groups for weight in group["params"]] for one in self.every]
        for name, tensor in stored.items():
            number, index, key = name.split(".")
            parameter, group = slots[int(number)][int(index)]
            state = self.every[int(number)].state[parameter]
            whole = tensor.to(parameter.dtype)
            state[key] = laid_out(parameter, whole) if tensor.ndim else _count(parameter, tensor, group)


def _count(parameter: Tensor, steps: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns the step count on the parameter's device for a fused kernel, else on the CPU."""
    is_on_device = group.get("fused") or group.get("capturable")
    return steps.to(parameter.device, torch.float32) if is_on_device else steps.cpu()


def learning_rate_share(progress: float) -> float:
    """Returns the learning rate as a share of its peak. `progress`: completed share of the run, 0 to 1. The rate rises
    linearly during the first 4% (`WARM_UP_SHARE`), then follows a cosine down to 5% of the peak (`LAST_SHARE`)."""
    if progress < WARM_UP_SHARE:
        return max(0.01, progress / WARM_UP_SHARE)
    along = min(1.0, (progress - WARM_UP_SHARE) / (1.0 - WARM_UP_SHARE))
    return LAST_SHARE + (1.0 - LAST_SHARE) * 0.5 * (1.0 + math.cos(math.pi * along))
