"""Triton kernels for gated delta nets in passes of fixed shape (CUDA graphs), with row lengths read on the device.

`paceline.model.torch.delta_net.DeltaNet` computes the same in PyTorch (`FixedStage.whole`). Kernels sum in another
order; they compute in float32 and round to the dtype at the same points.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.model.config.decoder import DeltaShape
from paceline.model.torch.delta_cache import DeltaMemory, FixedStage
from paceline.model.torch.kernels import available
from paceline.model.torch.kernels.layer import check_contiguous, next_power

_launch = partial(available.launch, "delta")
_TILE = 32
"""Values of a head per program."""
_KEYS = 16
"""Key channels that `recur` multiplies at a time."""


class DeltaWeights(NamedTuple):
    """Weights of a gated delta net layer (linear attention) other than its projection matrices, float32."""

    kernel_KX: Tensor
    """Weights of the convolution: K inputs, the newest last, for each channel."""
    rate_H: Tensor
    """Factor of the decay's logarithm for each value head, at most 0."""
    step_H: Tensor
    """Bias in the decay's softplus for each value head."""
    norm_V: Tensor
    """Weight of the output norm."""


def recur(
    fused_TX: Tensor,
    memory: DeltaMemory,
    stage: FixedStage,
    weights: DeltaWeights,
    shape: DeltaShape,
    eps: float,
    unit_eps: float,
) -> Tensor:
    """Compute a gated delta net without its input and output projections, in four kernel launches: merging old pending
    positions into the recurrent states, convolution, recurrence and gated norm. Updates `memory`. Returns the input of
    the output projection, [T, value heads * value_dim], with zeros for padding tokens.

    fused_TX: result of the fused input projection. For each token it has the convolution inputs, the gates, and for
    each value head the logit of beta (weight of the token's update) and the input of the decay's softplus. eps: of the
    output norm; unit_eps: of the normalisation of queries and keys.
    """
    check_contiguous(fused_TX, *weights, *memory.tensors(), stage.bits_BJ, stage.depths_BJ)
    num_rows, count = stage.bits_BJ.shape
    heads, key_heads, room = shape.num_value_heads, shape.num_key_heads, memory.decays_BNH.shape[1]
    tiles, columns = -(-shape.value_dim // _TILE), fused_TX.shape[1]
    kind = {"dtype": torch.float32, "device": fused_TX.device}
    query = torch.empty(len(fused_TX), shape.keys, **kind)
    value = torch.empty(len(fused_TX), shape.values, **kind)
    outputs = torch.empty(len(fused_TX), shape.values, dtype=fused_TX.dtype, device=fused_TX.device)
    sizes, tile, slots = _constants(shape, room, count)
    pending = memory.keys_BNK, memory.changes_BNHV, memory.decays_BNH
    lengths = stage.gone_B, stage.held_B
    # In this order: `commit` reads the keys and decays that `convolve` then moves to the front.
    _launch("commit", (tiles, heads, num_rows), [memory.states_BHKV, *pending, *lengths], **sizes, **tile, num_warps=4)
    _launch(
        "convolve",
        (num_rows, 2 * key_heads + heads),
        [
            *(fused_TX, weights.kernel_KX, memory.windows_BWX, memory.inputs_BNX, memory.keys_BNK, memory.decays_BNH),
            *(query, value, *lengths, stage.counts_B, stage.depths_BJ, stage.bits_BJ, columns, unit_eps),
        ],
        **sizes,
        **slots,
        BLOCK=next_power(max(shape.key_dim, shape.value_dim)),
        TAPS=shape.kernel,
        BLOCK_W=next_power(max(shape.kernel - 1, 1)),
        num_warps=4 if slots["BLOCK_J"] == 16 else 8,
    )
    _launch(
        "recur",
        (tiles, heads, num_rows),
        [
            *(fused_TX, weights.rate_H, weights.step_H, memory.states_BHKV, *pending, query, value, outputs),
            *(stage.held_B, stage.counts_B, stage.bits_BJ, columns),
        ],
        **sizes,
        **tile | {"BLOCK_K": min(tile["BLOCK_K"], _KEYS)},
        **slots,
        num_warps=4,
    )
    return _gated_norm(outputs, fused_TX, weights.norm_V, shape, eps)


def _gated_norm(outputs: Tensor, fused_TX: Tensor, norm_V: Tensor, shape: DeltaShape, eps: float) -> Tensor:
    """Norms of the heads of `outputs` [T, values], multiplied by the activated gates of the fused product."""
    heads, out = shape.num_value_heads, torch.empty_like(outputs)
    _launch(
        "gated_norm",
        (len(fused_TX), heads),
        [outputs, fused_TX, norm_V, out, fused_TX.shape[1], shape.channels, eps],
        NUM_HEADS=heads,
        VALUE=shape.value_dim,
        BLOCK=next_power(shape.value_dim),
        num_warps=1,
    )
    return out


def _constants(shape: DeltaShape, room: int, count: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """(sizes for all kernels, sizes of one tile of a state, sizes of the pass)."""
    sizes = {
        "ROOM": room, "BLOCK_R": max(16, next_power(room)), "NUM_KEY_HEADS": shape.num_key_heads,
        "NUM_HEADS": shape.num_value_heads, "KEY": shape.key_dim, "VALUE": shape.value_dim,
    }  # fmt: skip
    tile = {"BLOCK_K": max(16, next_power(shape.key_dim)), "BLOCK_V": _TILE}
    return sizes, tile, {"COUNT": count, "BLOCK_J": max(16, next_power(count))}
