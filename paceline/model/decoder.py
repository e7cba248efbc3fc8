"""Our own decoder for the families of families.json, written for the decode step.

Weights are fused (q, k, v in one matrix; gate and up in one) and packed for the device; keys and values go into a static
cache; one call runs a ragged batch and hands out taps on the way. Plain functions on tensors rather than modules: at one
row the time is in the calls, not in the arithmetic. `model/checkpoint.py` brings the tensors; what families do differently are
fields of DecoderConfig. `tests/families/` compares every family with Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import AttentionPlan, CacheWriter, Rope, Scores, rope_tables
from paceline.model.blocks import Weight
from paceline.model.checkpoint import check_tensors
from paceline.model.config import DecoderConfig, RopeKind
from paceline.model.experts import Experts, gating
from paceline.model.kv_cache import StaticKVCache
from paceline.model.layout import NORMS, layer_shapes
from paceline.model.target import EndScales, ForwardBatch, ForwardOutput, Target

Tables = tuple[Tensor, Tensor]
"""Cosines and signed sines of a pass's positions, as `Rope.tables` gives them."""
_DECODE_ROWS = 8
"""Row count oneDNN is told to expect when it chooses the blocked layout; measured to suit 1 to 32."""


class PackedLinear:
    """y = x W^T + b for x [T, in] -> [T, out], the weight packed once for its device; the original is not kept.

    On CPU the weight is reordered into oneDNN's blocked layout, which at 1 to 16 rows is 1.4 times as fast as `F.linear` in
    bfloat16 and two to three times in float32 (docs/LOG.md). Elsewhere, and where oneDNN lacks the dtype, it is `F.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_bytes = weight.numel() * weight.element_size()
        self._bias = bias
        self._is_packed = can_pack(weight)
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _DECODE_ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default
        else:
            self._weight = weight.contiguous()

    def __call__(self, inputs_TD: Tensor) -> Tensor:
        if self._is_packed:
            return self._multiply(inputs_TD, self._weight, self._bias, "none", [], "")
        return F.linear(inputs_TD, self._weight, self._bias)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can take this weight: on CPU, float32, or bfloat16 on a processor that multiplies it."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (w + offset) over the last dimension, result in the weight's dtype.

    On CPU it is computed by vector_norm and hypot, exactly and in half the time of `F.rms_norm` at one row.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float = 0.0) -> None:
        self._dtype = weight.dtype
        self._eps = eps
        self._is_cpu = weight.device.type == "cpu"
        self._is_wide = self._is_cpu or bool(offset)
        """Whether it multiplies by the weight in float32, as Transformers does where there is an offset."""
        size = weight.shape[-1]
        self._weight = weight.float() + offset if self._is_wide else weight
        if self._is_cpu:
            self._weight = self._weight * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self._is_cpu:
            normed = F.rms_norm(inputs.float() if self._is_wide else inputs, inputs.shape[-1:], eps=self._eps)
            return (normed * self._weight).to(self._dtype) if self._is_wide else normed.to(self._dtype) * self._weight
        scale = torch.hypot(torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32), self._floor)
        return inputs.div(scale).mul_(self._weight).to(self._dtype)


class NoNorm:
    """In the place of a norm that a layer does not have: only the dtype changes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs.to(self._dtype)


class WholeNorm:
    """Norms of all queries of a token together, and of all its keys: heads [T, num_heads + num_kv_heads, head_dim]."""

    def __init__(self, query_norm: RMSNorm, key_norm: RMSNorm, num_heads: int) -> None:
        self._query_norm, self._key_norm, self._num_heads = query_norm, key_norm, num_heads

    def __call__(self, heads_THD: Tensor) -> Tensor:
        query_THD, key_THD = heads_THD.tensor_split([self._num_heads], dim=1)
        queries, keys = self._query_norm(query_THD.flatten(1)), self._key_norm(key_THD.flatten(1))
        return torch.cat([queries, keys], dim=1).view(heads_THD.shape)


Norm = RMSNorm | NoNorm


class GatedMLP:
    """down(activation(gate(x)) * up(x)), or what the config has in the place of that product."""

    def __init__(self, config: DecoderConfig, parts: dict[str, Tensor], name: str) -> None:
        """Takes the weights called `name` out of `parts`."""
        self._gate_up = fuse(parts, f"{name}.gate_proj", f"{name}.up_proj")
        self._down = fuse(parts, f"{name}.down_proj")
        self._multiply = gating(config)
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes

    def __call__(self, normed_TD: Tensor) -> Tensor:
        gate, up = self._gate_up(normed_TD).chunk(2, dim=-1)
        return self._down(self._multiply(gate, up))


