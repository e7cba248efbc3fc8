"""Our own decoder for Llama 2/3, Mistral, Qwen2 and Qwen3, written for the decode step.

Weights are fused (q, k, v in one matrix; gate and up in one) and packed for the device; keys and values go into a static
cache; one call runs a ragged batch and hands out taps on the way. Plain functions on tensors rather than modules: at one
row the time is in the calls, not in the arithmetic. `model/checkpoint.py` brings the tensors; `tests/model/test_decoder.py`
compares every family with Transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import ContextLengthError
from paceline.model.attention import AttentionPlan, CacheWriter, Rope
from paceline.model.blocks import Weight
from paceline.model.config import DecoderConfig
from paceline.model.kv_cache import StaticKVCache
from paceline.model.linear import PackedLinear, RMSNorm
from paceline.model.rope import rope_tables
from paceline.model.target import ForwardBatch, ForwardOutput, Target


@dataclass(slots=True)
class Layer:
    """One decoder layer, fused and packed."""

    input_norm: RMSNorm
    qkv: PackedLinear
    qk_norm: RMSNorm | None
    """One weight row per query and key head, so that both are normed at once."""
    output: PackedLinear
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None


class Decoder(Target):
    """Llama-family target with a static KV cache of `num_rows` rows of `max_len` tokens."""

    kv: StaticKVCache
    """`cache`, by its own type."""
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
        self._num_qk_heads = config.num_heads + config.num_kv_heads
        self._residual_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self._build(tensors)
        self.allocate_cache(num_rows, max_len)
        self.windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def _build(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fuse and pack each layer as soon as it is complete, so that nothing is held twice."""
        layers: dict[int, Layer] = {}
        rest: dict[str, Tensor] = {}
        # Copies, so that the checkpoint's file does not stay mapped for the sake of one tensor.
        copies = ((name, tensor.to(self.device, self.dtype, copy=True)) for name, tensor in tensors)
        for index, parts in by_layer(self.config, copies):
            if index is None:
                rest |= parts
            else:
                layers[index] = _layer(self.config, index, parts)
        self.layers = [layers[index] for index in range(self.num_layers)]
        self.embedding = rest["model.embed_tokens.weight"]
        self.final_norm = RMSNorm(rest["model.norm.weight"], self.config.rms_norm_eps)
        self._head = PackedLinear(self.embedding if self.config.tie_embeddings else rest["lm_head.weight"])
        matrices = [matrix for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.weight_bytes = sum(matrix.num_bytes for matrix in (*matrices, self._head))

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        config = self.config
        if max_len > config.max_position:
            raise ContextLengthError(f"max_len {max_len} is beyond the model's {config.max_position} tokens: lower max_len")
        self.rope = Rope(*(table.to(self.device, self.dtype) for table in rope_tables(config, max_len + self.slack)))
        shape = (config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim)
        self.kv = self.cache = StaticKVCache(*shape, self.dtype, self.device, slack=self.slack)

    def embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embedding)

    def head(self, hidden_TD: Tensor) -> Tensor:
        return self._head(hidden_TD)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        batch.require_chains()
        rows = (batch.rows, batch.starts, batch.counts)
        kind: dict[str, Any] = {"group": self.group, "dtype": self.dtype, "device": self.device}
        plans = {window: AttentionPlan(*rows, window=window, **kind) for window in self.windows}
        writer = CacheWriter(*rows, self.device)
        tables = self.rope.tables(batch.positions)
        hidden_TD, taps_TF = self.run_layers(torch.tensor(batch.tokens, device=self.device), plans, writer, tables)
        self.cache.append(batch.rows, batch.counts)
        return self._finish(batch, hidden_TD, taps_TF)

    def run_layers(
        self, tokens_T: Tensor, plans: Mapping[int | None, Plan], writer: Writer, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and all layers: hidden states [T, D] before the final norm, and taps [T, F]."""
        taps_TLD = torch.empty(len(tokens_T), len(self.tap_layers), self.hidden_size, dtype=self.dtype, device=self.device)
        hidden_TD = self.embed(tokens_T).to(self._residual_dtype)
        for index, layer in enumerate(self.layers):
            self._attend(index, layer, hidden_TD, plans[layer.window], writer, tables)
            gate, up = layer.gate_up(layer.mlp_norm(hidden_TD)).chunk(2, dim=-1)
            hidden_TD.add_(layer.down(F.silu(gate).mul_(up)))
            if index in self.tap_layers:
                is_last = index == self.num_layers - 1  # tapped after the final norm, as Transformers' hidden_states[-1]
                taps_TLD[:, self.tap_layers.index(index)] = self.final_norm(hidden_TD) if is_last else hidden_TD
        return hidden_TD, taps_TLD.flatten(1) if self.tap_layers else None

    def _attend(
        self, index: int, layer: Layer, hidden_TD: Tensor, plan: Plan, writer: Writer, tables: tuple[Tensor, Tensor]
    ) -> None:
        config = self.config
        heads = layer.qkv(layer.input_norm(hidden_TD)).view(-1, self._num_qk_heads + config.num_kv_heads, config.head_dim)
        qk_heads = heads[:, : self._num_qk_heads]
        if layer.qk_norm is not None:
            qk_heads = layer.qk_norm(qk_heads)
        qk_heads = self.rope.rotate(qk_heads, tables)
        keys, values = self.kv.keys[index], self.kv.values[index]
        writer.write(keys, qk_heads[:, config.num_heads :])
        writer.write(values, heads[:, self._num_qk_heads :])
        hidden_TD.add_(layer.output(plan.attend(qk_heads[:, : config.num_heads], keys, values)))

    def _finish(self, batch: ForwardBatch, hidden_TD: Tensor, taps_TF: Tensor | None) -> ForwardOutput:
        if batch.logits == "none":
            return ForwardOutput(None, taps_TF)
        if batch.logits == "last" and batch.num_tokens > len(batch.rows):
            ends = torch.tensor(batch.counts).cumsum(0).sub_(1)
            hidden_TD = hidden_TD[ends.to(self.device)]
        return ForwardOutput(self._head(self.final_norm(hidden_TD)), taps_TF)


class Plan(Protocol):
    """What attention of a pass needs to be: AttentionPlan, or a static pass of model/graphs.py."""

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...


class Writer(Protocol):
    """How a pass writes its keys and values: CacheWriter, or a static pass."""

    def write(self, cache: Tensor, new_THD: Tensor) -> None: ...


AnyWeight = TypeVar("AnyWeight", Tensor, Weight)


def by_layer(
    config: DecoderConfig, tensors: Iterable[tuple[str, AnyWeight]]
) -> Iterator[tuple[int | None, dict[str, AnyWeight]]]:
    """A layer's tensors as soon as they are all there, under their names within the layer; every other one alone, with None."""
    size = 9 + 3 * config.qkv_bias + config.output_bias + 3 * config.mlp_bias + 2 * config.qk_norm
    layers: dict[int, dict[str, AnyWeight]] = {}
    for name, tensor in tensors:
        if not name.startswith("model.layers."):
            yield None, {name: tensor}
            continue
        _, _, number, own_name = name.split(".", 3)
        layer = layers.setdefault(int(number), {})
        layer[own_name] = tensor
        if len(layer) == size:
            yield int(number), layers.pop(int(number))


def _layer(config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> Layer:
    """Norms, and the projections that have the same input as one matrix. Takes the weights out of `parts`."""

    def norm(weight: Tensor) -> RMSNorm:
        return RMSNorm(weight, config.rms_norm_eps)

    def linear(*names: str) -> PackedLinear:
        biases = [parts[f"{name}.bias"] for name in names if f"{name}.bias" in parts]
        weight = torch.cat([parts.pop(f"{name}.weight") for name in names])
        return PackedLinear(weight, torch.cat(biases) if biases else None)

    qk_norm = None
    if config.qk_norm:
        query, key = (parts[f"self_attn.{which}_norm.weight"] for which in "qk")
        qk_norm = norm(torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)]))
    return Layer(
        input_norm=norm(parts["input_layernorm.weight"]),
        qkv=linear(*(f"self_attn.{which}_proj" for which in "qkv")),
        qk_norm=qk_norm,
        output=linear("self_attn.o_proj"),
        mlp_norm=norm(parts["post_attention_layernorm.weight"]),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        window=config.window(index),
    )
