"""The decoder's config, parsed from config.json; `gguf/metadata.py` produces an equivalent one from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.layers import FULL, LINEAR, SLIDING, LayerSizes, layer_sizes_of
from paceline.model.config.ropes import rope_fields
from paceline.model.config.values import (
    LARGEST,
    MAX_EXPERTS,
    TABLES,
    check_flags,
    fraction,
    is_whole,
    short,
    text_part,
    whole,
)

FAMILIES = TABLES["families"]
FP8_BLOCK = 128
"""Rows and columns of an FP8 weight that share a factor (`model/fp8.py`)."""

RopeKind = Literal["main", "local", "none"]


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a model's gated delta net layers (arXiv 2412.06464), a kind of linear attention."""

    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads; adjacent value heads share a key head."""
    key_dim: int
    value_dim: int
    """Size of one value head."""
    kernel: int
    """Number of inputs of the short causal convolution: the token's own and those of the tokens before it."""

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder model and options of its layers. The fields' defaults describe Llama's layers."""

    family: str
    """Name in families.json, such as "llama"; only for messages, as the fields below describe all differences."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Maximum context length in tokens."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """`rope_scaling` or `rope_parameters` of config.json, with a "rope_type" such as linear, llama3 or yarn; None:
    plain RoPE."""
    tie_embeddings: bool = False
    """True if the embedding is also the LM head; the checkpoint then has no lm_head.weight."""
    qkv_bias: bool = False
    output_bias: bool = False
    """True if the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """True if each query head and each key head passes an RMSNorm before RoPE (Qwen3)."""
    is_qk_norm_whole: bool = False
    """True if `qk_norm` covers all query heads together, and all key heads together (OLMo 2)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, or None for full attention; empty means all full."""

    norms: Literal["before", "after", "around"] = "before"
    """Position of the RMSNorms: before each sublayer, after it (OLMo 2), or both (Gemma 2)."""
    norm_offset: float = 0.0
    """Number added to the weights of all norms (Gemma: 1)."""
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    """Activation function of the MLP's gate; its result is multiplied by the up projection's output."""
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    """Limit of clamped_swiglu's inputs (gpt-oss); `swiglu_alpha` is the factor within its sigmoid."""
    num_experts: int = 0
    """Number of experts per layer (mixture of experts); 0: every layer has one MLP."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Inner width of each expert's MLP."""
    normed_experts: bool = True
    """True if the router's weights of a token's selected experts are scaled to sum 1."""
    has_expert_biases: bool = False
    """True if router and experts have biases."""
    dense_layers: tuple[int, ...] = ()
    """Indices of the layers with one dense MLP, in a model whose other layers have experts."""
    shared_expert_size: int = 0
    """Inner width of the shared expert, which runs for every token in addition to the selected ones; 0: none."""
    layer_sizes: LayerSizes | None = None
    """Options of a model whose layers differ in their sizes; None: all layers have the sizes above."""
    delta: DeltaShape | None = None
    linear_layers: tuple[int, ...] = ()
    """Indices of the layers with a gated delta net, with the sizes in `delta`, instead of attention."""
    has_mixed_delta: bool = False
    """True if delta net inputs use two projections with rows grouped by key head (Qwen3-Next), not four (Qwen3.5)."""
    output_gate: bool = False
    """True if attention outputs are multiplied by a sigmoid gate, stored in q_proj after each head's queries
    (Qwen3-Next)."""
    has_sinks: bool = False
    """True if each head has an attention sink: the learned score of an always visible key without a value (gpt-oss)."""
    num_mtp_layers: int = 0
    """Number of the checkpoint's additional layers for multi-token prediction. Only a drafter uses them."""
    embedding_scale: float = 1.0
    """Factor on the embeddings before the first layer."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP before they are added to the residual stream."""
    attention_scale: float | None = None
    """Factor on attention scores (query-key products); None: 1 / sqrt(head_dim)."""
    attention_cap: float = 0.0
    """Soft cap of attention scores, cap * tanh(score / cap); 0 is off (Gemma 2)."""
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    """Soft cap of logits, cap * tanh(logit / cap); 0 is off."""
    rotary_dim: int | None = None
    """Number of leading channels of each head that RoPE rotates; None: all (Phi-4-mini: three quarters)."""
    ropes: tuple[RopeKind, ...] = ()
    """RoPE of each layer: "main" (rope_theta), "local" (the two fields below) or "none"; empty means all main."""
    local_rope_theta: float = 10000.0
    local_rope_scaling: dict[str, Any] | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def is_linear(self, layer: int) -> bool:
        return layer in self.linear_layers

    def is_full(self, layer: int) -> bool:
        """Return True if no sliding window limits the layer's attention."""
        return self.window(layer) is None

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Return (number of key heads, size of a head) of the layer's attention."""
        if self.layer_sizes is None or not self.is_full(layer):
            return self.num_kv_heads, self.head_dim
        return self.layer_sizes.full_kv_heads, self.layer_sizes.full_head_dim

    def rope_size(self, kind: RopeKind) -> int:
        """Return the size of an attention head in the layers whose RoPE is of type `kind`. It depends on the type only
        in models whose layers differ in size (Gemma 4)."""
        return self.head_dim if self.layer_sizes is None or kind == "local" else self.layer_sizes.full_head_dim

    def source(self, layer: int) -> int:
        """Return the index of the layer whose cached keys and values layer `layer` reads. This is `layer` itself,
        except for some layers of Gemma 4, which share the keys and values of an earlier layer."""
        return layer if self.layer_sizes is None else self.layer_sizes.sources[layer]

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def rope(self, layer: int) -> RopeKind:
        return self.ropes[layer] if self.ropes else "main"


