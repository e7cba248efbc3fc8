"""Our own decoder for Llama 2/3, Mistral, Qwen2 and Qwen3, written for the decode step.

Weights are fused (q, k, v in one matrix; gate and up in one) and packed for the device; keys and values go into a static
cache; one call runs a ragged batch and hands out taps on the way. Plain functions on tensors rather than modules: at one
row the time is in the calls, not in the arithmetic. `model/checkpoint.py` brings the tensors; `tests/model/test_decoder.py`
compares every family with Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import AttentionPlan, CacheWriter, Rope, rope_tables
from paceline.model.blocks import Weight
from paceline.model.config import DecoderConfig
from paceline.model.kv_cache import StaticKVCache
from paceline.model.target import ForwardBatch, ForwardOutput, Target

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
    """x / sqrt(mean(x^2) + eps) * w over the last dimension, result in the weight's dtype.

    On CPU it is computed by vector_norm and hypot, exactly and in half the time of `F.rms_norm` at one row.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._dtype = weight.dtype
        self._eps = eps
        self._is_cpu = weight.device.type == "cpu"
        size = weight.shape[-1]
        self._weight = weight.float() * size**0.5 if self._is_cpu else weight
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self._is_cpu:
            return F.rms_norm(inputs, inputs.shape[-1:], eps=self._eps).to(self._dtype) * self._weight
        scale = torch.hypot(torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32), self._floor)
        return inputs.div(scale).mul_(self._weight).to(self._dtype)


@dataclass(slots=True)
class Layer:
    config: DecoderConfig
    input_norm: RMSNorm
    qkv: PackedLinear
    qk_norm: RMSNorm | None
    """One weight row per query and key head, so that both are normed at once."""
    output: PackedLinear
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None

    @classmethod
    def of(cls, config: DecoderConfig, index: int, parts: dict[str, Tensor]) -> Layer:
        """Norms, and the projections that have the same input as one matrix. Takes the weights out of `parts`."""
        qk_norm = None
        if config.qk_norm:
            query, key = (parts[f"self_attn.{which}_norm.weight"] for which in "qk")
            heads = torch.cat([query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)])
            qk_norm = RMSNorm(heads, config.rms_norm_eps)
        return cls(
            config,
            input_norm=RMSNorm(parts["input_layernorm.weight"], config.rms_norm_eps),
            qkv=fuse(parts, *(f"self_attn.{which}_proj" for which in "qkv")),
            qk_norm=qk_norm,
            output=fuse(parts, "self_attn.o_proj"),
            mlp_norm=RMSNorm(parts["post_attention_layernorm.weight"], config.rms_norm_eps),
            gate_up=fuse(parts, "mlp.gate_proj", "mlp.up_proj"),
            down=fuse(parts, "mlp.down_proj"),
            window=config.window(index),
        )

    def run(
        self,
        hidden_TD: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        writer: CacheWriter,
        rope: Rope,
        tables: tuple[Tensor, Tensor],
    ) -> None:
        """Add to the hidden states what attention and MLP make of them; keys and values are the layer's part of the cache."""
        hidden_TD.add_(self.attend(self.input_norm(hidden_TD), keys, values, plan, writer, rope, tables))
        hidden_TD.add_(self.mlp(self.mlp_norm(hidden_TD)))

    def attend(
        self,
        normed_TD: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        writer: CacheWriter,
        rope: Rope,
        tables: tuple[Tensor, Tensor],
    ) -> Tensor:
        """What attention makes of normed hidden states."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        num_qk_heads = num_heads + num_kv_heads
        heads = self.qkv(normed_TD).view(-1, num_qk_heads + num_kv_heads, self.config.head_dim)
        qk_heads = heads[:, :num_qk_heads]
        if self.qk_norm is not None:
            qk_heads = self.qk_norm(qk_heads)
        qk_heads = rope.rotate(qk_heads, tables)
        writer.write(keys, qk_heads[:, num_heads:])
        writer.write(values, heads[:, num_qk_heads:])
        return self.output(plan.attend(qk_heads[:, :num_heads], keys, values))

    def mlp(self, normed_TD: Tensor) -> Tensor:
        gate, up = self.gate_up(normed_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


def fuse(weights: dict[str, Tensor], *names: str) -> PackedLinear:
    """One matrix product for several projections of the same input, stacked in this order. Takes them out of `weights`."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
    return PackedLinear(weight, torch.cat(biases) if biases else None)


