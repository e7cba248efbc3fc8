"""Any Hugging Face config.json as a `ModelShape`: parameters counted from matrix sizes, the attention of each layer.

Dense, GQA, MLA, sliding windows, sparse and compressed MLA (DeepSeek V3.2, V4), mixtures of experts, gated delta-net hybrids
(Qwen3-Next, Qwen3.5). Norms, biases, vision towers and extra prediction layers are left out: they are thousandths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModelError
from paceline.simulate.hf_values import ConfigReader
from paceline.simulate.shapes import Attention, Experts, ModelShape, Precisions

GATED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose attention has an output gate as wide as the queries."""


def shape_of(config: dict[str, Any], name: str = "", source: str = "") -> ModelShape:
    """Read a config. Raises UnsupportedModelError naming what is missing or not known."""
    read = ConfigReader(config)
    groups = Counter(layer_attention(read, layer) for layer in range(read.whole("num_hidden_layers")))
    attention = tuple(_times(group, count) for group, count in groups.items())
    hidden, vocab = read.whole("hidden_size"), read.whole("vocab_size")
    experts = expert_parameters(read)
    dense = hidden * vocab + sum(layer_parameters(read, layer) for layer in range(read.whole("num_hidden_layers")))
    return ModelShape(
        name=name or read.family,
        num_layers=read.whole("num_hidden_layers"),
        hidden_size=hidden,
        dense=float(dense),
        attention=attention,
        precisions=precisions_of(read),
        experts=experts,
        embedding=0.0 if read.is_tied else float(hidden * vocab),
        vocab_size=vocab,
        max_context=read.whole("max_position_embeddings", 0),
        source=source or "its config.json",
    )


def _times(group: Attention, count: int) -> Attention:
    return replace(group, layers=count)


def layer_attention(read: ConfigReader, layer: int) -> Attention:
    """The attention of one layer, as a group of one."""
    kind = read.layer_kind(layer)
    if kind == "linear_attention":
        return Attention("linear", 1, state_bytes=float(linear_state_bytes(read)))
    heads = read.whole("num_attention_heads")
    if read.has("compress_ratios"):
        return _compressed(read, layer, heads)
    if read.has("kv_lora_rank"):
        return _latent(read, heads)
    window = read.window(layer) if kind == "sliding_attention" else None
    return Attention("gqa", 1, heads, read.whole("num_key_value_heads", heads), read.head_dim, window=window)


def _latent(read: ConfigReader, heads: int) -> Attention:
    """MLA; with an indexer (DeepSeek V3.2) it reads the positions that this chooses."""
    latent, rope = read.whole("kv_lora_rank"), read.whole("qk_rope_head_dim")
    if not read.has("index_topk"):
        return Attention("mla", 1, heads, latent=latent, rope=rope)
    index = {"indexer_heads": read.whole("index_n_heads"), "indexer_dim": read.whole("index_head_dim")}
    return Attention("mla", 1, heads, latent=latent, rope=rope, window=0, ratio=1, topk=read.whole("index_topk"), **index)


def _compressed(read: ConfigReader, layer: int, heads: int) -> Attention:
    """DeepSeek V4: a window, and behind it one entry for `ratio` positions; ratio 4 chooses among them, 128 reads all."""
    latent, rope = read.head_dim, read.whole("qk_rope_head_dim")
    ratio, window = read.numbers("compress_ratios")[layer], read.whole("sliding_window")
    if ratio == 0:
        return Attention("mla", 1, heads, latent=latent, rope=rope, window=window)
    if ratio > 4:
        return Attention("mla", 1, heads, latent=latent, rope=rope, window=window, ratio=ratio)
    index = {"indexer_heads": read.whole("index_n_heads"), "indexer_dim": read.whole("index_head_dim")}
    return Attention("mla", 1, heads, 0, 0, latent, rope, window, ratio, read.whole("index_topk"), **index)


def linear_state_bytes(read: ConfigReader) -> int:
    """Gated delta net: a key x value matrix for each value head and the last inputs of the convolution, in 16 bits."""
    key_dim, value_dim = read.whole("linear_key_head_dim"), read.whole("linear_value_head_dim")
    keys, values = read.whole("linear_num_key_heads"), read.whole("linear_num_value_heads")
    convolved = 2 * keys * key_dim + values * value_dim
    return 2 * (values * key_dim * value_dim + convolved * read.whole("linear_conv_kernel_dim"))


