"""Small operations of a decoder layer in one kernel launch each, on CUDA: residual addition and norms, heads, gated
product.

The functions `*_twin` are the references in PyTorch. Kernels round to the tensors' dtype at the same points; sums of
squares use another order, and exponentials differ in the last bits of float32. They have no gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.torch.kernels import available

GATED = ("silu", "gelu_tanh")
"""Activations that the function `gated` supports."""
_BLOCK = 1024
"""Columns per program of the gated product."""


class NormWeight(NamedTuple):
    """Parameters of an RMSNorm over the last dimension."""

    weight: Tensor
    eps: float
    is_wide: bool = False
    """True if values are multiplied by the weight in float32, and the product is rounded to the dtype; False if they
    are rounded before the multiplication."""


class Places(NamedTuple):
    """For each token of a pass, its cache row and its position in this row: int64 [T] each."""

    rows_T: Tensor
    slots_T: Tensor


def can_run(tensor: Tensor) -> bool:
    """Return True if the kernels can process this tensor: on CUDA, with Triton, without gradients."""
    return available.can_use(tensor.device) and not (tensor.requires_grad and torch.is_grad_enabled())


def rms_norm_twin(inputs: Tensor, norm: NormWeight, dtype: torch.dtype) -> Tensor:
    """Compute an RMSNorm in PyTorch operations; the result has dtype `dtype`."""
    return weighted(normed(inputs, norm), norm, dtype)


def normed(inputs: Tensor, norm: NormWeight) -> Tensor:
    """Compute an RMSNorm without the multiplication by its weight; float32 if `norm.is_wide`, else in the inputs'
    dtype."""
    return F.rms_norm(inputs.float() if norm.is_wide else inputs, inputs.shape[-1:], eps=norm.eps)


def weighted(normed: Tensor, norm: NormWeight, dtype: torch.dtype) -> Tensor:
    """Multiply normed values by the norm's weight; the result has dtype `dtype`. If `norm.is_wide`, the product is
    computed in float32 and then rounded. Otherwise the values are rounded before the product."""
    return (normed * norm.weight).to(dtype) if norm.is_wide else normed.to(dtype) * norm.weight


def rms_norm(inputs: Tensor, norm: NormWeight, dtype: torch.dtype) -> Tensor:
    """Compute an RMSNorm in one kernel launch; the result has dtype `dtype`."""
    inputs = inputs.contiguous()
    out = torch.empty_like(inputs, dtype=dtype)
    _launch_norm(inputs, inputs, out, None, norm, 1.0)
    return out


def add_norm_twin(
    hidden_TD: Tensor, update_TD: Tensor, update_norm: NormWeight | None, norm: NormWeight | None, scale: float
) -> Tensor | None:
    """Add scale * update_norm(update_TD) to `hidden_TD` in place; returns norm(hidden_TD). If `update_norm` is None,
    adds scale * update_TD. If `norm` is None, returns None."""
    normed_TD = update_TD if update_norm is None else rms_norm_twin(update_TD, update_norm, update_TD.dtype)
    hidden_TD.add_(normed_TD, alpha=scale)
    return None if norm is None else rms_norm_twin(hidden_TD, norm, update_TD.dtype)


def add_norm(
    hidden_TD: Tensor, update_TD: Tensor, update_norm: NormWeight | None, norm: NormWeight | None, scale: float
) -> Tensor | None:
    """Add scale * update_norm(update_TD) to `hidden_TD` in place, and return norm(hidden_TD), in one kernel launch;
    None for a norm as in `add_norm_twin`."""
    update_TD = update_TD.contiguous()
    out_TD = None if norm is None else torch.empty_like(update_TD)
    _launch_norm(hidden_TD, update_TD, out_TD, update_norm, norm, scale, has_update=True)
    return out_TD


def _launch_norm(
    hidden: Tensor,
    update: Tensor,
    out: Tensor | None,
    update_norm: NormWeight | None,
    norm: NormWeight | None,
    scale: float,
    has_update: bool = False,
) -> None:
    """Launch the kernel; unused pointers are those of `hidden`."""
    size = hidden.shape[-1]
    check_contiguous(hidden)
    unused = NormWeight(hidden, 0.0)
    first, second = update_norm or unused, norm or unused
    block = next_power(size)
    _launch(
        "add_norm",
        (hidden.numel() // size,),
        [hidden, update, hidden if out is None else out, first.weight, second.weight, first.eps, second.eps, scale],
        SIZE=size,
        BLOCK=block,
        HAS_UPDATE=has_update,
        HAS_UPDATE_NORM=update_norm is not None,
        HAS_NORM=norm is not None,
        IS_UPDATE_WIDE=first.is_wide,
        IS_WIDE=second.is_wide,
        num_warps=min(max(block // 512, 1), 16),
    )


def heads(
    fused_TX: Tensor,
    num_heads: int,
    keys: Tensor,
    values: Tensor,
    places: Places,
    norm: NormWeight | None,
    tables: tuple[Tensor, Tensor] | None,
    is_whole: bool = False,
) -> Tensor:
    """Norm and rotate the heads of a QKV projection's output, and write keys and values to the cache; returns the
    queries [T, num_heads, head_dim]. The reference in PyTorch is `paceline.model.torch.heads.heads_twin`.

    fused_TX: for each token the heads of queries, keys and values, then any other columns. keys, values: one layer of
    the cache [rows, kv_heads, positions, head_dim]. norm: with one weight row per query and key head. `is_whole`: one
    norm over all queries of a token and one over all its keys, instead of one per head. tables: cosines and signed
    sines of the tokens' positions (`Rope.tables`); None: no rotation.
    """
    _, num_kv_heads, _, size = keys.shape
    rotary = 0 if tables is None else tables[0].shape[-1]
    cos, sin = (fused_TX, fused_TX) if tables is None else tables
    check_contiguous(fused_TX, cos, sin, *places)
    if keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(
            f"keys and values must lie alike, heads in one piece, not {keys.stride()} and {values.stride()}"
        )
    query_THD = fused_TX.new_empty(len(fused_TX), num_heads, size)
    whole_block = next_power(max(num_heads, num_kv_heads) * size) if is_whole else 1
    _launch(
        "heads",
        (len(fused_TX), num_heads + 2 * num_kv_heads),
        [
            *(fused_TX, query_THD, keys, values, *places, cos, sin, fused_TX if norm is None else norm.weight),
            *(0.0 if norm is None else norm.eps, fused_TX.stride(0), *keys.stride()[:3]),
        ],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        SIZE=size,
        BLOCK=next_power(size),
        ROTARY=rotary,
        HAS_NORM=norm is not None,
        IS_WIDE=norm is not None and norm.is_wide,
        IS_WHOLE=is_whole,
        WHOLE_BLOCK=whole_block,
        num_warps=min(max(whole_block // 1024, 1), 8),
    )
    return query_THD


def gated_twin(gate_up_TX: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up in PyTorch operations: [T, 2 * inner], gate first -> [T, inner]. `activation`:
    "silu" or "gelu_tanh"."""
    gate, up = gate_up_TX.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def gated(gate_up_TX: Tensor, activation: str) -> Tensor:
    """Compute `gated_twin`, with the same arguments, in one kernel launch."""
    check_contiguous(gate_up_TX)
    size = gate_up_TX.shape[-1] // 2
    out = gate_up_TX.new_empty(*gate_up_TX.shape[:-1], size)
    grid = (out.numel() // size, -(-size // _BLOCK))
    _launch("gated", grid, [gate_up_TX, out], SIZE=size, BLOCK=_BLOCK, IS_GELU=activation == "gelu_tanh", num_warps=4)
    return out


def check_contiguous(*tensors: Tensor) -> None:
    """Raise ValueError if one of the tensors is not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a kernel's input must be contiguous, not {tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def next_power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _launch(kernel: str, grid: tuple[int, ...], args: list[Tensor | float], **constants: int) -> None:
    assert isinstance(args[0], Tensor)
    available.launch("layer", kernel, grid, args, **constants, **available.overlap_options(args[0].device))
