"""Mixtures of experts in passes of fixed shape: routing and products without device-to-host copies.

On CUDA, kernels compute only the selected experts and read each of their matrices once for up to FEW tokens. The
functions `*_twin` are PyTorch equivalents. A token's experts are summed in ascending order, so that results are
reproducible bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.torch.kernels import available
from paceline.model.torch.kernels.layer import check_contiguous, next_power

_launch = partial(available.launch, "experts")
FEW = 16
"""Maximum tokens for which each expert searches all tokens for its own, without a list; they fit in one block."""
_BUSY = 512
"""Programs needed to fill a GPU; with fewer, tiles become smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """Matrices of all experts of a layer, stacked. In `gate_up_EXD` each expert's gate rows come before its up rows."""

    gate_up_EXD: Tensor
    down_EDI: Tensor
    gate_up_bias_EX: Tensor | None
    down_bias_ED: Tensor | None
    activation: str
    """Name of the activation, as in DecoderConfig; `limit` and `alpha` are parameters of clamped_swiglu."""
    limit: float
    alpha: float


def route_twin(logits_TE: Tensor, per_token: int, is_normed: bool, live_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Select the K = `per_token` experts with the largest logits for each token, in PyTorch operations.

    Returns (weights, indices), both [T, K]. The indices of a token's experts ascend. The weights, float32, are the
    experts' probabilities, divided by their sum if `is_normed`. live_T: mask of valid tokens; padding tokens get index
    -1.
    """
    weights_TK, chosen_TK = logits_TE.softmax(-1, torch.float32).topk(per_token, dim=-1)
    if is_normed:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    chosen_TK, place_TK = chosen_TK.sort(-1)
    if live_T is not None:
        chosen_TK = chosen_TK.masked_fill(~live_T[:, None], -1)
    return weights_TK.gather(-1, place_TK), chosen_TK


def route(logits_TE: Tensor, per_token: int, is_normed: bool, live_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `route_twin`, with the same arguments, in one kernel launch."""
    check_contiguous(logits_TE)
    (num_tokens, num_experts), device = logits_TE.shape, logits_TE.device
    weights_TK = torch.empty(num_tokens, per_token, dtype=torch.float32, device=device)
    chosen_TK = torch.empty(num_tokens, per_token, dtype=torch.int32, device=device)
    _launch(
        "route",
        (num_tokens,),
        [logits_TE, logits_TE if live_T is None else live_T, weights_TK, chosen_TK, num_experts],
        PER_TOKEN=per_token,
        BLOCK_E=next_power(num_experts),
        IS_NORMED=is_normed,
        HAS_LIVE=live_T is not None,
        num_warps=1,
    )
    return weights_TK, chosen_TK


def mix_twin(
    inputs_TD: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], weights_TK: Tensor, chosen_TK: Tensor
) -> Tensor:
    """Compute, for each token, the weighted sum of the outputs of its K experts: [T, D], in the inputs' dtype.
    chosen_TK: the experts' indices in `experts`; index -1 adds zeros. All experts run on all tokens."""
    outputs_ETD = torch.stack([expert(inputs_TD) for expert in experts])
    token_T = torch.arange(len(inputs_TD), device=inputs_TD.device)
    summed_TD = torch.zeros(outputs_ETD.shape[1:], dtype=torch.float32, device=inputs_TD.device)
    for chosen_T, weights_T in zip(chosen_TK.unbind(1), weights_TK.unbind(1), strict=True):
        own_TD = outputs_ETD[chosen_T.clamp(min=0), token_T].float() * weights_T[:, None]
        summed_TD += own_TD.masked_fill((chosen_T < 0)[:, None], 0.0)
    return summed_TD.to(inputs_TD.dtype)


