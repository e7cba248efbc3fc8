"""Helpers of the config parsers: the table of families (families.json), and range checks of numbers in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeGuard

from paceline.bounds import MAX_LAYERS
from paceline.errors import ModelFileError

MAX_SIZE = 2**31 - 1
MOST = {"num_hidden_layers": MAX_LAYERS, "block_size": 1024}
MAX_EXPERTS = 65536
LARGEST = 1e18
"""Upper limits of values in config.json: integers, in general and by key, experts of all layers, and floats. Larger
values are rejected."""

FLAGS = ("attention_bias", "mlp_bias", "output_bias", "tie_word_embeddings", "norm_topk_prob", "use_sliding_window")
FLAGS += ("attention_k_eq_v", "use_double_wide_mlp")
"""Keys of a model's config.json whose values are true or false."""

TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
_named = TABLES["families"]
TABLES["families"] = {name: {**_named.get(own.get("as"), {}), **own} for name, own in _named.items()}


def text_part(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the text model's part (`text_config`) of a multimodal config.json, with the text model's `architectures`.
    Its `tie_word_embeddings` and, if there is one, `quantization_config` are those of the outer object. Configs of
    other models are returned unchanged. Raises ModelFileError, naming `path`, if the part is missing."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in TABLES["text_parts"]:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelFileError(f"{path}: {name} needs an object text_config (got {short(text)}): correct config.json")
    outer = {key: raw[key] for key in ("quantization_config", "tie_word_embeddings") if key in raw}
    own = {key: value for key, value in text.items() if key != "tie_word_embeddings"}  # Transformers reads outer's
    return {**own, **outer, "architectures": [TABLES["text_parts"][name]]}


def part(values: dict[str, Any], path: Path, *keys: str) -> dict[str, Any]:
    """Return the JSON object that these nested keys lead to in `values`; {} if one of the keys is missing or null.
    Raises ModelFileError, naming `path`, if the value of a key is not an object."""
    for key in keys:
        inner = values.get(key)
        values = {} if inner is None else inner
        if not isinstance(values, dict):
            raise ModelFileError(f"{path}: {key} must be an object (got {short(values)}): correct config.json")
    return values


def check_flags(values: dict[str, Any], path: Path, keys: tuple[str, ...] = FLAGS) -> None:
    """Check that the value of each of `keys` is true, false, null or missing. Raises ModelFileError, naming `path`, for
    any other value, such as 1 or "true": Transformers would treat it as true, paceline as false."""
    for key in keys:
        if not isinstance(values.get(key), (bool, type(None))):
            raise ModelFileError(f"{path}: {key} must be true or false (got {short(values[key])}): correct config.json")


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(values: dict[str, Any], key: str, path: Path, default: int | None = None, least: int = 1) -> int:
    """Return the integer `values[key]`, or `default` if the key is missing or null.

    Raises ModelFileError, naming `path`, if there is neither a value nor a default, or if the value is not an integer
    from `least` to 2^31 - 1, or to the key's own maximum (MOST).
    """
    value: Any = default if values.get(key) is None else values[key]
    most = MOST.get(key, MAX_SIZE)
    if not is_whole(value) or not least <= value <= most:
        raise ModelFileError(
            f"{path}: config.json needs {key!r} as a whole number from {least} to {most} (got {short(value)}): "
            "correct it"
        )
    return value


def fraction(values: dict[str, Any], key: str, default: float, path: Path, above: float = 0.0) -> float:
    """Return the number `values[key]` as a float, or `default` if the key is missing or null. Raises ModelFileError,
    naming `path`, unless the value is a number larger than `above` and smaller than 1e18."""
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < LARGEST:
        raise ModelFileError(
            f"{path}: config.json needs {key!r} as a number above {above:g} (got {short(value)}): correct it"
        )
    return float(value)
