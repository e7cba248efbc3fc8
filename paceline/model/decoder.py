"""Our own decoder for Llama 2/3, Mistral, Qwen2 and Qwen3, written for the decode step.

Weights are fused (q, k, v in one matrix; gate and up in one) and packed for the device; keys and values go into a static
cache; one call runs a ragged batch and hands out taps on the way. Plain functions on tensors rather than modules: at one
row the time is in the calls, not in the arithmetic. `model/checkpoint.py` brings the tensors; `tests/model/test_decoder.py`
compares every family with Transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import ContextLengthError
from paceline.model.attention import AttentionPlan, CacheWriter, Rope
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
        self._build(_Loader(config, tensors, dtype, self.device))
        self.allocate_cache(num_rows, max_len)
        self.windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def _build(self, loader: _Loader) -> None:
        self.embedding, self.layers, self.final_norm, head = loader.build()
        self._head = head
        layers_bytes = sum(
            matrix.num_bytes for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        self.weight_bytes = layers_bytes + head.num_bytes

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
        plans = {window: self._plan(batch, window) for window in self.windows}
        writer = CacheWriter(batch.rows, batch.starts, batch.counts, self.device)
        tables = self.rope.tables(batch.positions)
        hidden_TD, taps_TF = self.run_layers(torch.tensor(batch.tokens, device=self.device), plans, writer, tables)
        self.cache.append(batch.rows, batch.counts)
        return self._finish(batch, hidden_TD, taps_TF)

    def run_layers(
        self, tokens_T: Tensor, plans: Mapping[int | None, Plan], writer: Writer, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and all layers: hidden states [T, D] before the final norm, and taps [T, F]."""
        taps = _Taps(self.tap_layers, len(tokens_T), self.hidden_size, self.dtype, self.device)
        hidden_TD = self.embed(tokens_T).to(self._residual_dtype)
        for index, layer in enumerate(self.layers):
            self._attend(index, layer, hidden_TD, plans[layer.window], writer, tables)
            self._mlp(layer, hidden_TD)
            if index in self.tap_layers:
                is_last = index == self.num_layers - 1  # tapped after the final norm, as Transformers' hidden_states[-1]
                taps.put(index, self.final_norm(hidden_TD) if is_last else hidden_TD)
        return hidden_TD, taps.values_TF

    def _plan(self, batch: ForwardBatch, window: int | None) -> AttentionPlan:
        return AttentionPlan(
            batch.rows,
            batch.starts,
            batch.counts,
            group=self.group,
            dtype=self.dtype,
            device=self.device,
            window=window,
        )

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden_TD: Tensor,
        plan: Plan,
        writer: Writer,
        tables: tuple[Tensor, Tensor],
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

    def _mlp(self, layer: Layer, hidden_TD: Tensor) -> None:
        gate_up = layer.gate_up(layer.mlp_norm(hidden_TD))
        gate, up = gate_up.chunk(2, dim=-1)
        hidden_TD.add_(layer.down(F.silu(gate).mul_(up)))

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


class _Taps:
    """Collects the outputs of tapped layers side by side."""

    def __init__(self, layers: tuple[int, ...], num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slot = {layer: slot for slot, layer in enumerate(layers)}
        self._size = size
        self.values_TF = torch.empty(num_tokens, len(layers) * size, dtype=dtype, device=device) if layers else None

    def put(self, layer: int, hidden_TD: Tensor) -> None:
        assert self.values_TF is not None
        begin = self._slot[layer] * self._size
        self.values_TF[:, begin : begin + self._size] = hidden_TD


class _Loader:
    """Fuses and packs a stream of named tensors, each layer as soon as it is complete, so that nothing is held twice."""

    def __init__(
        self, config: DecoderConfig, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._tensors = iter(tensors)
        self._dtype, self._device = dtype, device
        self._pending: dict[str, Tensor] = {}
        self._layers: dict[int, Layer] = {}
        self._sizes = Counter[int]()
        self._layer_size = 9 + 3 * config.qkv_bias + config.output_bias + 3 * config.mlp_bias + 2 * config.qk_norm

    def build(self) -> tuple[Tensor, list[Layer], RMSNorm, PackedLinear]:
        for name, tensor in self._tensors:
            # A copy, so that the checkpoint's file does not stay mapped for the sake of one tensor.
            self._pending[name] = tensor.to(self._device, self._dtype, copy=True)
            index = _layer_of(name)
            if index is not None:
                self._sizes[index] += 1
                if self._sizes[index] == self._layer_size:
                    self._layers[index] = self._layer(index)
        layers = [self._layers[index] for index in range(self._config.num_layers)]
        stored = self._pending.pop("model.embed_tokens.weight")
        head = PackedLinear(stored if self._config.tie_embeddings else self._pending.pop("lm_head.weight"))
        return stored, layers, self._norm("model.norm.weight"), head

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._pending.pop(name), self._config.rms_norm_eps)

    def _linear(self, *names: str) -> PackedLinear:
        weights = [self._pending.pop(f"{name}.weight") for name in names]
        biases = [self._pending.pop(f"{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return PackedLinear(torch.cat(weights), torch.cat(present) if present else None)

    def _qk_norm(self, prefix: str) -> RMSNorm | None:
        if not self._config.qk_norm:
            return None
        query, key = (self._pending.pop(f"{prefix}.{which}_norm.weight") for which in "qk")
        rows = [query.expand(self._config.num_heads, -1), key.expand(self._config.num_kv_heads, -1)]
        return RMSNorm(torch.cat(rows), self._config.rms_norm_eps)

    def _layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        return Layer(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(*(f"{attention}.{which}_proj" for which in "qkv")),
            qk_norm=self._qk_norm(attention),
            output=self._linear(f"{attention}.o_proj"),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            down=self._linear(f"{prefix}.mlp.down_proj"),
            window=self._config.window(index),
        )


def _layer_of(name: str) -> int | None:
    """`model.layers.7.mlp.up_proj.weight` -> 7."""
    pieces = name.split(".")
    return int(pieces[2]) if name.startswith("model.layers.") else None