def layer_parameters(read: ConfigReader, layer: int) -> int:
    """One layer's matrices outside the experts: attention, and the router or the dense feed-forward part."""
    hidden = read.whole("hidden_size")
    if read.is_sparse(layer):
        gate = hidden if read.has("shared_expert_intermediate_size") else 0
        return attention_parameters(read, layer) + hidden * read.num_experts + gate
    return attention_parameters(read, layer) + 3 * hidden * read.whole("intermediate_size")


def attention_parameters(read: ConfigReader, layer: int) -> int:
    hidden = read.whole("hidden_size")
    if read.layer_kind(layer) == "linear_attention":
        return _linear_parameters(read)
    heads = read.whole("num_attention_heads")
    if read.has("compress_ratios"):
        return _compressed_parameters(read, layer)
    if read.has("kv_lora_rank"):
        return _latent_parameters(read)
    width = heads * read.head_dim
    queries = 2 * width if read.flag("attn_output_gate", read.family.removesuffix("_text") in GATED) else width
    return hidden * (queries + 2 * read.whole("num_key_value_heads", heads) * read.head_dim + width)


def _linear_parameters(read: ConfigReader) -> int:
    hidden = read.whole("hidden_size")
    keys = read.whole("linear_num_key_heads") * read.whole("linear_key_head_dim")
    heads = read.whole("linear_num_value_heads")
    values = heads * read.whole("linear_value_head_dim")
    convolution = (2 * keys + values) * read.whole("linear_conv_kernel_dim")
    return hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden + convolution


def _latent_parameters(read: ConfigReader) -> int:
    hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    latent, rope = read.whole("kv_lora_rank"), read.whole("qk_rope_head_dim")
    plain, value = read.whole("qk_nope_head_dim"), read.whole("v_head_dim")
    rank = read.whole("q_lora_rank", 0)
    queries = hidden * rank + rank * heads * (plain + rope) if rank else hidden * heads * (plain + rope)
    index = read.whole("index_n_heads", 0)
    width = read.whole("index_head_dim") if index else 0
    indexer = (rank or hidden) * index * width + hidden * (width + index) if index else 0
    return queries + hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden + indexer


def _compressed_parameters(read: ConfigReader, layer: int) -> int:
    """DeepSeek V4: low-rank queries and grouped low-rank output, one key that is the value too, the compressor, the indexer."""
    hidden, heads, width = read.whole("hidden_size"), read.whole("num_attention_heads"), read.head_dim
    rank, out_rank, groups = read.whole("q_lora_rank"), read.whole("o_lora_rank"), read.whole("o_groups")
    main = hidden * rank + rank * heads * width + hidden * width + heads * width * out_rank + groups * out_rank * hidden
    ratio = read.numbers("compress_ratios")[layer]
    if ratio == 0:
        return main
    if ratio > 4:
        return main + 2 * hidden * width
    index, index_width = read.whole("index_n_heads"), read.whole("index_head_dim")
    return main + 4 * hidden * width + rank * index * index_width + hidden * index + 4 * hidden * index_width


def expert_parameters(read: ConfigReader) -> Experts | None:
    """Over all sparse layers; None for a dense model."""
    if not read.num_experts:
        return None
    layers = sum(read.is_sparse(layer) for layer in range(read.whole("num_hidden_layers")))
    if not layers:
        return None
    width = read.whole("moe_intermediate_size", read.whole("intermediate_size", 0)) or read.whole("intermediate_size")
    each = 3 * read.whole("hidden_size") * width
    shared = read.whole("n_shared_experts", 0) * width + read.whole("shared_expert_intermediate_size", 0)
    always = 3 * read.whole("hidden_size") * shared
    per_token = read.experts_per_token
    if not 0 < per_token < read.num_experts:
        raise UnsupportedModelError(
            f"{read.family}: {per_token} of {read.num_experts} experts per token is not possible: check num_experts_per_tok"
        )
    return Experts(
        num_routed=read.num_experts,
        per_token=per_token,
        active=float(layers * (per_token * each + always)),
        resident=float(layers * (read.num_experts * each + always)),
    )


def precisions_of(read: ConfigReader) -> Precisions:
    """From the stored dtype and the quantisation; attention and cache stay at 16 bits unless a server is told otherwise."""
    stored = read.stored_format
    weights = read.dense_format or ("bfloat16" if stored == "float32" else stored)
    cache = "float8" if read.has("compress_ratios") else "bfloat16"
    return Precisions(weights=weights, experts=read.expert_format or weights, kv=cache)