class Decoder(Target):
    """Llama-family target with a static KV cache of `num_rows` rows of `max_len` tokens."""

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
        # Copies, so that the checkpoint's file does not stay mapped for the sake of one tensor.
        copies = ((name, tensor.to(self.device, self.dtype, copy=True)) for name, tensor in tensors)
        make_layer = partial(Layer.of, self.config)
        self.layers, rest = build_layers(self.config, copies, make_layer, make_other=lambda name, tensor: tensor)
        self.embedding = rest["model.embed_tokens.weight"]
        self.final_norm = RMSNorm(rest["model.norm.weight"], self.config.rms_norm_eps)
        self._head = PackedLinear(self.embedding if self.config.tie_embeddings else rest["lm_head.weight"])
        matrices = [matrix for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.weight_bytes = sum(matrix.num_bytes for matrix in (*matrices, self._head))
        self.allocate_cache(num_rows, max_len)
        self.windows = sorted({layer.window for layer in self.layers}, key=lambda window: window or 0)

    def allocate_cache(self, num_rows: int, max_len: int) -> None:
        config = self.config
        self.check_len(max_len)
        self.rope = Rope(*(table.to(self.device, self.dtype) for table in rope_tables(config, max_len + self.slack)))
        shape = (config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim)
        self.kv = self.cache = StaticKVCache(*shape, self.dtype, self.device, slack=self.slack)

    def embed(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.embedding)

    def head(self, hidden_TD: Tensor) -> Tensor:
        return self._head(hidden_TD)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        rows = (batch.rows, batch.starts, batch.counts)
        kind: dict[str, Any] = {"group": self.group, "dtype": self.dtype, "device": self.device, "parents": batch.parents}
        plans = {window: AttentionPlan(*rows, window=window, **kind) for window in self.windows}
        writer = CacheWriter(*rows, self.device)
        tables = self.rope.tables(batch.positions)
        hidden_TD, taps_TF = self.run_layers(torch.tensor(batch.tokens, device=self.device), plans, writer, tables)
        self.cache.append(batch.rows, batch.counts)
        if batch.logits == "none":
            return ForwardOutput(None, taps_TF)
        if batch.logits == "last" and batch.num_tokens > len(batch.rows):
            hidden_TD = hidden_TD[torch.tensor(batch.logit_rows, device=self.device)]
        return ForwardOutput(self._head(self.final_norm(hidden_TD)), taps_TF)

    def run_layers(
        self, tokens_T: Tensor, plans: Mapping[int | None, AttentionPlan], writer: CacheWriter, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Embedding and all layers: hidden states [T, D] before the final norm, and taps [T, F]."""
        taps_TLD = torch.empty(len(tokens_T), len(self.tap_layers), self.hidden_size, dtype=self.dtype, device=self.device)
        hidden_TD = self.embed(tokens_T).to(self._residual_dtype)
        for index, layer in enumerate(self.layers):
            keys, values = self.kv.keys[index], self.kv.values[index]
            layer.run(hidden_TD, keys, values, plans[layer.window], writer, self.rope, tables)
            if index in self.tap_layers:
                is_last = index == self.num_layers - 1  # tapped after the final norm, as Transformers' hidden_states[-1]
                taps_TLD[:, self.tap_layers.index(index)] = self.final_norm(hidden_TD) if is_last else hidden_TD
        return hidden_TD, taps_TLD.flatten(1) if self.tap_layers else None


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
    size = 9 + 3 * config.qkv_bias + config.output_bias + 3 * config.mlp_bias + 2 * config.qk_norm
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
        if len(parts) == size:
            layers[int(number)] = make_layer(int(number), waiting.pop(int(number)))
    return [layers[index] for index in range(config.num_layers)], others


# The decoder's small operations with their gradients written by hand: one pass where autograd would make five. For training on
# CPU, where they otherwise take as long as the matrix products. Each gives the result of the plain PyTorch operations
# (tests/model/test_fused.py) and computes in float32 whatever comes in.


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """What a matrix product of this tensor would run in: autocast's dtype when it is on, else the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def rms_norm(inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
    """inputs / sqrt(mean(inputs^2) + eps) * weight over the last dimension, in the dtype the next product wants."""
    return _RMSNorm.apply(inputs, weight, eps, autocast_dtype(inputs))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGLU.apply(gate, up)


def rotate(heads_THD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding, half-split: x * cos + swap_halves(x) * signed_sin; the tables broadcast over heads."""
    return _Rotate.apply(heads_THD, cos, signed_sin)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        size = inputs.shape[-1]
        norm = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True, dtype=torch.float32)
        scale = (norm.square_().div_(size)).add_(eps).rsqrt_()
        ctx.save_for_backward(inputs, weight, scale)
        return (inputs * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weight, scale = ctx.saved_tensors
        normed = inputs * scale
        grad = grad.float()
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        along = (grad * normed).mean(-1, keepdim=True)
        return grad.sub_(normed.mul_(along)).mul_(scale).to(inputs.dtype), grad_weight, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        grad_up = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), grad_up


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_THD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed_sin)
        return torch.addcmul(heads_THD * cos, heads_THD.roll(heads_THD.shape[-1] // 2, -1), signed_sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, signed_sin = ctx.saved_tensors
        return (grad * cos).add_((grad * signed_sin).roll(grad.shape[-1] // 2, -1)), None, None
