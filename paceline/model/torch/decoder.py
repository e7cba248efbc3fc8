"""The PyTorch decoder for the families of families.json, optimised for decoding.

Weights are fused (q, k, v; gate and up) and packed for the device. One call runs a ragged batch and also returns the
outputs of tapped layers. Plain functions on tensors replace modules, since at one row call overhead dominates.
Differences between families are fields of DecoderConfig. `tests/families/` compares each with Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.checkpoint import check_tensors
from paceline.model.config.decoder import DecoderConfig, RopeKind
from paceline.model.gguf.blocks import AnyWeight
from paceline.model.kv_cache import LayeredKVCache, StaticKVCache
from paceline.model.layout import NORMS, gate_apart, layer_shapes
from paceline.model.target import EndScales, ForwardBatch, ForwardOutput, Target
from paceline.model.torch.attention import AttentionPlan, CacheWriter, Rope, Scores
from paceline.model.torch.cuda_graphs import Recorder
from paceline.model.torch.delta_cache import DeltaCache, FixedStage, Stage
from paceline.model.torch.delta_net import DeltaLayer
from paceline.model.torch.experts import Experts
from paceline.model.torch.heads import Tables, split_heads
from paceline.model.torch.layer_inputs import LayerEnd, LayerInputs
from paceline.model.torch.parts import (
    GatedMLP,
    NoNorm,
    Norm,
    PackedLinear,
    Residual,
    RMSNorm,
    WholeNorm,
    fuse,
    make_mlp,
    norm_of,
    run_mlp,
)
from paceline.model.torch.sdpa import chosen_kernels


class LayerAttention(NamedTuple):
    """Inputs of a decoder layer other than hidden states: its part of the KV cache, attention plan, RoPE, and per-layer
    embeddings."""

    keys: Tensor
    values: Tensor
    plan: AttentionPlan
    writer: CacheWriter
    rope: Rope | None
    """RoPE of the layer; None: nothing is rotated."""
    tables: Tables | None
    """Cosines and signed sines of the tokens' positions (`Rope.tables`); None: nothing is rotated."""
    input_TI: Tensor | None = None
    """The layer's per-layer embeddings [T, I], if the model has any."""


