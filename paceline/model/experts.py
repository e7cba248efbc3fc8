"""What stands within an MLP: the product of its two halves, and the choice among several of them for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.config import DecoderConfig


def gating(config: DecoderConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """What comes of gate and up [T, inner], by `DecoderConfig.activation`."""

    def silu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh").mul_(up)

    def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
        return gate * torch.sigmoid(gate * config.swiglu_alpha) * (up + 1)

    return {"silu": silu, "gelu_tanh": gelu_tanh, "clamped_swiglu": clamped_swiglu}[config.activation]


class Part(Protocol):
    """A function of hidden states [T, D] with weights of its own."""

    num_bytes: int

    def __call__(self, inputs: Tensor, /) -> Tensor: ...


class Experts:
    """A few of many MLPs for each token, those with the largest scores of a router; their outputs are added by its weights.

    Tokens are sorted by expert: each one that is chosen at all runs once a pass, over all of its tokens.
    """

    def __init__(
        self, router: Part, experts: Sequence[Part], per_token: int, is_normed: bool, shared: tuple[Part, Part] | None = None
    ) -> None:
        """is_normed: the weights of a token's experts are divided by their sum. shared: an expert that every token gets, and
        the gate whose sigmoid it is multiplied by."""
        self._router, self._experts = router, experts
        self._per_token, self._is_normed, self._shared = per_token, is_normed, shared
        read = sum(expert.num_bytes for expert in experts) * per_token // len(experts)
        self.num_bytes = router.num_bytes + read + sum(part.num_bytes for part in shared or ())
        """Of what one token reads."""
        self.num_read = 0
        """How many experts the last pass read."""

    def __call__(self, normed_TD: Tensor) -> Tensor:
        probs_TE = self._router(normed_TD).softmax(-1, torch.float32)
        weights_TK, chosen_TK = probs_TE.topk(self._per_token, dim=-1)
        if self._is_normed:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        chosen_TK, place_TK = chosen_TK.sort(-1)
        order_S = chosen_TK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=len(self._experts)).tolist()
        shares = zip(self._experts, normed_TD[order_S // self._per_token].split(counts), strict=True)
        outputs = [expert(inputs) for expert, inputs in shares if len(inputs)]
        self.num_read, outputs_SD = len(outputs), torch.cat(outputs)
        outputs_SD = outputs_SD.float().mul_(weights_TK.gather(-1, place_TK).flatten()[order_S, None])
        summed_TD = _summed(outputs_SD, order_S.argsort().view(chosen_TK.shape)).to(normed_TD.dtype)
        if self._shared is not None:
            expert, gate = self._shared
            summed_TD += expert(normed_TD) * torch.sigmoid(gate(normed_TD))
        return summed_TD


def _summed(weighted_SD: Tensor, place_TK: Tensor) -> Tensor:
    """The sum [T, D] of each token's outputs, which stand at these places, from the first expert to the last.

    One addition after another: `index_add_` adds by atomic operations on CUDA, in another order every run, so that no
    text would be repeated bit by bit.
    """
    first_T, *others = place_TK.unbind(1)
    summed_TD = weighted_SD[first_T]
    for place_T in others:
        summed_TD += weighted_SD[place_T]
    return summed_TD
