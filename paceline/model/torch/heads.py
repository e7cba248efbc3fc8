"""Splits the output of a fused QKV projection into heads, applies norms and RoPE, and writes to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.torch.attention import CacheWriter, Rope
from paceline.model.torch.kernels import layer as kernels
from paceline.model.torch.parts import RMSNorm, WholeNorm

Tables = tuple[Tensor, Tensor]
"""(cosines, signed sines) for RoPE of a pass's positions; see `Rope.tables`."""


def split_heads(
    fused_TX: Tensor,
    num_heads: int,
    keys: Tensor,
    values: Tensor,
    writer: CacheWriter,
    norm: RMSNorm | WholeNorm | None,
    rope: Rope | None,
    tables: Tables | None,
    norms_values: bool = False,
) -> Tensor:
    """Split the QKV projection's output into heads, apply norms and RoPE, and write keys and values to the cache;
    returns the queries [T, num_heads, head_dim].

    fused_TX: for each token the heads of queries, keys and values, then any other columns. keys, values: one layer of
    the cache [rows, kv_heads, positions, head_dim]. norm: of queries and keys. tables: cosines and signed sines of the
    tokens' positions (`Rope.tables`); without `rope` nothing is rotated. On a GPU this is one kernel
    (`kernels.layer.heads`), except with `norms_values`.

    norms_values: `norm` applies to values too (`DecoderConfig.layer_sizes`), and fused_TX may have fewer heads. If it
    has no value heads, the keys before norm and RoPE are used as values. If it has query heads only, nothing is written
    to the cache, because the layer reads the keys and values of another layer.
    """
    if norms_values or not kernels.can_run(fused_TX):
        return heads_twin(fused_TX, num_heads, keys, values, writer, norm, rope, tables, norms_values)
    weight = None if norm is None else norm.for_kernel
    is_whole, rotated = isinstance(norm, WholeNorm), None if rope is None else tables
    return kernels.heads(fused_TX, num_heads, keys, values, writer.places, weight, rotated, is_whole)


def heads_twin(
    fused_TX: Tensor,
    num_heads: int,
    keys: Tensor,
    values: Tensor,
    writer: CacheWriter,
    norm: RMSNorm | WholeNorm | None,
    rope: Rope | None,
    tables: Tables | None,
    norms_values: bool = False,
) -> Tensor:
    """Compute `split_heads`, with the same arguments, in PyTorch operations: the reference of the kernel."""
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_qk_heads = num_heads + num_kv_heads
    heads = fused_TX.unflatten(-1, (-1, head_dim))
    if norms_values and norm is not None:
        if heads.shape[1] == num_qk_heads:
            heads = torch.cat([heads, heads[:, num_heads:]], dim=1)
        heads = norm(heads)
        qk_heads = heads[:, :num_qk_heads]
    else:
        qk_heads = heads[:, :num_qk_heads] if norm is None else norm.of_first(heads, num_qk_heads)
    if rope is not None and tables is not None:
        qk_heads = rope.rotate(qk_heads, tables)
    if heads.shape[1] > num_heads:
        writer.write(keys, qk_heads[:, num_heads:])
        writer.write(values, heads[:, num_qk_heads : num_qk_heads + num_kv_heads])
    return qk_heads[:, :num_heads]