@dataclass(slots=True)
class Layer:
    config: DecoderConfig
    input_norm: Norm
    qkv: PackedLinear
    qk_norm: RMSNorm | WholeNorm | None
    """Of heads by themselves with one weight row per query and key head, so that both are normed at once."""
    output: PackedLinear
    attention_out_norm: Norm
    mlp_norm: Norm
    mlp: GatedMLP | Experts
    mlp_out_norm: Norm
    window: int | None
    rope: RopeKind
    scores: Scores

    @classmethod
    def of(cls, config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> Layer:
        """Norms, and the projections that have the same input as one matrix. Takes the weights out of `parts`."""
        names, dtype = NORMS[config.norms], next(iter(parts.values())).dtype
        norms: dict[str, Norm] = {
            field: RMSNorm(parts[f"{names[field]}.weight"], config.rms_norm_eps, config.norm_offset)
            if field in names
            else NoNorm(dtype)
            for field in ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        }
        sinks = parts["self_attn.sinks"].float() if config.has_sinks else None
        return cls(
            config,
            qkv=fuse(parts, *(f"self_attn.{which}_proj" for which in "qkv")),
            qk_norm=_qk_norm(config, parts) if config.qk_norm else None,
            output=fuse(parts, "self_attn.o_proj"),
            mlp=_experts(config, parts) if config.has_experts(index) else GatedMLP(config, parts, "mlp"),
            window=config.window(index),
            rope=config.rope(index),
            scores=Scores(config.attention_scale, config.attention_cap, sinks),
            **norms,
        )

    @property
    def num_bytes(self) -> int:
        """Of matrices that a pass of one position reads."""
        return self.qkv.num_bytes + self.output.num_bytes + self.mlp.num_bytes

    def run(
        self,
        hidden_TD: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        writer: CacheWriter,
        rope: Rope | None,
        tables: Tables | None,
    ) -> None:
        """Add to the hidden states what attention and MLP make of them; keys and values are the layer's part of the cache."""
        scale = self.config.residual_scale
        attended_TD = self.attend(self.input_norm(hidden_TD), keys, values, plan, writer, rope, tables)
        hidden_TD.add_(self.attention_out_norm(attended_TD), alpha=scale)
        hidden_TD.add_(self.mlp_out_norm(self.mlp(self.mlp_norm(hidden_TD))), alpha=scale)

    def attend(
        self,
        normed_TD: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        writer: CacheWriter,
        rope: Rope | None,
        tables: Tables | None,
    ) -> Tensor:
        """What attention makes of normed hidden states. Without `rope` nothing is rotated."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        num_qk_heads = num_heads + num_kv_heads
        heads = self.qkv(normed_TD).view(-1, num_qk_heads + num_kv_heads, self.config.head_dim)
        qk_heads = heads[:, :num_qk_heads]
        if self.qk_norm is not None:
            qk_heads = self.qk_norm(qk_heads)
        if rope is not None and tables is not None:
            qk_heads = rope.rotate(qk_heads, tables)
        writer.write(keys, qk_heads[:, num_heads:])
        writer.write(values, heads[:, num_qk_heads:])
        return self.output(plan.attend(qk_heads[:, :num_heads], keys, values, self.scores))


def _experts(config: DecoderConfig, parts: dict[str, Tensor]) -> Experts:
    experts = [GatedMLP(config, parts, f"mlp.experts.{expert}") for expert in range(config.num_experts)]
    return Experts(fuse(parts, "mlp.gate"), experts, config.experts_per_token, config.normed_experts)


def _qk_norm(config: DecoderConfig, parts: dict[str, Tensor]) -> RMSNorm | WholeNorm:
    query, key = (parts[f"self_attn.{which}_norm.weight"] for which in "qk")
    eps, offset = config.rms_norm_eps, config.norm_offset
    if config.is_qk_norm_whole:
        return WholeNorm(RMSNorm(query, eps, offset), RMSNorm(key, eps, offset), config.num_heads)
    heads = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
    return RMSNorm(heads, eps, offset)


def fuse(weights: dict[str, Tensor], *names: str) -> PackedLinear:
    """One matrix product for several projections of the same input, stacked in this order. Takes them out of `weights`."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
    return PackedLinear(weight, torch.cat(biases) if biases else None)


class Decoder(Target):
    """Target of a known family with a static KV cache of `num_rows` rows of `max_len` tokens."""

    kv: StaticKVCache
    """`cache`, by its own type."""
    takes_trees = True
    slack = 0
    """Spare positions behind each row of the cache."""

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
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_layers, self.max_position = config.num_layers, config.max_position
        self.group = config.num_heads // config.num_kv_heads
        self._residual_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.ends = end_scales(config, dtype)
        self._take(tensors)
        self.allocate_cache(num_rows, max_len)
        self.windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def _take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        config = self.config
        # Copies, so that the checkpoint's file does not stay mapped for the sake of one tensor.
        copies = ((name, tensor.to(self.device, self.dtype, copy=True)) for name, tensor in tensors)
        make_layer = partial(Layer.of, self.config)
        layers, rest = build_layers(self.config, copies, make_layer, make_other=lambda name, tensor: tensor)
        self.layers = layers
        self.embedding = rest["model.embed_tokens.weight"]
        self.final_norm = RMSNorm(rest["model.norm.weight"], config.rms_norm_eps, config.norm_offset)
        self._head = PackedLinear(self.embedding if config.tie_embeddings else rest["lm_head.weight"])
        self.weight_bytes = sum(layer.num_bytes for layer in self.layers) + self._head.num_bytes

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As Target.load_weights."""
        self._take(check_tensors(self.config, tensors, "the new weights"))
        self.allocate_cache(self.cache.num_rows, self.cache.max_len)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        config = self.config
        self.check_len(max_len)
        kinds: set[RopeKind] = {config.rope(layer) for layer in range(config.num_layers)}
        self.ropes: dict[RopeKind, Rope] = {kind: self._rope(kind, max_len) for kind in kinds if kind != "none"}
        shape = (config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim)
        self.kv = self.cache = StaticKVCache(*shape, self.dtype, self.device, slack=self.slack)

    def _rope(self, kind: RopeKind, max_len: int) -> Rope:
        tables = rope_tables(self.config, max_len + self.slack, kind, longest=max_len)
        return Rope(*(table.to(self.device, self.dtype) for table in tables))

    def matrix_embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embedding)

    def matrix_head(self, hidden_TD: Tensor) -> Tensor:
        return self._head(hidden_TD)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        rows = (batch.rows, batch.starts, batch.counts)
        kind: dict[str, Any] = {"group": self.group, "dtype": self.dtype, "device": self.device, "parents": batch.parents}
        plans = {window: AttentionPlan(*rows, window=window, **kind) for window in self.windows}
        writer = CacheWriter(*rows, self.device)
        positions = batch.positions
        tables: dict[RopeKind, Tables] = {kind: rope.tables(positions) for kind, rope in self.ropes.items()}
        hidden_TD, taps_TF = self.run_layers(torch.tensor(batch.tokens, device=self.device), plans, writer, tables)
        self.cache.append(batch.rows, batch.counts)
        if batch.logits == "none":
            return ForwardOutput(None, taps_TF)
        if batch.logits == "last" and batch.num_tokens > len(batch.rows):
            hidden_TD = hidden_TD[torch.tensor(batch.logit_rows, device=self.device)]
        return ForwardOutput(self.head(self.final_norm(hidden_TD)), taps_TF)

    def run_layers(
        self,
        tokens_T: Tensor,
        plans: Mapping[int | None, AttentionPlan],
        writer: CacheWriter,
        tables: Mapping[RopeKind, Tables],
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and all layers: hidden states [T, D] before the final norm, and taps [T, F].

        plans by the windows of layers, tables by their kinds of rotary positions.
        """
        taps_TLD = torch.empty(len(tokens_T), len(self.tap_layers), self.hidden_size, dtype=self.dtype, device=self.device)
        hidden_TD = self.embed(tokens_T).to(self._residual_dtype)
        for index, layer in enumerate(self.layers):
            keys, values = self.kv.keys[index], self.kv.values[index]
            rope = self.ropes.get(layer.rope)
            layer.run(hidden_TD, keys, values, plans[layer.window], writer, rope, tables.get(layer.rope))
            if index in self.tap_layers:
                is_last = index == self.num_layers - 1  # tapped after the final norm, as Transformers' hidden_states[-1]
                taps_TLD[:, self.tap_layers.index(index)] = self.final_norm(hidden_TD) if is_last else hidden_TD
        return hidden_TD, taps_TLD.flatten(1) if self.tap_layers else None


def end_scales(config: DecoderConfig, dtype: torch.dtype) -> EndScales:
    """The factor of embeddings is rounded to the model's dtype, as Gemma does."""
    return EndScales(float(torch.tensor(config.embedding_scale, dtype=dtype)), config.logit_scale, config.logit_cap)


AnyWeight = TypeVar("AnyWeight", Tensor, Weight)
AnyLayer = TypeVar("AnyLayer")


def build_layers(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, AnyWeight]],
    make_layer: Callable[[int, dict[str, AnyWeight]], AnyLayer],
    make_other: Callable[[str, AnyWeight], Any],
) -> tuple[list[AnyLayer], dict[str, Any]]:
    """Layers, each made of its tensors by their names within it as soon as they are all there, so that nothing is held twice;
    and what is made of every other tensor, by its name."""
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
