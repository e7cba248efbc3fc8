"""What a decoder looks like, as numbers, read from a Hugging Face config.json; `gguf.py` makes the same of GGUF metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1
LARGEST = 1e18
"""What no model exceeds: in layers, in any other whole number, in any fraction. A file that asks for more is refused."""

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
FAMILIES, ROPE_KEYS = TABLES["families"], TABLES["rope"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a Llama-family decoder (Llama 2/3.x, Mistral, Qwen2, Qwen3)."""

    family: str
    """"llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context the model was made for, in tokens."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """The config's rope_scaling / rope_parameters with a "rope_type" (default, linear, llama3, yarn, ...), or None."""
    tie_embeddings: bool = False
    """The head is the embedding; no lm_head.weight in the checkpoint."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before rope (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer the sliding window in tokens, or None for full attention; empty means all full."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


def decoder_config(raw: dict[str, Any], path: Path) -> DecoderConfig:
    """What a config.json says. Raises UnsupportedModelError (architecture or option not implemented), ModelFileError (a key
    missing or impossible)."""
    architecture = _architecture(raw, path)
    values = FAMILIES[architecture] | raw | {"family": FAMILIES[architecture]["family"]}
    sizes = {field: whole(values, key, path) for field, key in TABLES["sizes"].items()}
    family, num_heads = values["family"], sizes["num_heads"]
    head_dim = whole(values, "head_dim", path, sizes["hidden_size"] // num_heads)
    num_kv_heads = whole(values, "num_key_value_heads", path, num_heads)
    theta, scaling = _rope(values, sizes["max_position"], path)
    biased = values.get("attention_bias") is True and family in ("llama", "qwen3")
    if num_heads % num_kv_heads or head_dim % 2 or not head_dim:
        raise ModelFileError(
            f"{path}: {num_heads} heads of {head_dim} over {num_kv_heads} key heads do not divide evenly: "
            "correct the config, or fetch the model again"
        )
    return DecoderConfig(
        family=family,
        **sizes,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fraction(values, "rms_norm_eps", 1e-6, path),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=raw.get("tie_word_embeddings") is True,
        qkv_bias=biased or family == "qwen2",
        output_bias=values.get("output_bias", biased) is True,
        mlp_bias=values.get("mlp_bias") is True and family == "llama",
        qk_norm=family == "qwen3",
        windows=_windows(values, path),
    )


def _rope(values: dict[str, Any], max_position: int, path: Path) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling, from `rope_parameters` (Transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: rope parameters must be an object (got {short(given)}): correct config.json")
    if any(isinstance(value, dict) for value in given.values()) or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{path}: partial or per-layer rope is not implemented: use the Transformers fallback")
    scaling = {key: value for key, value in given.items() if key not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling.setdefault("rope_type", given.get("type", "default"))
    if not isinstance(scaling["rope_type"], str):
        raise ModelFileError(f"{path}: rope_type must be a name (got {short(scaling['rope_type'])}): correct config.json")
    if scaling["rope_type"] in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", values.get("original_max_position_embeddings", max_position))
    if scaling["rope_type"] == "yarn" and scaling.get("factor") is None:
        original = scaling["original_max_position_embeddings"]
        scaling["factor"] = max_position / original if is_whole(original) and original > 0 else None
    check_rope(scaling)
    theta = fraction(given if given.get("rope_theta") is not None else values, "rope_theta", 10000.0, path)
    if theta <= 1:
        raise ModelFileError(f"{path}: rope_theta must be larger than 1 (got {theta}): correct config.json")
    return theta, None if scaling["rope_type"] == "default" else scaling


def _windows(values: dict[str, Any], path: Path) -> tuple[int | None, ...]:
    """Mistral: every layer has the window. Qwen: only with use_sliding_window, from max_window_layers or by layer_types."""
    num_layers, family = values["num_hidden_layers"], values["family"]
    window = values.get("sliding_window")
    if family == "llama" or (family != "mistral" and values.get("use_sliding_window") is not True):
        window = None
    if window is None:
        return ()
    window = whole(values, "sliding_window", path)
    if family == "mistral":
        return (window,) * num_layers
    first = whole(values, "max_window_layers", path, 28, least=0)
    types = values.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise UnsupportedModelError(f"{path}: layer_types {short(types)} is not implemented: use the Transformers fallback")
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def _architecture(raw: dict[str, Any], path: Path) -> str:
    """Raises UnsupportedModelError for one that is not among FAMILIES, or that a key changes."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else f"model_type {raw.get('model_type')!r}"
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: architecture {name!s:.80} is not implemented (known: {', '.join(FAMILIES)}): "
            "the Transformers fallback runs it from a safetensors folder"
        )
    for key, plain in (
        ("quantization_config", (None,)),
        ("hidden_act", (None, "silu")),
        ("partial_rotary_factor", (None, 1.0)),
    ):
        if raw.get(key) not in plain:
            raise UnsupportedModelError(
                f"{path}: {key} {short(raw[key])} is not implemented: "
                "use an unquantised, unmodified checkpoint, or the Transformers fallback"
            )
    return name


def check_rope(scaling: dict[str, Any]) -> None:
    """Raise when this rope scaling cannot be computed: unknown type, or a number missing or not positive."""
    rope_type = scaling.get("rope_type", "default")
    if rope_type not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"rope type {rope_type!r} is not implemented (known: default, linear, llama3, yarn): "
            "the Transformers fallback runs such a safetensors folder"
        )
    for key in (*ROPE_KEYS[rope_type], *(key for key in TABLES["rope_optional"] if scaling.get(key) is not None)):
        values = scaling.get(key)
        for value in values if key == "factors" and isinstance(values, (list, tuple)) and values else [values]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
                raise ModelFileError(
                    f"rope type {rope_type!r} needs a positive {key!r} in the model's config (got {short(value)})"
                )


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(values: dict[str, Any], key: str, path: Path, default: int | None = None, least: int = 1) -> int:
    """The value of a key, None being as good as none. Raises ModelFileError when it is no whole number from `least` on."""
    value: Any = default if values.get(key) is None else values[key]
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
    if not is_whole(value) or not least <= value <= most:
        raise ModelFileError(
            f"{path}: config.json needs {key!r} as a whole number from {least} to {most} (got {short(value)}): correct it"
        )
    return value


def fraction(values: dict[str, Any], key: str, default: float, path: Path, above: float = 0.0) -> float:
    """As `whole`, of a number larger than `above`."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < LARGEST:
        raise ModelFileError(f"{path}: config.json needs {key!r} as a number above {above:g} (got {short(value)}): correct it")
    return float(value)
