"""The keys of a config.json under their many names, with an error that names the missing one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.errors import UnsupportedModelError

OTHER_NAMES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
KINDS = ("full_attention", "sliding_attention", "linear_attention")
NOT_READ = {
    "mamba": "state-space layers",
    "falcon": "parallel attention with its own head sizes",
    "gpt2": "two-matrix feed-forward parts",
    "gpt_neox": "two-matrix feed-forward parts",
    "gemma4": "head sizes that differ by layer",
    "nemotron_h": "state-space layers",
    "rwkv": "recurrent layers",
    "bert": "an encoder",
    "t5": "an encoder",
}
"""Family -> what it has that is not read here."""


@dataclass(frozen=True)
class ConfigReader:
    """A config.json; the language model's part of it where there are several. Raises UnsupportedModelError."""

    whole_config: dict[str, Any]
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        inner = self.whole_config.get("text_config") or self.whole_config.get("llm_config") or self.whole_config
        if not isinstance(inner, dict):
            raise UnsupportedModelError(
                "this is no config.json of a model: it must be a JSON object with hidden_size and so on"
            )
        object.__setattr__(self, "config", inner)
        for family, reason in NOT_READ.items():
            if self.family.startswith(family):
                raise UnsupportedModelError(
                    f"{self.family} has {reason}, which is not read: describe the model as a shape (docs/simulate.md)"
                )

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", self.whole_config.get("model_type", "model")))

    def has(self, name: str) -> bool:
        return bool(self.config.get(name))

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of 0 or more; a key that is null counts as missing."""
        value = next((self.config[key] for key in (name, *OTHER_NAMES.get(name, ())) if self.config.get(key) is not None), None)
        if value is None:
            if default is None:
                raise UnsupportedModelError(
                    f"{self.family}: the config has no {name}, which a prediction needs: give a complete config.json"
                )
            return default
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        if not is_whole or value < (1 if default is None else 0):
            raise UnsupportedModelError(f"{self.family}: {name} is {value!r}, which is no size: check the config.json")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def numbers(self, name: str) -> list[int]:
        """A list with an entry for each layer, at least."""
        values = self.config.get(name)
        layers = self.whole("num_hidden_layers")
        if not isinstance(values, list) or len(values) < layers or not all(isinstance(value, int) for value in values):
            raise UnsupportedModelError(f"{self.family}: {name} must list a whole number for each of {layers} layers")
        return values

    @property
    def head_dim(self) -> int:
        heads = self.whole("num_attention_heads")
        return self.whole("head_dim", self.whole("hidden_size") // heads)

    @property
    def is_tied(self) -> bool:
        """Gemma's default is tied, others' is not."""
        value = self.config.get("tie_word_embeddings", self.whole_config.get("tie_word_embeddings"))
        return self.family.startswith("gemma") if value is None else bool(value)

    def layer_kind(self, layer: int) -> str:
        """full_attention, sliding_attention or linear_attention."""
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list) and len(kinds) > layer:
            kind = str(kinds[layer])
            if kind not in KINDS and not self.has("compress_ratios"):
                raise UnsupportedModelError(f"{self.family}: layer type {kind!r} is not known: choose from {', '.join(KINDS)}")
            return kind if kind in KINDS else "full_attention"
        if self.has("linear_num_value_heads"):
            return "full_attention" if (layer + 1) % self.whole("full_attention_interval", 4) == 0 else "linear_attention"
        return "sliding_attention" if self._slides(layer) else "full_attention"

    def _slides(self, layer: int) -> bool:
        """Without layer types: Gemma 3 slides but for each sixth, Gemma 2 each other, Mistral and its kin all or none."""
        if not self.has("sliding_window") or not self.flag("use_sliding_window", True):
            return False
        if self.family.startswith("gemma3"):
            return (layer + 1) % self.whole("sliding_window_pattern", 6) != 0
        if self.family.startswith("gemma2"):
            return layer % 2 == 0
        return not (self.family.startswith("qwen") and layer < self.whole("max_window_layers", 0))

    def window(self, layer: int) -> int:
        return self.whole("sliding_window")

    @property
    def num_experts(self) -> int:
        return next((self.whole(name) for name in EXPERTS if self.has(name)), 0)

    @property
    def experts_per_token(self) -> int:
        name = next((name for name in PER_TOKEN if self.has(name)), PER_TOKEN[0])
        return self.whole(name)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        if not self.num_experts or layer < self.whole("first_k_dense_replace", 0):
            return False
        if layer in (self.config.get("mlp_only_layers") or ()):
            return False
        step = self.whole("decoder_sparse_step", 0) or self.whole("interleave_moe_layer_step", 0) or 1
        return (layer + 1) % step == 0

    @property
    def _quantization(self) -> dict[str, Any]:
        found = self.whole_config.get("quantization_config") or self.config.get("quantization_config") or {}
        return found if isinstance(found, dict) else {}

    @property
    def stored_format(self) -> str:
        """Of the weights, as `formats.FORMATS` names it."""
        method, bits = str(self._quantization.get("quant_method", "")), self._quantization.get("bits")
        if method in ("fp8", "fbgemm_fp8", "modelopt") or "fp8" in str(self._quantization.get("quant_algo", "")).lower():
            return "float8"
        if method in ("gptq", "awq") or self._quantization.get("load_in_4bit"):
            return "int8" if bits == 8 else "int4"
        dtype = self.config.get("dtype", self.config.get("torch_dtype", self.whole_config.get("torch_dtype", "bfloat16")))
        return str(dtype) if dtype in ("float32", "float16", "bfloat16") else "bfloat16"

    @property
    def expert_format(self) -> str | None:
        """Where experts are stored otherwise than the rest: MXFP4 of gpt-oss, fp4 of DeepSeek V4."""
        is_fp4 = self._quantization.get("quant_method") == "mxfp4" or self.config.get("expert_dtype") == "fp4"
        return "float4" if is_fp4 else None

    @property
    def dense_format(self) -> str | None:
        return "bfloat16" if self._quantization.get("quant_method") == "mxfp4" else None
