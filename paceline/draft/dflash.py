"""DFlash (arXiv 2602.06036): one pass of a small block-diffusion network drafts a block.

The target's tapped hidden states become keys and values of every draft layer, once per verified position, all layers in one
matrix product (`observe`). A round embeds [anchor, MASK, MASK, ...] with the target's embedding, lets every slot see the
context before the anchor and its block, and reads all drafts off the target's head at once (`propose`). Slot k predicts the
token at its own position, anchor + k; slot 0 is discarded.

`DFlashNetwork` holds the weights and is what training trains; `_DecodePath` is the same mathematics fused and packed for
decoding, with its cache; `tests/draft/test_dflash.py` compares both with the authors' `dflash` package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import rng
from paceline.draft.base import Drafter, Observed
from paceline.draft.checkpoint import DFlashConfig, check_fit, new_config, read_checkpoint, read_draft_ids, write_checkpoint
from paceline.errors import ConfigError, ModelFileError
from paceline.model.attention import AttentionPlan, CacheWriter, Rope, positions_of
from paceline.model.config import DecoderConfig
from paceline.model.fused import rms_norm, swiglu
from paceline.model.kv_cache import StaticKVCache
from paceline.model.linear import PackedLinear, RMSNorm
from paceline.model.logits import sample, target_probs
from paceline.model.rope import rope_tables
from paceline.model.target import Target, head_weight
from paceline.types import Batch, DraftBlock, Sequence


class Attend(Protocol):
    """Rotary positions, who sees whom, and softmax, for blocks packed one after another; `train/attention.py` holds some.

    layer: index of the draft layer. query [T, heads, head_dim]; keys and values [T, kv_heads, head_dim] of the blocks' own
    slots and [N, kv_heads, head_dim] of the context, normed, not yet rotated. Returns [T, heads * head_dim].
    """

    def __call__(self, layer: int, query_THD: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor: ...


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, inputs: Tensor) -> Tensor:
        return rms_norm(inputs, self.weight, self.eps)


class _Attention(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.output_bias)
        self.q_norm = _Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = _Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        query = self.q_norm(self._heads(self.q_proj(block_TD)))
        return self.o_proj(attend(layer, query, self._key_value(block_TD), self._key_value(context_ND)))

    def _key_value(self, inputs_TD: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_norm(self._heads(self.k_proj(inputs_TD))), self._heads(self.v_proj(inputs_TD))

    def _heads(self, projected_TX: Tensor) -> Tensor:
        return projected_TX.unflatten(-1, (-1, self.head_dim))


class _MLP(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(inputs), self.up_proj(inputs)))


class _Layer(nn.Module):
    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)
        self.input_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, layer: int, block_TD: Tensor, context_ND: Tensor, attend: Attend) -> Tensor:
        block_TD = block_TD + self.self_attn(layer, self.input_layernorm(block_TD), context_ND, attend)
        return block_TD + self.mlp(self.post_attention_layernorm(block_TD))


class DFlashNetwork(nn.Module):
    """The trainable network; parameters have the names and dtypes of the checkpoint. Embedding and head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.shape
        self.fc = nn.Linear(len(config.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)

    @classmethod
    def of(cls, config: DFlashConfig, tensors: Mapping[str, Tensor], source: Path | str = "checkpoint") -> DFlashNetwork:
        """A network that holds `tensors` themselves. Raises ModelFileError naming a tensor that does not fit the config."""
        with torch.device("meta"):
            network = cls(config)
        expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if expected != given:
            name = min(key for key in expected | given if expected.get(key) != given.get(key))
            raise ModelFileError(
                f"{source}: tensor {name!r} has shape {given.get(name)}, the config asks for {expected.get(name)}: "
                "config and weights are of different drafters"
            )
        network.load_state_dict(dict(tensors), assign=True)
        return network

    @classmethod
    def random(cls, config: DFlashConfig, seed: int = 0) -> DFlashNetwork:
        """Float32 weights, normal with deviation 0.02, norms one; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in cls(config).state_dict().items()}
        tensors = {
            name: torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        return cls.of(config, tensors)

    def forward(self, block_TD: Tensor, taps_NF: Tensor, attend: Attend) -> Tensor:
        """Final normed hidden states [T, D] of block inputs, given the target's taps at N context positions.

        Any number of blocks and contexts, packed one after another; `attend` knows which is whose and where each stands.
        Differentiable; the decode path must equal it.
        """
        context_ND = self.hidden_norm(self.fc(taps_NF))
        for index, layer in enumerate(self.layers):
            block_TD = layer(index, block_TD, context_ND, attend)
        return self.norm(block_TD)


def visible(query_T: Tensor, key_S: Tensor, window: int | None, is_causal: bool) -> Tensor:
    """Whether slots at positions [T] see keys at positions [S], of those their block may see at all; bool [T, S].

    Context stands before the whole block, so causality only hides later slots. The window counts per query, and both ways.
    """
    distance = query_T[:, None] - key_S
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def scale_logits(logits: Tensor, config: DFlashConfig) -> Tensor:
    """The target head's output with the drafter's own multiplier and soft cap."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.final_logit_softcapping:
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


@dataclass(slots=True)
class _PackedLayer:
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


class _DecodePath:
    """The network fused and packed for one device, with the keys and values of `num_rows` sequences.

    The cache is a StaticKVCache of one layer whose heads are those of all draft layers side by side, so that features are
    written to all layers at once; behind each row's length is room for the block, which is dead after the round.
    """

    def __init__(self, network: DFlashNetwork, dtype: torch.dtype, device: torch.device, num_rows: int, max_len: int) -> None:
        self.config, shape = network.config, network.config.shape
        self._dtype, self._device, self._shape = dtype, device, shape
        self._residual_dtype = torch.float32 if device.type == "cpu" else dtype
        weights = {name: tensor.detach().to(device, dtype) for name, tensor in network.state_dict().items()}
        self._fc = PackedLinear(weights["fc.weight"])
        self._hidden_norm = RMSNorm(weights["hidden_norm.weight"], shape.rms_norm_eps)
        self.final_norm = RMSNorm(weights["norm.weight"], shape.rms_norm_eps)
        every = [f"layers.{index}.self_attn" for index in range(shape.num_layers)]
        self._context_kv = _fuse(weights, [f"{name}.{which}_proj" for which in "kv" for name in every])
        key_norms = [weights[f"{name}.k_norm.weight"].expand(shape.num_kv_heads, -1) for name in every]
        self._context_norm = RMSNorm(torch.cat(key_norms), shape.rms_norm_eps)
        slack = self.config.block_size
        self._rope = Rope(*(table.to(device, dtype) for table in rope_tables(shape, max_len + slack)))
        heads = shape.num_layers * shape.num_kv_heads
        self.cache = StaticKVCache(1, num_rows, heads, max_len, shape.head_dim, dtype, device, slack=slack)
        self._layers = [self._pack(weights, index) for index in range(shape.num_layers)]

    def _pack(self, weights: Mapping[str, Tensor], index: int) -> _PackedLayer:
        prefix, shape = f"layers.{index}", self._shape
        query, key = (weights[f"{prefix}.self_attn.{which}_norm.weight"] for which in "qk")
        norm_rows = [query.expand(shape.num_heads, -1), key.expand(shape.num_kv_heads, -1)]
        own_heads = slice(index * shape.num_kv_heads, (index + 1) * shape.num_kv_heads)
        return _PackedLayer(
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

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Append the keys and values that every layer makes of newly verified positions."""
        shape = self._shape
        heads = self._context_kv(self._hidden_norm(self._fc(taps_TF)))
        heads_THD = heads.view(-1, 2 * shape.num_layers * shape.num_kv_heads, shape.head_dim)
        keys_THD, values_THD = heads_THD.chunk(2, dim=1)
        keys_THD = self._rope.rotate(self._context_norm(keys_THD), self._rope.tables(positions_of(starts, counts)))
        writer = CacheWriter(rows, starts, counts, self._device)
        writer.write(self.cache.keys[0], keys_THD)
        writer.write(self.cache.values[0], values_THD)
        self.cache.append(rows, counts)

    def run_block(self, rows: list[int], hidden_TD: Tensor) -> Tensor:
        """Hidden states [B * block_size, D] before the final norm, each block right behind its row's context."""
        block_size = self.config.block_size
        starts, counts = [self.cache.lengths[row] for row in rows], [block_size] * len(rows)
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
        self, layer: _PackedLayer, hidden_TD: Tensor, plan: AttentionPlan, writer: CacheWriter, tables: tuple[Tensor, Tensor]
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


class DFlashDrafter(Drafter):
    """A DFlash v1 drafter. Greedy requests get certain drafts, sampled ones drafts with their distribution."""

    name = "dflash"

    def __init__(
        self,
        network: DFlashNetwork,
        *,
        num_drafted: int | None = None,
        draft_sampling: Literal["sample", "greedy"] = "sample",
        draft_ids: Tensor | None = None,
    ) -> None:
        """`num_drafted` below block_size - 1 reads fewer slots of the same block. `draft_sampling="greedy"` drafts the most
        likely tokens for sampled requests too. `draft_ids`: the only tokens drafted, for a head of fewer rows.
        Raises ConfigError when the block has fewer slots."""
        self.network, self.config = network, network.config
        self.block_size = self.config.block_size
        self.num_drafted = self.block_size - 1 if num_drafted is None else num_drafted
        if not 0 <= self.num_drafted < self.block_size:
            raise ConfigError(f"this drafter's block of {self.block_size} drafts 0 to {self.block_size - 1}, not {num_drafted}")
        if draft_sampling not in ("sample", "greedy"):
            raise ConfigError(f"draft_sampling must be sample or greedy, not {draft_sampling!r}")
        self.draft_sampling, self.draft_ids = draft_sampling, draft_ids
        self.tap_layers = self.config.target_layer_ids

    @classmethod
    def from_folder(
        cls, folder: Path | str, *, num_drafted: int | None = None, draft_sampling: Literal["sample", "greedy"] = "sample"
    ) -> DFlashDrafter:
        """Read a checkpoint in z-lab's format. Raises ModelNotFoundError, ModelFileError or UnsupportedModelError."""
        config, tensors = read_checkpoint(folder)
        network, draft_ids = DFlashNetwork.of(config, tensors, folder), read_draft_ids(folder)
        return cls(network, num_drafted=num_drafted, draft_sampling=draft_sampling, draft_ids=draft_ids)

    @classmethod
    def random(cls, target: Target, *, seed: int = 0, num_drafted: int | None = None, **keys: Any) -> DFlashDrafter:
        """Random weights for mocking: right cost, useless drafts. `keys` are those of `checkpoint.new_config`."""
        raw = new_config(target.hidden_size, target.vocab_size, target.num_layers, **keys)
        return cls(DFlashNetwork.random(DFlashConfig.from_json(raw), seed), num_drafted=num_drafted)

    def save(self, folder: Path | str) -> None:
        """Write the checkpoint; what was loaded is written back unchanged. Raises CacheError."""
        write_checkpoint(folder, self.config.raw, self.network.state_dict(), self.draft_ids)

    @torch.inference_mode()
    def bind(self, target: Target) -> None:
        check_fit(self.config, target, self.draft_ids)
        self._target, self._head = target, target.head
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(target.device)
            self._head = PackedLinear(head_weight(target)[self.draft_ids])
        self._path = _DecodePath(self.network, target.dtype, target.device, target.cache.num_rows, target.cache.max_len)

    def cache_bytes(self, target: Target) -> int:
        shape, num_rows = self.config.shape, target.cache.num_rows
        positions = num_rows * (target.cache.max_len + self.block_size)
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * positions * target.dtype.itemsize

    def start(self, seq: Sequence) -> None:
        self._path.cache.rollback([seq.row], [0])

    @torch.inference_mode()
    def observe(self, observed: list[Observed]) -> None:
        rows, starts = [one.sequence.row for one in observed], [one.start for one in observed]
        assert starts == [self._path.cache.lengths[row] for row in rows], "positions must be observed once, in order"
        taps = [one.taps_NF for one in observed if one.taps_NF is not None]
        assert len(taps) == len(observed), "the target was not asked for taps"
        self._path.inject(rows, starts, [one.count for one in observed], taps[0] if len(taps) == 1 else torch.cat(taps))

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        block = DraftBlock.certain([[] for _ in limits])
        if not drafting:
            return block
        sequences = [batch.sequences[index] for index in drafting]
        logits_BKV = self._draft_logits(sequences, max(limits))
        best = logits_BKV.max(-1).indices  # as argmax, which is six times as slow in bfloat16 on CPU
        best_BK = (best if self.draft_ids is None else self.draft_ids[best]).tolist()
        for seq, index, logits_KV, best_K in zip(sequences, drafting, logits_BKV, best_BK, strict=True):
            limit = limits[index]
            if seq.params.is_greedy or self.draft_sampling == "greedy":
                block.tokens_B[index] = best_K[:limit]
            else:
                block.tokens_B[index], block.probs_B[index] = _sampled(seq, self._over_all_tokens(logits_KV[:limit]))
        return block

    def _over_all_tokens(self, logits_KV: Tensor) -> Tensor:
        if self.draft_ids is None:
            return logits_KV
        every_KV = logits_KV.new_full((len(logits_KV), self._target.vocab_size), float("-inf"))
        return every_KV.index_copy_(1, self.draft_ids, logits_KV)

    def _draft_logits(self, sequences: list[Sequence], width: int) -> Tensor:
        """Logits [B, width, V] of the first `width` drafts; the block itself always has its full, trained size."""
        masks = [self.config.mask_token_id] * (self.block_size - 1)
        tokens = [token for seq in sequences for token in (seq.tokens[-1], *masks)]
        rows = [seq.row for seq in sequences]
        assert [self._path.cache.lengths[row] for row in rows] == [seq.cached_len for seq in sequences]
        embedded_TD = self._target.embed(torch.tensor(tokens, device=self._target.device))
        if self.config.input_embedding_scale != 1.0:
            embedded_TD = embedded_TD * self.config.input_embedding_scale
        hidden_BJD = self._path.run_block(rows, embedded_TD).unflatten(0, (len(rows), self.block_size))
        slots_TD = self._path.final_norm(hidden_BJD[:, 1 : 1 + width].flatten(0, 1))
        logits_TV = scale_logits(self._head(slots_TD), self.config)
        return logits_TV.unflatten(0, (len(rows), width))


def _sampled(seq: Sequence, logits_KV: Tensor) -> tuple[list[int], Tensor]:
    """Drafts drawn from the request's own distribution over the drafter's logits, and that distribution [K, V]."""
    probs_KV = target_probs(logits_KV, seq.params)
    draws = [rng.uniform(seq.seed, rng.DRAFT, seq.cached_len, slot) for slot in range(len(probs_KV))]
    return [sample(probs_V, draw) for probs_V, draw in zip(probs_KV, draws, strict=True)], probs_KV