def has_llama_layers(family: str) -> bool:
    """Return True if a draft layer can be initialised from one of this family's layers. Compared with Llama's, they
    may have biases of the QKV projection and norms of queries and keys, but no other norms, activation, gates, sinks or
    scale factors. Not compared: sliding windows, partial or missing RoPE, and experts in place of an MLP."""
    traits = next(keys["traits"] for keys in FAMILIES.values() if keys["family"] == family)
    return "numbers" not in traits and traits.get("fields", {}).keys() <= {"qkv_bias", "qk_norm"}


def decoder_config(raw: dict[str, Any], path: Path) -> DecoderConfig:
    """Parse `raw`, the content of config.json at `path`. Raises UnsupportedModelError (architecture or option not
    implemented), ModelFileError (a key is missing or invalid)."""
    raw = text_part(raw, path)
    architecture = _architecture(raw, path)
    defaults = FAMILIES[architecture]
    values = defaults | raw | {"family": defaults["family"]}
    check_flags(values, path)
    values["rope_parameters"] = raw.get("rope_parameters") or defaults.get("rope_parameters")
    if values["rope_parameters"]:
        values["rope_scaling"] = raw.get("rope_scaling")
    traits: dict[str, Any] = defaults["traits"]
    sizes = {field: whole(values, key, path) for field, key in TABLES["sizes"].items()}
    num_heads = sizes["num_heads"]
    head_dim = whole(values, "head_dim", path, sizes["hidden_size"] // num_heads)
    num_kv_heads = whole(values, "num_key_value_heads", path, num_heads)
    biased, mlp_bias = (
        key in traits.get("biases", ()) and values.get(key) is True for key in ("attention_bias", "mlp_bias")
    )
    if num_heads % num_kv_heads or head_dim % 2 or not head_dim:
        raise ModelFileError(
            f"{path}: {num_heads} heads of {head_dim} over {num_kv_heads} key heads do not divide evenly: "
            "correct the config, or fetch the model again"
        )
    windows = _windows(values, traits, path)
    fields: dict[str, Any] = {
        "head_dim": head_dim,
        "rms_norm_eps": fraction(values, "rms_norm_eps", 1e-6, path),
        "tie_embeddings": values.get("tie_word_embeddings") is True,
        "qkv_bias": biased,
        "output_bias": values.get("output_bias", biased) is True,
        "mlp_bias": mlp_bias,
        "num_mtp_layers": whole(values, "num_nextn_predict_layers", path, 0, least=0),
        "windows": windows,
        "ropes": _rope_kinds(values, traits, windows, path),
    }
    if traits.get("layer_sizes"):
        fields["layer_sizes"] = layer_sizes_of(values, windows, path)
    fields |= rope_fields(values, traits, sizes["max_position"], head_dim, path)
    fields |= (
        traits.get("fields", {})
        | _numbers(values, traits, path)
        | _experts(values, traits, path)
        | _delta(values, traits, path)
    )
    return DecoderConfig(family=values["family"], **sizes, num_kv_heads=num_kv_heads, **fields)


def _numbers(values: dict[str, Any], traits: dict[str, Any], path: Path) -> dict[str, float]:
    """Fields computed as a key's value raised to a power, for the keys present."""
    named: dict[str, tuple[str, float]] = traits.get("numbers", {})
    given = {field: (key, power) for field, (key, power) in named.items() if values.get(key) is not None}
    return {field: fraction(values, key, 1.0, path, 1 / LARGEST) ** power for field, (key, power) in given.items()}


def _experts(values: dict[str, Any], traits: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of experts, if the family has any."""
    keys = traits.get("experts")
    if keys is None:
        return {}
    count_key = next((key for key in keys["count"] if values.get(key) is not None), keys["count"][0])
    count, per_token = whole(values, count_key, path), whole(values, "num_experts_per_tok", path)
    if per_token > count or count * values["num_hidden_layers"] > MAX_EXPERTS:
        raise ModelFileError(
            f"{path}: {per_token} of {count} experts for each token are not possible: correct config.json"
        )
    step, dense = whole(values, "decoder_sparse_step", path, 1), values.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)) or not all(map(is_whole, dense)):
        raise ModelFileError(
            f"{path}: mlp_only_layers must be a list of layers (got {short(dense)}): correct config.json"
        )
    layers = range(values["num_hidden_layers"])
    return {
        "num_experts": count,
        "experts_per_token": per_token,
        "expert_size": whole(values, keys["size"], path),
        "normed_experts": "norm" not in keys or values.get(keys["norm"]) is True,
        "dense_layers": tuple(layer for layer in layers if layer in dense or (layer + 1) % step),
        "shared_expert_size": whole(values, keys["shared"], path) if "shared" in keys else 0,
    }


def _delta(values: dict[str, Any], traits: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of gated delta nets, if the family has any."""
    if not traits.get("delta"):
        return {}
    num_layers, every = values["num_hidden_layers"], whole(values, "full_attention_interval", path, 4)
    types = values.get("layer_types") or [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (LINEAR, FULL) for kind in types):
        raise UnsupportedModelError(
            f"{path}: layer_types {short(types)} is not implemented: use the Transformers fallback"
        )
    shape = DeltaShape(**{field: whole(values, key, path) for field, key in TABLES["delta"].items()})
    if shape.num_value_heads % shape.num_key_heads or FULL not in types:
        raise ModelFileError(
            f"{path}: {shape.num_value_heads} value heads over {shape.num_key_heads} key heads do not divide evenly, "
            "or no layer has full attention: correct the config, or fetch the model again"
        )
    linear = tuple(layer for layer, kind in enumerate(types) if kind == LINEAR)
    return {"delta": shape, "linear_layers": linear} if linear else {}


def _rope_kinds(
    values: dict[str, Any], traits: dict[str, Any], windows: tuple[int | None, ...], path: Path
) -> tuple[RopeKind, ...]:
    """Value of `DecoderConfig.ropes`."""
    if traits.get("unrotated"):
        has_rope = _rotated(values, path)
        return () if all(has_rope) else tuple("main" if rotated else "none" for rotated in has_rope)
    if traits.get("local_rope") and windows:
        return tuple("main" if window is None else "local" for window in windows)
    return ()


def _rotated(values: dict[str, Any], path: Path) -> list[bool]:
    """For each layer, whether it has RoPE: `no_rope_layers` has a 1 if so (SmolLM3)."""
    num_layers, given = values["num_hidden_layers"], values.get("no_rope_layers")
    if given is None:
        every = whole(values, "no_rope_layer_interval", path, 4)
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise ModelFileError(
            f"{path}: no_rope_layers needs a 0 or a 1 for each layer (got {short(given)}): correct config.json"
        )
    return [value == 1 for value in given[:num_layers]]


def _windows(values: dict[str, Any], traits: dict[str, Any], path: Path) -> tuple[int | None, ...]:
    """Value of `DecoderConfig.windows`, from layer_types or the family's rule."""
    num_layers, rule = values["num_hidden_layers"], traits.get("windows")
    is_off = traits.get("window_flag") and values.get("use_sliding_window") is not True
    if rule is None or is_off or values.get("sliding_window") is None:
        return ()
    window = whole(values, "sliding_window", path)
    if rule == "all":
        return (window,) * num_layers
    types = values.get("layer_types") or [SLIDING if slides else FULL for slides in _sliding(values, rule, path)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (SLIDING, FULL) for kind in types):
        raise UnsupportedModelError(
            f"{path}: layer_types {short(types)} is not implemented: use the Transformers fallback"
        )
    if traits.get("layer_sizes"):
        types = [*types[:-1], FULL]  # as Transformers' class does, whatever the list has
    windows = tuple(window if kind == SLIDING else None for kind in types)
    return windows if any(windows) else ()


def _sliding(values: dict[str, Any], rule: str | int, path: Path) -> list[bool]:
    """For each layer, whether it has a sliding window, by the family's rule."""
    layers = range(values["num_hidden_layers"])
    if rule == "unrotated":
        return [not rotated for rotated in _rotated(values, path)]
    if rule == "last":
        first = whole(values, "max_window_layers", path, 28, least=0)
        return [layer >= first for layer in layers]
    every = whole(values, "sliding_window_pattern", path, int(rule))
    return [(layer + 1) % every != 0 for layer in layers]


def _architecture(raw: dict[str, Any], path: Path) -> str:
    """The architecture's name. Raises UnsupportedModelError if it is not in FAMILIES, or a key changes it."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else f"model_type {raw.get('model_type')!r}"
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(keys["family"] for keys in FAMILIES.values())
        raise UnsupportedModelError(
            f"{path}: architecture {name!s:.80} is not implemented (known: {known}): "
            "the Transformers fallback runs it from a safetensors folder"
        )
    traits = FAMILIES[name]["traits"]
    _refuse_quantised(raw.get("quantization_config"), traits.get("quantised"), path)
    own = traits.get("allowed", {})
    keys = {key: [*plain, *own.get(key, ())] for key, plain in TABLES["allowed"].items()}
    for key, plain in (keys | {key: plain for key, plain in own.items() if key not in keys}).items():
        is_read = key == "partial_rotary_factor" and traits.get("partial_rotary")
        if not is_read and raw.get(key) not in plain:
            raise UnsupportedModelError(
                f"{path}: {key} {short(raw[key])} is not implemented: "
                "use an unquantised, unmodified checkpoint, or the Transformers fallback"
            )
    return name


def _refuse_quantised(config: Any, known: str | None, path: Path) -> None:
    """Raise UnsupportedModelError for weights in a quantised format other than FP8 and `known`.

    `config`: quantization_config of config.json; `known`: the quant_method that only this model family supports.
    """
    if config is None:
        return
    method = config.get("quant_method") if isinstance(config, dict) else config
    blocks = config.get("weight_block_size") if isinstance(config, dict) else None
    is_fp8 = method == "fp8" and blocks == [FP8_BLOCK, FP8_BLOCK] and config.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 and (known is None or method != known):
        raise UnsupportedModelError(
            f"{path}: weights quantised as {short(method)} (quantization_config) are not implemented: use the original "
            f"checkpoint, one in FP8 with blocks of {FP8_BLOCK} x {FP8_BLOCK}, a GGUF file, or the Transformers "
            "fallback"
        )
