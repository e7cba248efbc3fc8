"""DFlash's decode path in PyTorch: the network of `dflash.py` fused and packed for one device, with its cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from paceline.draft.checkpoint import DFlashConfig
from paceline.model.attention import AttentionPlan, CacheWriter, Rope, positions_of
from paceline.model.decoder import Layer, PackedLinear, RMSNorm, build_layers, fuse
from paceline.model.kv_cache import StaticKVCache
from paceline.model.rope import rope_tables
from paceline.model.target import Target, head_weight

Drafts = tuple[list[list[int]], Tensor | None]


class TorchPath:
    """DFlash by PyTorch operations, on any device: the weights of a network made for decoding with one target.

    The cache is a StaticKVCache of one layer whose heads are those of all draft layers side by side, so that features are
    written to all layers at once; behind each row's length is room for the block, which is dead after the round.
    """

    def __init__(
        self, config: DFlashConfig, network: Mapping[str, Tensor], target: Target, draft_ids: Tensor | None = None
    ) -> None:
        self.config, shape = config, config.shape
        dtype, device, num_rows, max_len = target.dtype, target.device, target.cache.num_rows, target.cache.max_len
        self._target, self._dtype, self._device, self._shape = target, dtype, device, shape
        self._head = target.head if draft_ids is None else PackedLinear(head_weight(target)[draft_ids.to(device)])
        self._residual_dtype = torch.float32 if device.type == "cpu" else dtype
        weights = {name: tensor.detach().to(device, dtype) for name, tensor in network.items()}
        self._fc = PackedLinear(weights["fc.weight"])
        self._hidden_norm = RMSNorm(weights["hidden_norm.weight"], shape.rms_norm_eps)
        self._final_norm = RMSNorm(weights["norm.weight"], shape.rms_norm_eps)
        every = [f"layers.{index}.self_attn" for index in range(shape.num_layers)]
        self._context_kv = fuse(dict(weights), *(f"{name}.{which}_proj" for which in "kv" for name in every))
        key_norms = [weights[f"{name}.k_norm.weight"].expand(shape.num_kv_heads, -1) for name in every]
        self._context_norm = RMSNorm(torch.cat(key_norms), shape.rms_norm_eps)
        slack = config.block_size
        self._rope = Rope(*(table.to(device, dtype) for table in rope_tables(shape, max_len + slack)))
        heads = shape.num_layers * shape.num_kv_heads
        self.cache = StaticKVCache(1, num_rows, heads, max_len, shape.head_dim, dtype, device, slack=slack)
        """What was injected, by the target's rows."""
        self._layers, _ = build_layers(shape, weights.items(), partial(Layer.of, shape), make_other=lambda name, weight: None)
        self._kinds = [(layer.window, is_causal) for layer, is_causal in zip(self._layers, config.is_causal, strict=True)]
        self._keys = self.cache.keys[0].chunk(shape.num_layers, dim=1)
        self._values = self.cache.values[0].chunk(shape.num_layers, dim=1)
        self._group = shape.num_heads // shape.num_kv_heads

    @torch.inference_mode()
    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Append the keys and values that every layer makes of newly verified positions: the first sum(counts) of `taps_TF`."""
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
        """The most likely token of the first `width` drafts of each row, counted in the draft vocabulary, and their logits
        [B, width, V] as the head gives them; each block of `size` slots stands right behind its row's context and is dead
        afterwards."""
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
        plan = partial(AttentionPlan, rows, starts, counts, group=self._group, dtype=self._dtype, device=self._device)
        plans = {(window, is_causal): plan(window=window, is_causal=is_causal) for window, is_causal in set(self._kinds)}
        writer = CacheWriter(rows, starts, counts, self._device)
        tables = self._rope.tables(positions_of(starts, counts))
        hidden_TD = hidden_TD.to(self._residual_dtype)
        for layer, kind, keys, values in zip(self._layers, self._kinds, self._keys, self._values, strict=True):
            layer.run(hidden_TD, keys, values, plans[kind], writer, self._rope, tables)
        return hidden_TD
