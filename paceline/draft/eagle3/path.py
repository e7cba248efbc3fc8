"""EAGLE-3's decode path (the network prepared for drafting with one target) in PyTorch, and its base class, which MTP's
path shares."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.eagle3.checkpoint import Eagle3Config
from paceline.draft.level import Level
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import AnyWeight
from paceline.model.kv_cache import StaticKVCache
from paceline.model.target import Target
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope, positions_of, rope_tables
from paceline.model.torch.decoder import Layer
from paceline.model.torch.heads import Tables, split_heads
from paceline.model.torch.parts import PackedLinear, RMSNorm


class EagleNorms:
    """Base class of EAGLE-3's decode paths (PyTorch and native): the norms before and after its layers."""

    def __init__(
        self, config: Eagle3Config, weights: Mapping[str, Tensor], dtype: torch.dtype, residual_dtype: torch.dtype
    ) -> None:
        self.config, self._dtype, self.residual_dtype = config, dtype, residual_dtype
        norms = {name: RMSNorm(weights[name], config.shape.rms_norm_eps) for name in weights if _is_outer_norm(name)}
        self._input_norm, self._final_norm = norms.get("input_norm.weight"), norms["norm.weight"]
        self._fc_norms = [norms[f"fc_norm.{index}.weight"] for index in range(config.num_taps if config.fc_norm else 0)]

    def normed_features(self, taps_TF: Tensor) -> Tensor:
        """Returns the input of the network's first matrix (`fc`): the target's hidden states `taps_TF`, normed if the
        config has norms for them. F = tapped layers * hidden size."""
        taps_TF = taps_TF.to(self._dtype)
        if self._input_norm:
            taps_TF = self._input_norm(taps_TF)
        if self._fc_norms:
            parts = taps_TF.chunk(len(self._fc_norms), dim=-1)
            taps_TF = torch.cat([norm(part) for norm, part in zip(self._fc_norms, parts, strict=True)], dim=-1)
        return taps_TF

    def next_state(self, hidden_TD: Tensor) -> Tensor:
        """Returns the states [T, D] for the next drafting step, from the hidden states after the last layer."""
        return self._final_norm(hidden_TD).to(self.residual_dtype) if self.config.norm_output else hidden_TD

    def head_input(self, state_TD: Tensor) -> Tensor:
        return state_TD.to(self._dtype) if self.config.norm_output else self._final_norm(state_TD)


class TorchChain:
    """Base class of decode paths in PyTorch operations, for networks that draft token by token. The *drafting state* is
    the hidden state that one step passes to the next."""

    computes_last_only = False
    """True if `_layers_of` computes the last layer's attention and MLP only for the entries whose outputs are
    needed."""
    residual_dtype: torch.dtype
    weight_bytes: int
    """Bytes of the drafter's prepared weights, without the target's."""
    _dtype: torch.dtype
    _layers: list[Layer]

    def _open(self, shape: DecoderConfig, target: Target, rope: Rope, slack: int) -> None:
        """Allocate the cache. `rope`: RoPE whose position 0 is that of cache entry 0. `slack`: number of cache
        positions per row beyond the maximum text length, for drafts."""
        self._rope, self._group, self._device = rope, shape.num_heads // shape.num_kv_heads, target.device
        self.windows = {layer.window for layer in self._layers}
        """Sliding windows of the layers; None: full attention."""
        sizes = shape.num_layers, target.cache.num_rows, shape.num_kv_heads, target.cache.max_len, shape.head_dim
        self.cache = StaticKVCache(*sizes, self._dtype, self._device, slack=slack)

    def features(self, taps_TF: Tensor) -> Tensor:
        """Returns the hidden states [T, D] that the first drafting step reads. `taps_TF`: the target's hidden states,
        F = tapped layers * hidden size."""
        return taps_TF

    @abstractmethod
    def logits(self, state_TD: Tensor) -> Tensor:
        """Returns logits [T, V] of T drafting states over the draft vocabulary, in float32 or the target's dtype."""

    @abstractmethod
    def _layers_of(
        self,
        plans: list[AttentionPlan],
        writer: CacheWriter,
        tables: Tables,
        tokens_T: Tensor,
        hidden_TD: Tensor,
        last_T: Tensor | None,
    ) -> Tensor:
        """Run all layers; returns the drafting states. `plans`: attention plan of each layer. `tables`: RoPE's cosines
        and sines of the entries. `last_T`: the entries whose outputs are needed after the last layer; None: all."""

    @torch.inference_mode()
    def extend(
        self, rows: list[int], starts: list[int], counts: list[int], tokens: list[int], taps_TF: Tensor
    ) -> Tensor:
        """Append cache entries for newly verified positions: `counts[i]` entries to row `rows[i]`, from cache index
        `starts[i]` on. Returns the drafting state [B, D] after the last new entry of each of the B rows.

        `tokens`: for each new position the token that follows it, all positions of the first row first. `taps_TF`: the
        target's hidden states at the new positions in the same order, F = tapped layers * hidden size. It may be longer
        than `tokens`; the rest is ignored.
        """
        lasts = [end - 1 for end in accumulate(counts)]
        last_T = torch.tensor(lasts, device=self._device) if len(lasts) < len(tokens) else None
        plans = self._plans(rows, starts, counts, self.computes_last_only and last_T is not None)
        tokens_T, writer = torch.tensor(tokens, device=self._device), CacheWriter(rows, starts, counts, self._device)
        tables = self._rope.tables(positions_of(starts, counts))
        state_BD = self._layers_of(plans, writer, tables, tokens_T, self.features(taps_TF[: len(tokens)]), last_T)
        self.cache.append(rows, counts)
        return state_BD

    @torch.inference_mode()
    def step(self, level: Level, tokens: list[int], state_TD: Tensor) -> Tensor:
        """Run the network on T drafts and return their drafting states [T, D]. `level`: the drafts' rows, and their
        ancestors in the draft tree. `tokens`: the drafts. `state_TD`: drafting state of each draft's parent."""
        plans = {window: level.plan(self._group, self._dtype, self._device, window) for window in self.windows}
        own = [plans[layer.window] for layer in self._layers]
        writer, tables = level.writer(self._device), self._rope.tables(level.positions)
        return self._layers_of(own, writer, tables, torch.tensor(tokens, device=self._device), state_TD, None)

    def run(
        self,
        plans: Mapping[int | None, AttentionPlan],
        writer: CacheWriter,
        entries_T: Tensor,
        tokens_T: Tensor,
        hidden_TD: Tensor,
    ) -> Tensor:
        """Computes T cache entries in a pass of fixed shape; returns their drafting states [T, D]. `plans`: attention
        plan of each sliding window. `entries_T`: cache index of each entry. `tokens_T`: token of each entry.
        `hidden_TD`: in the first step the result of `features`, later the drafting states of the step before."""
        own = [plans[layer.window] for layer in self._layers]
        return self._layers_of(own, writer, self._rope.tables_at(entries_T), tokens_T, hidden_TD, None)

    def _plans(self, rows: list[int], starts: list[int], counts: list[int], only_last: bool) -> list[AttentionPlan]:
        """Attention plans, one per layer. `only_last`: the last layer's has only each row's last entry as a query."""
        ends = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
        plan_by_kind: dict[tuple[int | None, bool], AttentionPlan] = {}
        options: dict[str, Any] = {"group": self._group, "dtype": self._dtype, "device": self._device}
        plans: list[AttentionPlan] = []
        for index, layer in enumerate(self._layers):
            kind = layer.window, only_last and index == len(self._layers) - 1
            if kind not in plan_by_kind:
                queries = (rows, ends, [1] * len(rows)) if kind[1] else (rows, starts, counts)
                plan_by_kind[kind] = AttentionPlan(*queries, window=layer.window, **options)
            plans.append(plan_by_kind[kind])
        return plans