@dataclass(slots=True)
class Layer:
    config: DecoderConfig
    input_norm: Norm
    qkv: PackedLinear
    qk_norm: RMSNorm | WholeNorm | None
    """Norms of query and key heads: one weight row per head of either."""
    output: PackedLinear
    attention_out_norm: Norm
    mlp_norm: Norm
    mlp: GatedMLP | Experts
    mlp_out_norm: Norm
    window: int | None
    rope: RopeKind
    scores: Scores
    end: LayerEnd | None = None
    """Last step of the layer, in models whose layers differ in their sizes."""

    @classmethod
    def of(cls, config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> Layer:
        """Build layer `index` from its weights `parts`, by name within the layer. Removes the projections from `parts`,
        so that each is freed once it is packed."""
        names, dtype = NORMS[config.norms], next(iter(parts.values())).dtype
        norms: dict[str, Norm] = {
            field: norm_of(config, parts[f"{names[field]}.weight"]) if field in names else NoNorm(dtype)
            for field in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        }
        sinks = parts["self_attn.sinks"].float() if config.has_sinks else None
        gate = ["self_attn.gate"] if config.output_gate else []
        if gate:
            gate_apart(config, parts)
        own = [which for which in "qkv" if f"self_attn.{which}_proj.weight" in parts]
        return cls(
            config,
            qkv=fuse(parts, *(f"self_attn.{which}_proj" for which in own), *gate),
            qk_norm=_qk_norm(config, index, parts) if config.qk_norm else None,
            output=fuse(parts, "self_attn.o_proj"),
            mlp=make_mlp(config, index, parts),
            window=config.window(index),
            rope=config.rope(index),
            scores=Scores(config.attention_scale, config.attention_cap, sinks),
            end=None if config.layer_sizes is None else LayerEnd(config, parts),
            **norms,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices that a pass with one token reads."""
        end = 0 if self.end is None else self.end.num_bytes
        return self.qkv.num_bytes + self.output.num_bytes + self.mlp.num_bytes + end

    def run(self, residual: Residual, attention: LayerAttention) -> None:
        """Run the layer: adds the outputs of attention and MLP to the residual stream."""
        scale = self.config.residual_scale
        residual.add(self.attend(residual.normed(self.input_norm), attention), self.attention_out_norm, scale)
        residual.add(run_mlp(self.mlp, residual.normed(self.mlp_norm), attention.plan.live_T), self.mlp_out_norm, scale)
        if self.end is not None:
            self.end.run(residual, attention.input_TI)

    def attend(self, normed_TD: Tensor, attention: LayerAttention) -> Tensor:
        """Compute the attention's output [T, D], including the output projection, from normed hidden states [T, D]."""
        keys, values, plan, writer, rope, tables, _ = attention
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        fused_TX = self.qkv(normed_TD)
        norms_values = self.end is not None and self.qk_norm is not None
        heads = fused_TX, num_heads, keys, values, writer, self.qk_norm, rope, tables
        query_THD = split_heads(*heads, norms_values=norms_values)
        attended_TX = plan.attend(query_THD, keys, values, self.scores)
        if self.config.output_gate:
            gates_TX = fused_TX[:, (num_heads + 2 * num_kv_heads) * self.config.head_dim :]
            attended_TX = attended_TX * torch.sigmoid(gates_TX)
        return self.output(attended_TX)


def _qk_norm(config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> RMSNorm | WholeNorm:
    query, key = (parts.get(f"self_attn.{which}_norm.weight") for which in "qk")
    assert query is not None
    if config.layer_sizes is not None:  # values are normed too, without weights
        num_kv_heads = config.head_sizes(index)[0]
        rows = [] if key is None else [key.expand(num_kv_heads, -1), torch.ones_like(key).expand(num_kv_heads, -1)]
        return norm_of(config, torch.cat([query.expand(config.num_heads, -1), *rows]))
    assert key is not None
    if config.is_qk_norm_whole:
        return WholeNorm(norm_of(config, query), norm_of(config, key), config.num_heads)
    return norm_of(config, torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]))


class Decoder(Target):
    """A target computed with PyTorch operations. Its static KV cache has `num_rows` rows of `max_len` tokens."""

    kv: StaticKVCache | LayeredKVCache
    """The same object as `cache`, with its concrete type."""
    takes_trees = True
    slack = 0
    """Number of scratch positions after each row of the cache, which are written but never read."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        num_rows: int = 1,
        max_len: int = 2048,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        # Drafters record their own passes even if this target's passes are not recorded.
        self.recorder = Recorder(self.device) if self.device.type == "cuda" else None
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_position = config.num_layers, config.max_position
        self._residual_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.ends = end_scales(config, dtype)
        self._take(tensors)
        self.allocate_cache(num_rows, max_len)
        attending = [index for index in range(config.num_layers) if not config.is_linear(index)]
        self._groups = {config.window(index): config.num_heads // config.head_sizes(index)[0] for index in attending}
        """Query heads per key head of the layers with each sliding window."""
        self.windows = sorted(self._groups, key=lambda window: window or 0)

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        config = self.config
        # Copies, so that the checkpoint's file does not stay mapped.
        copies = ((name, tensor.to(self.device, self.dtype, copy=True)) for name, tensor in tensors)
        self.layers, rest = build_layers(config, copies, self._layer, make_other=lambda name, tensor: tensor)
        self.embedding = rest["model.embed_tokens.weight"]
        self.final_norm = norm_of(config, rest["model.norm.weight"])
        self._head = PackedLinear(self.embedding if config.tie_embeddings else rest["lm_head.weight"])
        has_inputs = config.layer_sizes is not None and config.layer_sizes.input_size > 0
        self._inputs = LayerInputs(config, rest) if has_inputs else None
        self.weight_bytes = sum(layer.num_bytes for layer in self.layers) + self._head.num_bytes
        self.weight_bytes += 0 if self._inputs is None else self._inputs.num_bytes

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._take(check_tensors(self.config, tensors, "the new weights"))
        self.allocate_cache(self.cache.num_rows, self.cache.max_len)

    def _layer(self, index: int, parts: dict[str, Tensor]) -> Layer | DeltaLayer:
        return (DeltaLayer if self.config.is_linear(index) else Layer).of(self.config, index, parts)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        config = self.config
        self.check_len(max_len)
        kinds: set[RopeKind] = {config.rope(layer) for layer in range(config.num_layers)}
        shape = config, max_len, self.dtype, self.device
        self.ropes: dict[RopeKind, Rope] = {kind: Rope.of(*shape, kind, self.slack) for kind in kinds if kind != "none"}
        if config.delta is not None:
            self.kv = self.cache = DeltaCache(config, num_rows, max_len, self.dtype, self.device, slack=self.slack)
            return
        if config.layer_sizes is not None:
            heads = [config.head_sizes(layer) for layer in range(config.num_layers)]
            own = heads, list(config.layer_sizes.sources), num_rows, max_len
            self.kv = self.cache = LayeredKVCache(*own, self.dtype, self.device, slack=self.slack)
            return
        sizes = config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim
        self.kv = self.cache = StaticKVCache(*sizes, self.dtype, self.device, slack=self.slack)

    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embedding)

    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return self._head(hidden_TD)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self._read_again(batch)
        stages = self.kv.stages(batch) if isinstance(self.kv, DeltaCache) else []
        rows = (batch.rows, batch.starts, batch.counts)
        kind: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "parents": batch.parents}
        plans = {
            window: AttentionPlan(*rows, window=window, group=self._groups[window], **kind) for window in self.windows
        }
        writer = CacheWriter(*rows, self.device)
        positions = batch.positions
        tables: dict[RopeKind, Tables] = {kind: rope.tables(positions) for kind, rope in self.ropes.items()}
        tokens_T = torch.tensor(batch.tokens, device=self.device)
        hidden_TD, taps_TF = self.run_layers(tokens_T, plans, writer, tables, stages)
        self.cache.append(batch.rows, batch.counts)
        self.experts_read = self.chosen_experts()
        if batch.logits == "none":
            return ForwardOutput(None, taps_TF)
        if batch.logits == "last" and batch.num_tokens > len(batch.rows):
            hidden_TD = hidden_TD[torch.tensor(batch.logit_rows, device=self.device)]
        return ForwardOutput(self.head(self.final_norm(hidden_TD)), taps_TF)

    def _read_again(self, batch: ForwardBatch) -> None:
        """Recompute lost recurrent states of a pass's rows."""
        for again in self.kv.lost(batch.rows) if isinstance(self.kv, DeltaCache) else ():
            self.forward(again)

    @property
    def num_mixtures(self) -> int:
        """Number of layers with experts."""
        return sum(isinstance(layer.mlp, Experts) for layer in self.layers)

    def chosen_experts(self) -> Tensor | None:
        """Indices of each token's K experts in the last pass, [L, T, K], for the L layers with experts; None if L is
        0."""
        chosen = [layer.mlp.chosen_TK for layer in self.layers if isinstance(layer.mlp, Experts)]
        return torch.stack([each for each in chosen if each is not None]) if chosen else None

    def run_layers(
        self,
        tokens_T: Tensor,
        plans: Mapping[int | None, AttentionPlan],
        writer: CacheWriter,
        tables: Mapping[RopeKind, Tables],
        stages: Sequence[Stage] | FixedStage = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run the embedding and all layers. Returns (hidden states [T, D] before the final norm, concatenated outputs
        [T, F] of the tapped layers; None if no layer is tapped).

        - plans: sliding window (None: unlimited) -> attention plan of the layers with this window.
        - writer: writes new keys and values to the cache.
        - tables: type of RoPE -> cosines and signed sines of the tokens' positions.
        - stages: for gated delta nets, the steps in which they compute the pass (`DeltaCache.stages`).
        """
        taps_TLD = torch.empty(
            len(tokens_T), len(self.tap_layers), self.hidden_size, dtype=self.dtype, device=self.device
        )
        embedded_TD = self.embed(tokens_T)
        inputs = None if self._inputs is None else self._inputs(tokens_T, embedded_TD)
        residual = Residual(embedded_TD.to(self._residual_dtype))
        memories = iter(self.kv.memories if isinstance(self.kv, DeltaCache) else ())
        caches = zip(self.kv.keys, self.kv.values, strict=True)
        with chosen_kernels(self.device):
            for index, layer in enumerate(self.layers):
                if isinstance(layer, DeltaLayer):
                    layer.run(residual, next(memories), stages)
                else:
                    rope = self.ropes.get(layer.rope)
                    plan, own_tables = plans[layer.window], tables.get(layer.rope)
                    own = None if inputs is None else inputs[index]
                    layer.run(residual, LayerAttention(*next(caches), plan, writer, rope, own_tables, own))
                if index in self.tap_layers:
                    # The last layer is tapped after the final norm, as Transformers' hidden_states[-1].
                    tapped_TD = residual.normed(self.final_norm) if index == self.num_layers - 1 else residual.hidden_TD
                    taps_TLD[:, self.tap_layers.index(index)] = tapped_TD
        return residual.hidden_TD, taps_TLD.flatten(1) if self.tap_layers else None


def end_scales(config: DecoderConfig, dtype: torch.dtype) -> EndScales:
    """Return the config's scale factors of embedding and head. The embedding's is rounded to `dtype`, as Gemma models
    require."""
    return EndScales(float(torch.tensor(config.embedding_scale, dtype=dtype)), config.logit_scale, config.logit_cap)


AnyLayer = TypeVar("AnyLayer")


def build_layers(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, AnyWeight]],
    make_layer: Callable[[int, dict[str, AnyWeight]], AnyLayer],
    make_other: Callable[[str, AnyWeight], Any],
) -> tuple[list[AnyLayer], dict[str, Any]]:
    """Build each layer as soon as all of its tensors have arrived, so that nothing is in memory twice.

    make_layer receives (layer index, tensors by name within the layer), make_other each tensor outside layers: (name,
    tensor). Returns (layers, results of make_other by tensor name).
    """
    sizes = [len(layer_shapes(config, index)) for index in range(config.num_layers)]
    waiting: dict[int, dict[str, AnyWeight]] = {}
    layers: dict[int, AnyLayer] = {}
    others: dict[str, Any] = {}
    for name, tensor in tensors:
        number, _, own_name = name.removeprefix("model.").removeprefix("layers.").partition(".")
        if not number.isdecimal():
            others[name] = make_other(name, tensor)
            continue
        parts = waiting.setdefault(int(number), {})
        parts[own_name] = tensor
        if len(parts) == sizes[int(number)]:
            layers[int(number)] = make_layer(int(number), waiting.pop(int(number)))
    return [layers[index] for index in range(config.num_layers)], others