def mix(
    inputs_TD: Tensor,
    stack: ExpertStack,
    weights_TK: Tensor,
    chosen_TK: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute the weighted sum [T, D] of the outputs of each token's experts in `stack`, in three kernel launches, or
    four for more than 16 tokens (FEW). weights_TK, chosen_TK: as in `mix_twin`. shared: (output of a shared expert [T,
    D], its gates [T, 1]); adds the output times the sigmoid of its gate."""
    check_contiguous(inputs_TD, weights_TK, chosen_TK)
    (num_tokens, hidden), per_token, device = inputs_TD.shape, chosen_TK.shape[1], inputs_TD.device
    num_experts, _, inner = stack.down_EDI.shape
    num_pairs, has_lists = chosen_TK.numel(), num_tokens > FEW
    lists = counts = chosen_TK  # placeholders: not read without lists
    if has_lists:
        lists = torch.empty(num_experts, num_tokens, dtype=torch.int32, device=device)
        counts = torch.empty(num_experts, dtype=torch.int32, device=device)
        arguments: list[Tensor | float] = [chosen_TK, lists, counts, num_tokens]
        _launch("list_pairs", (num_experts,), arguments, PER_TOKEN=per_token, BLOCK_P=next_power(per_token), BLOCK_T=64)
    is_by_pair = not has_lists and num_pairs <= num_experts
    slots = num_pairs if is_by_pair else num_experts
    # With lists: about twice an expert's mean number of pairs, so that one block is enough for most.
    block_t = FEW if not has_lists else min(64, max(16, next_power(2 * num_pairs // num_experts)))

    pairs = _Pairs(chosen_TK, lists, counts, num_tokens, slots, block_t, has_lists, is_by_pair)
    activated = _multiply(inputs_TD, stack, pairs, inner, is_up=True)
    outputs = _multiply(activated, stack, pairs, hidden, is_up=False)
    summed_TD = torch.empty_like(inputs_TD)
    block = min(1024, next_power(hidden))
    _launch(
        "combine",
        (num_tokens, -(-hidden // block)),
        [outputs, weights_TK, chosen_TK, *(shared or (outputs, outputs)), summed_TD],
        SIZE=hidden,
        PER_TOKEN=per_token,
        BLOCK=block,
        HAS_SHARED=shared is not None,
        num_warps=4,
    )
    return summed_TD


class _Pairs(NamedTuple):
    """(token, expert) pairs and their distribution among programs."""

    chosen_TK: Tensor
    lists: Tensor
    counts: Tensor
    num_tokens: int
    slots: int
    """Number of program groups: one per pair or per expert."""
    block_t: int
    has_lists: bool
    is_by_pair: bool


def _multiply(inputs: Tensor, stack: ExpertStack, pairs: _Pairs, size: int, *, is_up: bool) -> Tensor:
    """Products [pairs, size] of the inputs with their experts' first matrix, activated, or with the second."""
    per_token, num_pairs = pairs.chosen_TK.shape[1], pairs.chosen_TK.numel()
    weight, bias = (stack.gate_up_EXD, stack.gate_up_bias_EX) if is_up else (stack.down_EDI, stack.down_bias_ED)
    block_n = 32 if pairs.block_t <= 32 else 64
    if pairs.slots * -(-size // block_n) < _BUSY:
        block_n = 16
    # Rows of padding pairs stay unwritten: `combine` does not read them.
    out = torch.empty(num_pairs, size, dtype=inputs.dtype, device=inputs.device)
    _launch(
        "multiply",
        (-(-size // block_n), pairs.slots),
        [
            *(inputs, weight, weight if bias is None else bias, out, pairs.chosen_TK, pairs.lists, pairs.counts),
            *(pairs.num_tokens, stack.limit, stack.alpha),
        ],
        PER_TOKEN=per_token,
        OUT=size,
        IN=inputs.shape[1],
        IS_UP=is_up,
        ACTIVATION=stack.activation,
        HAS_BIAS=bias is not None,
        HAS_LISTS=pairs.has_lists,
        IS_BY_PAIR=pairs.is_by_pair,
        BLOCK_P=next_power(per_token),
        BLOCK_S=next_power(num_pairs) if pairs.is_by_pair else 1,
        BLOCK_T=pairs.block_t,
        BLOCK_N=block_n,
        **({"BLOCK_K": 128, "STAGES": 4} if inputs.dtype.itemsize == 2 else {"BLOCK_K": 32, "STAGES": 1}),
        num_warps=4,
    )
    return out