class Eagle3Path(EagleNorms, TorchChain):
    """EAGLE-3 in PyTorch operations on any device, with weights prepared for one target. Cache entry e combines the
    target's hidden states of position e with the token after it, and has that token's RoPE position, e + 1."""

    computes_last_only = True

    def __init__(self, config: Eagle3Config, network: Mapping[str, Tensor], target: Target, slack: int) -> None:
        """`slack`: number of cache positions per row beyond the maximum text length, for drafts."""
        self._shape = shape = config.shape
        dtype, device = target.dtype, target.device
        weights = {name: tensor.detach().to(device, dtype) for name, tensor in network.items()}
        super().__init__(config, weights, dtype, torch.float32 if device.type == "cpu" else dtype)
        self._target = target
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._hidden_norm = RMSNorm(weights.pop("layers.0.hidden_norm.weight"), shape.rms_norm_eps)
        self._fc, self._head = PackedLinear(weights["fc.weight"]), PackedLinear(weights["lm_head.weight"])
        self._embedding = weights.get("embed_tokens.weight")
        self._layers = [
            Layer.of(shape, index, within(weights, f"layers.{index}.")) for index in range(shape.num_layers)
        ]
        tables = rope_tables(shape, target.cache.max_len + slack + 1)
        # Without position 0: a cache entry has the position of the token after it.
        self._open(shape, target, Rope(*(table[1:].to(device, dtype) for table in tables)), slack)

    @torch.inference_mode()
    def logits(self, state_TD: Tensor) -> Tensor:
        return self._head(self.head_input(state_TD))

    def features(self, taps_TF: Tensor) -> Tensor:
        return self._fc(self.normed_features(taps_TF)).to(self.residual_dtype)

    def _layers_of(
        self,
        plans: list[AttentionPlan],
        writer: CacheWriter,
        tables: Tables,
        tokens_T: Tensor,
        hidden_TD: Tensor,
        last_T: Tensor | None,
    ) -> Tensor:
        for index, layer in enumerate(self._layers):
            if index == 0:
                normed_TD = self._hidden_norm(hidden_TD)
                inputs_TX = torch.cat([layer.input_norm(self._embed(tokens_T)), normed_TD], dim=-1)
                hidden_TD = normed_TD.to(self.residual_dtype) if self.config.norm_before_residual else hidden_TD
            else:
                inputs_TX = layer.input_norm(hidden_TD)
            keys, values = self.cache.keys[index], self.cache.values[index]
            query_THD = split_heads(
                layer.qkv(inputs_TX), self._shape.num_heads, keys, values, writer, layer.qk_norm, self._rope, tables
            )
            if index == len(self._layers) - 1 and last_T is not None:
                query_THD, hidden_TD = query_THD[last_T], hidden_TD[last_T]
            attended_TX = plans[index].attend(query_THD, keys, values)
            hidden_TD = hidden_TD + layer.output(attended_TX)
            hidden_TD = hidden_TD + layer.mlp(layer.mlp_norm(hidden_TD))
        return self.next_state(hidden_TD)

    def _embed(self, tokens_T: Tensor) -> Tensor:
        return (
            self._target.matrix_embed(tokens_T) if self._embedding is None else F.embedding(tokens_T, self._embedding)
        )


def _is_outer_norm(name: str) -> bool:
    return name in ("input_norm.weight", "norm.weight") or name.startswith("fc_norm.")


def within(weights: dict[str, AnyWeight], prefix: str) -> dict[str, AnyWeight]:
    """Removes all weights whose names begin with `prefix` from `weights`; returns them by the rest of their names."""
    return {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
