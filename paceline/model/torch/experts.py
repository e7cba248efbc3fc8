"""Activation functions of MLPs, and mixtures of experts, which select several MLPs for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.kernels import experts as kernels
from paceline.model.torch.kernels.experts import ExpertStack
from paceline.model.torch.kernels.layer import can_run

MOST_FIXED = 1024
"""Maximum (token, expert) pairs for which a GPU runs an eager pass in fixed shape, without waiting for the device."""


def gating(config: DecoderConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the config's gated activation as a function (gate, up) -> activation(gate) * up; all are [T, inner]. The
    activation clamped_swiglu differs: it clamps gate and up to the config's limit, and multiplies by up + 1."""

    def silu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    def gelu_tanh(gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh").mul_(up)

    def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
        return gate * torch.sigmoid(gate * config.swiglu_alpha) * (up + 1)

    return {"silu": silu, "gelu_tanh": gelu_tanh, "clamped_swiglu": clamped_swiglu}[config.activation]


class Part(Protocol):
    """Protocol of a part of a layer, such as a router, an expert or a gate: a function of hidden states [T, D].
    `num_bytes`: bytes of its weights that a pass with one token reads."""

    num_bytes: int

    def __call__(self, inputs: Tensor, /) -> Tensor: ...


class Experts:
    """Mixture of experts: a router selects the best experts of each token; returns the weighted sum of their outputs.

    Usually tokens are sorted by expert, so that each expert runs once per pass; this needs a copy of token counts to
    the host. Passes of fixed shape, and passes of few tokens on a GPU, avoid this copy (`kernels/experts.py`).
    """

    def __init__(
        self,
        router: Part,
        experts: Sequence[Part],
        per_token: int,
        is_normed: bool,
        shared: tuple[Part, Part] | None = None,
        stack: ExpertStack | None = None,
    ) -> None:
        """per_token: experts per token. is_normed: weights of a token's experts are divided by their sum. shared: (an
        expert that runs for every token, its gate). stack: matrices of all experts for kernels; None on CPU."""
        self._router, self._experts, self._stack = router, experts, stack
        self._per_token, self._is_normed, self._shared = per_token, is_normed, shared
        read = sum(expert.num_bytes for expert in experts) * per_token // len(experts)
        self.num_bytes = router.num_bytes + read + sum(part.num_bytes for part in shared or ())
        """Bytes of weights that one token reads."""
        self.chosen_TK: Tensor | None = None
        """Indices of each token's experts in the last pass, ascending; -1 for padding tokens."""

    def __call__(self, normed_TD: Tensor, live_T: Tensor | None = None) -> Tensor:
        """Compute the outputs [T, D]. live_T: mask of valid tokens in a pass of fixed shape; the others get zeros and
        read no expert."""
        logits_TE, has_kernels = self._router(normed_TD), self._stack is not None and can_run(normed_TD)
        route = kernels.route if has_kernels else kernels.route_twin
        weights_TK, self.chosen_TK = route(logits_TE, self._per_token, self._is_normed, live_T)
        is_fixed = live_T is not None or (has_kernels and self.chosen_TK.numel() <= MOST_FIXED)
        shared = None if self._shared is None else (self._shared[0](normed_TD), self._shared[1](normed_TD))
        if self._stack is not None and has_kernels and is_fixed:
            return kernels.mix(normed_TD, self._stack, weights_TK, self.chosen_TK, shared)
        if is_fixed:
            summed_TD = kernels.mix_twin(normed_TD, self._experts, weights_TK, self.chosen_TK)
        else:
            summed_TD = self._sorted(normed_TD, weights_TK, self.chosen_TK.long())
        if shared is not None:
            expert_TD, gate_T1 = shared
            summed_TD += expert_TD * torch.sigmoid(gate_T1)
        return summed_TD

    def _sorted(self, normed_TD: Tensor, weights_TK: Tensor, chosen_TK: Tensor) -> Tensor:
        """Weighted sums [T, D] with one call per selected expert; copies the token counts to the host."""
        order_S = chosen_TK.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=len(self._experts)).tolist()
        shares = zip(self._experts, normed_TD[order_S // self._per_token].split(counts), strict=True)
        outputs_SD = torch.cat([expert(inputs) for expert, inputs in shares if len(inputs)])
        outputs_SD = outputs_SD.float().mul_(weights_TK.flatten()[order_S, None])
        return _summed(outputs_SD, order_S.argsort().view(chosen_TK.shape)).to(normed_TD.dtype)


def _summed(weighted_SD: Tensor, place_TK: Tensor) -> Tensor:
    """Sums [T, D] of each token's outputs at these places, from the first expert to the last. `index_add_` would use
    atomics on CUDA, in varying order, so results would not be reproducible bit by bit."""
    first_T, *others = place_TK.unbind(1)
    summed_TD = weighted_SD[first_T]
    for place_T in others:
        summed_TD += weighted_SD[place_T]
    return summed_TD
