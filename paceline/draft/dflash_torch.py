"""DFlash's decode path in PyTorch: the network of `dflash.py` fused and packed for one device, with its cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.dflash_path import Drafts, Network
from paceline.model.attention import AttentionPlan, CacheWriter, Rope, positions_of
from paceline.model.kv_cache import StaticKVCache
from paceline.model.linear import PackedLinear, RMSNorm
from paceline.model.rope import rope_tables
from paceline.model.target import Target, head_weight


@dataclass(slots=True)
class PackedLayer:
    input_norm: RMSNorm
    qkv: PackedLinear
    qk_norm: RMSNorm
    output: PackedLinear
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear
    kind: tuple[int | None, bool]
    """Window and causality."""
    keys: Tensor
    values: Tensor


class TorchPath:
    """A DraftPath by PyTorch operations, on any device.

    The cache is a StaticKVCache of one layer whose heads are those of all draft layers side by side, so that features are
    written to all layers at once; behind each row's length is room for the block, which is dead after the round.
    """

    def __init__(self, network: Network, target: Target, draft_ids: Tensor | None = None) -> None:
        self.config, shape = network.config, network.config.shape
        dtype, device, num_rows, max_len = target.dtype, target.device, target.cache.num_rows, target.cache.max_len
        self._target, self._dtype, self._device, self._shape = target, dtype, device, shape
        self._head = target.head if draft_ids is None else PackedLinear(head_weight(target)[draft_ids.to(device)])
        self._residual_dtype = torch.float32 if device.type == "cpu" else dtype
        weights = {name: tensor.detach().to(device, dtype) for name, tensor in network.state_dict().items()}
        self._fc = PackedLinear(weights["fc.weight"])
        self._hidden_norm = RMSNorm(weights["hidden_norm.weight"], shape.rms_norm_eps)
        self._final_norm = RMSNorm(weights["norm.weight"], shape.rms_norm_eps)
        every = [f"layers.{index}.self_attn" for index in range(shape.num_layers)]
        self._context_kv = _fuse(weights, [f"{name}.{which}_proj" for which in "kv" for name in every])
        key_norms = [weights[f"{name}.k_norm.weight"].expand(shape.num_kv_heads, -1) for name in every]
        self._context_norm = RMSNorm(torch.cat(key_norms), shape.rms_norm_eps)
        slack = self.config.block_size
        self._rope = Rope(*(table.to(device, dtype) for table in rope_tables(shape, max_len + slack)))
        heads = shape.num_layers * shape.num_kv_heads
        self.cache = StaticKVCache(1, num_rows, heads, max_len, shape.head_dim, dtype, device, slack=slack)
        self._layers = [self._pack(weights, index) for index in range(shape.num_layers)]

    def _pack(self, weights: Mapping[str, Tensor], index: int) -> PackedLayer:
        prefix, shape = f"layers.{index}", self._shape
        query, key = (weights[f"{prefix}.self_attn.{which}_norm.weight"] for which in "qk")
        norm_rows = [query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)]
        own_heads = slice(index * shape.num_kv_heads, (index + 1) * shape.num_kv_heads)
        return PackedLayer(
            input_norm=RMSNorm(weights[f"{prefix}.input_layernorm.weight"], shape.rms_norm_eps),
            qkv=_fuse(weights, [f"{prefix}.self_attn.{which}_proj" for which in "qkv"]),
            qk_norm=RMSNorm(torch.cat(norm_rows), shape.rms_norm_eps),
            output=_fuse(weights, [f"{prefix}.self_attn.o_proj"]),
            mlp_norm=RMSNorm(weights[f"{prefix}.post_attention_layernorm.weight"], shape.rms_norm_eps),
            gate_up=_fuse(weights, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]),
            down=_fuse(weights, [f"{prefix}.mlp.down_proj"]),
            kind=(shape.window(index), self.config.is_causal[index]),
            keys=self.cache.keys[0, :, own_heads],
            values=self.cache.values[0, :, own_heads],
        )

    @torch.inference_mode()
    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Append the keys and values that every layer makes of newly verified positions."""
        shape = self._shape
        heads = self._context_kv(self._hidden_norm(self._fc(taps_TF[: sum(counts)])))
        heads_THD = heads.view(-1, 2 * shape.num_layers * shape.num_kv_heads, shape.head_dim)
        keys_THD, values_THD = heads_THD.chunk(2, dim=1)
        keys_THD = self._rope.rotate(self._context_norm(keys_THD), self._rope.tables(positions_of(starts, counts)))
        writer = CacheWriter(rows, starts, counts, self._device)
        writer.write(self.cache.keys[0], keys_THD)
        writer.write(self.cache.values[0], values_THD)
        self.cache.append(rows, counts)

    @torch.inference_mode()
    def draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        """As DraftPath.draft."""
        masks = [self.config.mask_token_id] * (size - 1)
        tokens = [token for anchor in anchors for token in (anchor, *masks)]
        embedded_TD = self._target.embed(torch.tensor(tokens, device=self._device))
        if self.config.input_embedding_scale != 1.0:
            embedded_TD = embedded_TD * self.config.input_embedding_scale
        hidden_BJD = self.run_block(rows, embedded_TD).unflatten(0, (len(rows), size))
        slots_TD = self._final_norm(hidden_BJD[:, 1 : 1 + width].flatten(0, 1))
        logits_BKV = self._head(slots_TD).unflatten(0, (len(rows), width))
        largest, best = logits_BKV.max(-1)  # as argmax, which is six times as slow in bfloat16 on CPU
        best_BK = best.masked_fill_(~largest.isfinite(), -1).tolist()
        return best_BK, logits_BKV if with_logits else None

    def run_block(self, rows: list[int], hidden_TD: Tensor) -> Tensor:
        """Hidden states [B * size, D] before the final norm, each block right behind its row's context."""
        starts, counts = [self.cache.lengths[row] for row in rows], [len(hidden_TD) // len(rows)] * len(rows)
        plans = {kind: self._plan(rows, starts, counts, kind) for kind in {layer.kind for layer in self._layers}}
        writer = CacheWriter(rows, starts, counts, self._device)
        tables = self._rope.tables(positions_of(starts, counts))
        hidden_TD = hidden_TD.to(self._residual_dtype)
        for layer in self._layers:
            self._attend(layer, hidden_TD, plans[layer.kind], writer, tables)
            gate, up = layer.gate_up(layer.mlp_norm(hidden_TD)).chunk(2, dim=-1)
            hidden_TD.add_(layer.down(F.silu(gate).mul_(up)))
        return hidden_TD

    def _plan(self, rows: list[int], starts: list[int], counts: list[int], kind: tuple[int | None, bool]) -> AttentionPlan:
        window, is_causal = kind
        group = self._shape.num_heads // self._shape.num_kv_heads
        return AttentionPlan(
            rows, starts, counts, group=group, dtype=self._dtype, device=self._device, window=window, is_causal=is_causal
        )

    def _attend(
        self, layer: PackedLayer, hidden_TD: Tensor, plan: AttentionPlan, writer: CacheWriter, tables: tuple[Tensor, Tensor]
    ) -> None:
        shape = self._shape
        num_qk = shape.num_heads + shape.num_kv_heads
        heads = layer.qkv(layer.input_norm(hidden_TD)).view(-1, num_qk + shape.num_kv_heads, shape.head_dim)
        qk_heads = self._rope.rotate(layer.qk_norm(heads[:, :num_qk]), tables)
        writer.write(layer.keys, qk_heads[:, shape.num_heads :])
        writer.write(layer.values, heads[:, num_qk:])
        hidden_TD.add_(layer.output(plan.attend(qk_heads[:, : shape.num_heads], layer.keys, layer.values)))


def _fuse(weights: Mapping[str, Tensor], names: list[str]) -> PackedLinear:
    """One matrix product for several projections of the same input, stacked in this order."""
    matrices, biases = [weights[f"{name}.weight"] for name in names], [weights.get(f"{name}.bias") for name in names]
    present = [bias for bias in biases if bias is not None]
    return PackedLinear(torch.cat(matrices), torch.cat(present) if present else None)
