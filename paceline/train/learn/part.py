"""Restricts training to a small part of a drafter: its last layer, or low-rank differences of its projections.

    all          every weight
    last-layer   the last decoder layer and the final norm; all other tensors keep their bits
    low-rank     W + B A in place of the projections W of attention and MLP in every decoder layer; A [rank, in] is
                 random at first, B [out, rank] zero (LoRA, arXiv 2106.09685)

`state_dict` has W + B A under the name of W, so checkpoints and the finished drafter have the tensors of an ordinary
one; A and B are stored with the optimiser's states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from paceline.draft.dflash.drafter import DFlashNetwork
from paceline.errors import ConfigError
from paceline.train.config import LoopConfig
from paceline.train.learn.checkpoint import Checkpoint

FACTORS = ("low_rank_a", "low_rank_b")
SAME = 1e-3
"""Largest difference of restored weights from stored ones, as a share of the largest weight of a tensor."""


def restrict(network: nn.Module, config: LoopConfig) -> None:
    """Freezes the weights of a drafter that training must not change, by `config.learn`:
    - "all": no weight is frozen;
    - "last-layer": only the last layer and the final norm are trained;
    - "low-rank": each projection gets two small trained matrices, whose product is added to its frozen weight.

    Raises ConfigError if the rank of the small matrices is not below the sizes of a projection."""
    if config.learn == "all":
        return
    assert isinstance(network, DFlashNetwork), "`check_part` refuses the others"
    network.requires_grad_(False)
    if config.learn == "last-layer":
        network.layers[-1].requires_grad_(True)
        network.norm.requires_grad_(True)
        return
    generator = torch.Generator().manual_seed(config.seed)
    for name, module in network.layers.named_modules():
        if name.endswith("_proj") and isinstance(module, nn.Linear):
            _add_factors(module, config.rank, generator)


def _add_factors(projection: nn.Linear, rank: int, generator: torch.Generator) -> None:
    """Adds B A x to the outputs of a projection. Raises ConfigError if the rank is not below its sizes."""
    weight = projection.weight
    num_outputs, num_inputs = weight.shape
    if rank >= min(num_outputs, num_inputs):
        raise ConfigError(f"rank {rank} is not below a projection's size, {min(num_outputs, num_inputs)}: lower --rank")
    first = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
    for name, values in zip(FACTORS, (first, torch.zeros(num_outputs, rank)), strict=True):
        projection.register_parameter(name, nn.Parameter(values.to(weight)))

    def add(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + linear(linear(inputs[0], module.low_rank_a), module.low_rank_b)

    @torch.no_grad()
    def merge(module: Any, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        first, second = (state.pop(f"{prefix}{name}") for name in FACTORS)
        state[f"{prefix}weight"] = state[f"{prefix}weight"] + second @ first

    projection.register_forward_hook(add)
    projection.register_state_dict_post_hook(merge)


def factors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of all low-rank factors that `restrict` has added to the network."""
    return ((name, weight) for name, weight in network.named_parameters() if name.endswith(FACTORS))


@torch.no_grad()
def restore_factors(network: nn.Module, checkpoint: Checkpoint) -> None:
    """Restores the low-rank factors of a resumed run: moves them from `checkpoint.optimisers` into the network, which
    must already have the weights of the drafter in --init. Raises ConfigError if the resulting weights are not the
    checkpoint's: --init then names another drafter than at the run's start."""
    for name, weight in factors(network):
        weight.copy_(checkpoint.optimisers.pop(name))
    for name, weight in network.state_dict().items():
        stored = checkpoint.weights[name].to(weight)
        if not bool((weight - stored).abs().max() <= SAME * stored.abs().max()):
            raise ConfigError(
                f"{checkpoint.folder} was trained from another --init ({name} differs): give that drafter, or another "
                "--out"
            )
