"""Reads the shape of a model from its config.json.

`shape_of` counts parameters from matrix sizes and finds the attention of each layer. Dense, GQA, MLA, sliding windows,
sparse and compressed MLA (DeepSeek V3.2, V4), mixtures of experts, gated delta-net hybrids (Qwen3-Next, Qwen3.5),
heads that differ by layer, shared keys and values and per-layer embeddings (Gemma 4).
Norms, biases, vision towers and extra prediction layers are ignored: they are about a thousandth of the parameters.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bounds import MAX_LAYERS
from paceline.errors import UnsupportedModelError
from paceline.simulate.costs.shapes import Attention, Experts, ModelShape, Precisions
from paceline.simulate.files import is_amount

KEYS: dict[str, Any] = json.loads((Path(__file__).parent / "config_keys.json").read_text(encoding="utf-8"))
KEYS["max_layers"] = MAX_LAYERS
"""Tables of key, family and layer-type names in config.json files, and the largest number of layers, which are read one
by one; the page reads them too."""

MOST = 10**9
"""Largest size in a config.json."""


def shape_of(config: dict[str, Any], name: str = "", source: str = "") -> ModelShape:
    """Computes the sizes of a model from the keys of its config.json. `name` and `source` are stored in the result.
    Raises UnsupportedModelError for a missing or invalid size, or an unsupported model family."""
    read = ConfigReader(config)
    layers, hidden, vocab = range(read.whole("num_hidden_layers")), read.whole("hidden_size"), read.whole("vocab_size")
    attention = [attention_of(read, layer) for layer in layers]
    groups = Counter(group for group, _ in attention)
    dense = hidden * (vocab + len(layers) * read.input_size) + sum(parameters for _, parameters in attention)
    return ModelShape(
        name=name or read.family,
        num_layers=len(layers),
        hidden_size=hidden,
        dense=float(dense + sum(feed_forward_parameters(read, layer) for layer in layers)),
        attention=tuple(replace(group, layers=count) for group, count in groups.items()),
        precisions=read.precisions,
        experts=experts_of(read),
        embedding=float((0 if read.is_tied else hidden * vocab) + read.layer_table),
        vocab_size=vocab,
        max_context=read.whole("max_position_embeddings", 0),
        source=source or "its config.json",
    )


class ConfigReader:
    """Reads values of a config.json; in a multimodal one, those of the language model. A value is found under any of
    the key names that model families use for it. Raises UnsupportedModelError, with the key's name, for a missing key
    or an invalid size."""

    def __init__(self, whole_config: dict[str, Any]) -> None:
        inner = whole_config.get("text_config") or whole_config.get("llm_config") or whole_config
        if not isinstance(inner, dict):
            raise UnsupportedModelError(
                "this is no config.json of a model: it must be a JSON object with hidden_size and so on"
            )
        self.whole_config, self.config = whole_config, inner
        for family, reason in KEYS["not_read"].items():
            if self.family.startswith(family):
                remedy = "describe the model as a shape (docs/explanation/prediction.md)"
                raise UnsupportedModelError(f"{self.family} has {reason}, which is not read: {remedy}")

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", self.whole_config.get("model_type", "model")))

    def error(self, text: str) -> UnsupportedModelError:
        """Returns the error with this message, which begins with the model's family."""
        return UnsupportedModelError(f"{self.family}: {text}")

    def has(self, name: str) -> bool:
        return bool(self.config.get(name))

    def whole(self, name: str, default: int | None = None, within: dict[str, Any] | None = None) -> int:
        """Returns the integer value of the key `name`, or `default` if the key is missing or null. `within`: object of
        the config that has the key; None: the config itself. Raises UnsupportedModelError for an invalid size (0 is
        valid only if it is also the default), and for a missing one if `default` is None."""
        keys, config = (name, *KEYS["other_names"].get(name, ())), self.config if within is None else within
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is None:
            if default is None:
                raise self.error(f"the config has no {name}, which a prediction needs: give a complete config.json")
            return default
        most = MAX_LAYERS if name == "num_hidden_layers" else MOST
        is_size = is_amount(value) and float(value).is_integer() and (default == 0 or value > 0)
        if not is_size or value > most:
            raise self.error(f"{name} is {value!r:.40}, which is no size: check the config.json")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    @property
    def head_dim(self) -> int:
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        if size := self.whole("head_dim", hidden // heads):
            return size
        raise self.error(f"{heads} heads in a hidden_size of {hidden}, which is not possible: check the config.json")

    @property
    def differs_by_layer(self) -> bool:
        """True if layers with full attention and layers with a sliding window have heads of different number or size
        (Gemma 4)."""
        return self.family.startswith(tuple(KEYS["by_layer"]))

    def key_heads(self, layer: int) -> tuple[int, int]:
        """Returns (number of key heads, size of a head) of a layer. There are as many value heads as key heads."""
        kv_heads, head_dim = self.whole("num_key_value_heads", self.whole("num_attention_heads")), self.head_dim
        if not self.differs_by_layer or self.layer_kind(layer) != "full_attention":
            return kv_heads, head_dim
        changed = self.config.get("per_layer_config")
        if isinstance(changed, dict):
            own = next((each for key, each in changed.items() if key.isdecimal() and int(key) == layer), None)
            own = own if isinstance(own, dict) else {}
            return self.whole("num_key_value_heads", kv_heads, own), self.whole("head_dim", head_dim, own)
        if self.flag("attention_k_eq_v", False):
            kv_heads = self.whole("num_global_key_value_heads", kv_heads)
        return kv_heads, self.whole("global_head_dim", 2 * head_dim)

    def is_shared(self, layer: int) -> bool:
        """True if a layer reads the keys and values of an earlier one (Gemma 4)."""
        return layer >= self.whole("num_hidden_layers") - self.whole("num_kv_shared_layers", 0)

    @property
    def input_size(self) -> int:
        """Width of the per-layer embeddings (Gemma 4); 0 if the model has no such embeddings."""
        return self.whole("hidden_size_per_layer_input", 0)

    @property
    def layer_table(self) -> int:
        """Number of parameters in the table of per-layer embeddings, over all layers; 0 without such embeddings."""
        if not self.input_size:
            return 0
        rows = self.whole("vocab_size_per_layer_input", self.whole("vocab_size"))
        return rows * self.whole("num_hidden_layers") * self.input_size

    @property
    def is_tied(self) -> bool:
        """True if the embedding and the LM head are one tensor, by the config or else by the model's family."""
        value = self.whole_config.get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        return self.family.startswith(tuple(KEYS["tied"])) if value is None else bool(value)

    @property
    def num_experts(self) -> int:
        return next((self.whole(name) for name in KEYS["experts"] if self.has(name)), 0)

    @property
    def experts_per_token(self) -> int:
        return self.whole(next(filter(self.has, KEYS["per_token"]), KEYS["per_token"][0]))

    def layer_kind(self, layer: int) -> str:
        """Returns a layer's attention type: full_attention, sliding_attention or linear_attention. Without
        "layer_types" in the config, the type follows the pattern of the model's family. Raises UnsupportedModelError
        for an unknown type, or if "layer_types" does not list all layers."""
        kinds, num_layers = self.config.get("layer_types"), self.whole("num_hidden_layers")
        if self.differs_by_layer and layer == num_layers - 1:
            return "full_attention"
        if kinds:
            if not isinstance(kinds, list) or len(kinds) < num_layers:
                raise self.error(f"layer_types must list the type of each of {num_layers} layers")
            kind, known = str(kinds[layer]), KEYS["layer_kinds"]
            if kind not in known and not self.has("compress_ratios"):
                raise self.error(f"layer type {kind!r} is not known: choose from {', '.join(known)}")
            return kind if kind in known else "full_attention"
        if self.has("linear_num_value_heads"):
            return (
                "full_attention" if (layer + 1) % self.whole("full_attention_interval", 4) == 0 else "linear_attention"
            )
        slides = self.has("sliding_window") and self.flag("use_sliding_window", True)
        pattern = next((every for family, every in KEYS["patterns"].items() if self.family.startswith(family)), None)
        if slides and pattern is not None:
            slides = (layer + 1) % self.whole("sliding_window_pattern", pattern) != 0
        elif slides and self.family.startswith("qwen"):
            slides = layer >= self.whole("max_window_layers", 0)
        return "sliding_attention" if slides else "full_attention"

    def compress_ratio(self, layer: int) -> int:
        """Returns how many tokens share one entry of a layer's compressed cache (DeepSeek V4); 0 if the layer's cache
        is not compressed. Raises UnsupportedModelError unless "compress_ratios" lists an integer for each layer."""
        values, num_layers = self.config.get("compress_ratios"), self.whole("num_hidden_layers")
        if (
            not isinstance(values, list)
            or len(values) < num_layers
            or not all(isinstance(value, int) and is_amount(value) for value in values)
        ):
            raise self.error(f"compress_ratios must list a whole number for each of {num_layers} layers")
        return values[layer]

    def is_sparse(self, layer: int) -> bool:
        """True if a layer's feed-forward part is a mixture of experts."""
        if not self.num_experts or layer < self.whole("first_k_dense_replace", 0):
            return False
        if not self.flag("enable_moe_block", True):
            return False
        dense = self.config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise self.error("mlp_only_layers must be a list of layers")
        if layer in dense:
            return False
        step = self.whole("decoder_sparse_step", 0) or self.whole("interleave_moe_layer_step", 0) or 1
        return (layer + 1) % step == 0

    @property
    def precisions(self) -> Precisions:
        """Number formats of the model's parts, from the stored dtype and the quantisation. Experts may have another
        format than the other weights. Attention and cache are assumed to be bfloat16 (the cache float8 in DeepSeek V4),
        because the config does not show the server's formats."""
        quantisation = self.whole_config.get("quantization_config") or self.config.get("quantization_config")
        quantisation = quantisation if isinstance(quantisation, dict) else {}
        method, dtype = quantisation.get("quant_method"), self.config.get("dtype", self.config.get("torch_dtype"))
        if method == "mxfp4":
            weights = "bfloat16"
        elif method in ("fp8", "fbgemm_fp8", "modelopt") or "fp8" in str(quantisation.get("quant_algo", "")).lower():
            weights = "float8"
        elif method in ("gptq", "awq") or quantisation.get("load_in_4bit"):
            weights = "int8" if quantisation.get("bits") == 8 else "int4"
        else:
            weights = "float16" if (dtype or self.whole_config.get("torch_dtype")) == "float16" else "bfloat16"
        experts = "float4" if method == "mxfp4" or self.config.get("expert_dtype") == "fp4" else weights
        return Precisions(weights, experts, kv="float8" if self.has("compress_ratios") else "bfloat16")


def attention_of(read: ConfigReader, layer: int) -> tuple[Attention, int]:
    """Returns (attention sizes of one layer, as an Attention with layers=1; number of parameters in its matrices)."""
    kind = read.layer_kind(layer)
    if kind == "linear_attention":
        return _linear(read)
    if read.has("compress_ratios"):
        return _compressed(read, layer)
    if read.has("kv_lora_rank"):
        return _latent(read)
    heads, (kv_heads, head_dim) = read.whole("num_attention_heads"), read.key_heads(layer)
    if heads % kv_heads:
        raise read.error(f"{heads} heads cannot share {kv_heads} key heads evenly: check the config.json")
    width, is_shared = heads * head_dim, read.is_shared(layer)
    queries = 2 * width if read.flag("attn_output_gate", read.family.removesuffix("_text") in KEYS["gated"]) else width
    window = read.whole("sliding_window") if kind == "sliding_attention" else None
    has_key_values = read.flag("attention_k_eq_v", False) and window is None
    projections = 0 if is_shared else 1 if has_key_values else 2
    parameters = read.whole("hidden_size") * (queries + projections * kv_heads * head_dim + width)
    return Attention("gqa", 1, heads, kv_heads, head_dim, window=window, shared=int(is_shared)), parameters


def _linear(read: ConfigReader) -> tuple[Attention, int]:
    """Gated delta net: the state is a key x value matrix per value head and the convolution's last inputs, in 16
    bits."""
    key_dim, heads = read.whole("linear_key_head_dim"), read.whole("linear_num_value_heads")
    keys, values = read.whole("linear_num_key_heads") * key_dim, heads * read.whole("linear_value_head_dim")
    convolution = (2 * keys + values) * read.whole("linear_conv_kernel_dim")
    parameters = read.whole("hidden_size") * (2 * keys + 3 * values + 2 * heads) + convolution
    return Attention("linear", 1, state_bytes=float(2 * (values * key_dim + convolution))), parameters


def _latent(read: ConfigReader) -> tuple[Attention, int]:
    """MLA; with an indexer (DeepSeek V3.2) it reads only the positions that the indexer selects."""
    hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    latent, rope = read.whole("kv_lora_rank"), read.whole("qk_rope_head_dim")
    plain, value = read.whole("qk_nope_head_dim"), read.whole("v_head_dim")
    rank = read.whole("q_lora_rank", 0)
    queries = hidden * rank + rank * heads * (plain + rope) if rank else hidden * heads * (plain + rope)
    parameters = queries + hidden * (latent + rope) + latent * heads * (plain + value) + heads * value * hidden
    if index := read.whole("index_n_heads", 0):
        width = read.whole("index_head_dim")
        parameters += (rank or hidden) * index * width + hidden * (width + index)
    group = Attention("mla", 1, heads, latent=latent, rope=rope)
    if read.has("index_topk"):
        group = replace(group, window=0, ratio=1, topk=read.whole("index_topk"), **_indexer(read))
    return group, parameters


def _compressed(read: ConfigReader, layer: int) -> tuple[Attention, int]:
    """DeepSeek V4: a window, and before it one entry per `ratio` positions; ratio 4 selects among them, 128 reads all.
    Low-rank queries and grouped low-rank output, one key that is also the value, the compressor, the indexer."""
    ratio, width = read.compress_ratio(layer), read.head_dim
    hidden, heads = read.whole("hidden_size"), read.whole("num_attention_heads")
    rank, out_rank, groups = read.whole("q_lora_rank"), read.whole("o_lora_rank"), read.whole("o_groups")
    parameters = (
        hidden * rank + rank * heads * width + hidden * width + heads * width * out_rank + groups * out_rank * hidden
    )
    rope, window = read.whole("qk_rope_head_dim"), read.whole("sliding_window")
    group = Attention("mla", 1, heads, latent=width, rope=rope, window=window)
    if ratio == 0:
        return group, parameters
    group = replace(group, ratio=ratio)
    if ratio > 4:
        return group, parameters + 2 * hidden * width
    index = _indexer(read)
    heads, index_width = index["indexer_heads"], index["indexer_dim"]
    parameters += 4 * hidden * width + rank * heads * index_width + hidden * heads + 4 * hidden * index_width
    return replace(group, topk=read.whole("index_topk"), **index), parameters


def _indexer(read: ConfigReader) -> dict[str, int]:
    return {"indexer_heads": read.whole("index_n_heads"), "indexer_dim": read.whole("index_head_dim")}


def feed_forward_parameters(read: ConfigReader, layer: int) -> int:
    """Returns the number of feed-forward parameters of one layer, without experts. In a mixture-of-experts layer, these
    are the router's and, in Gemma 4, those of a dense part. Matrices for per-layer embeddings (Gemma 4) are
    included."""
    hidden, is_sparse = read.whole("hidden_size"), read.is_sparse(layer)
    router = hidden * (read.num_experts + read.has("shared_expert_intermediate_size")) if is_sparse else 0
    if is_sparse and not read.has("enable_moe_block"):
        return router
    width = read.whole("intermediate_size") * (2 if read.is_shared(layer) and read.has("use_double_wide_mlp") else 1)
    return router + hidden * (3 * width + 2 * read.input_size)


def experts_of(read: ConfigReader) -> Experts | None:
    """Returns the experts' parameters, summed over all mixture-of-experts layers; None for a dense model. Raises
    UnsupportedModelError unless a token uses at least one and not all of the experts."""
    layers = sum(read.is_sparse(layer) for layer in range(read.whole("num_hidden_layers")))
    if not layers:
        return None
    width = read.whole("moe_intermediate_size", 0) or read.whole("intermediate_size")
    shared = read.whole("n_shared_experts", 0) * width + read.whole("shared_expert_intermediate_size", 0)
    each, always = 3 * read.whole("hidden_size") * width, 3 * read.whole("hidden_size") * shared
    num_routed, per_token = read.num_experts, read.experts_per_token
    if not 0 < per_token < num_routed:
        raise read.error(f"{per_token} of {num_routed} experts per token is not possible: check num_experts_per_tok")
    return Experts(
        num_routed=num_routed,
        per_token=per_token,
        active=float(layers * (per_token * each + always)),
        resident=float(layers * (num_routed * each + always)),
    )
