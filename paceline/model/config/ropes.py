"""Fields of DecoderConfig for RoPE, read from config.json, for one type of layer or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.layers import FULL, SLIDING
from paceline.model.config.values import LARGEST, TABLES, fraction, is_whole, short

ROPE_KEYS = TABLES["rope"]
ROPE_LISTS = ("factors", "short_factor", "long_factor")
"""Keys of `rope_scaling` that hold a list with one number per frequency."""


def rope_fields(
    values: dict[str, Any], traits: dict[str, Any], max_position: int, head_dim: int, path: Path
) -> dict[str, Any]:
    """Read the RoPE options in `values`, the content of config.json; returns fields of DecoderConfig, by name.

    Transformers 5 writes them to `rope_parameters`, with one object per layer type if these differ; earlier versions
    write `rope_theta` and `rope_scaling`. `traits`: the family's properties in families.json; `max_position`: the
    model's context in tokens; `path`: for error messages.

    Raises ModelFileError for an invalid value, UnsupportedModelError for an option that is not implemented or if
    `rope_parameters` and `rope_scaling` contradict each other.
    """
    if values.get("rope_parameters") and values.get("rope_scaling"):
        new, old = (
            rope_fields({**values, key: None}, traits, max_position, head_dim, path)
            for key in ("rope_scaling", "rope_parameters")
        )
        if new != old:
            raise UnsupportedModelError(
                f"{path}: rope_scaling and rope_parameters that differ are not implemented: write what applies into "
                "rope_parameters, with rope_theta, and delete rope_scaling, or use the Transformers fallback"
            )
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ModelFileError(f"{path}: rope parameters must be an object (got {short(given)}): correct config.json")
    by_kind, local_key = any(isinstance(value, dict) for value in given.values()), traits.get("local_rope")
    kinds = [given.get(kind) or {} for kind in (FULL, SLIDING)] if by_kind else [given, {}]
    part = kinds[0].get("partial_rotary_factor") if isinstance(kinds[0], dict) else None
    part = values.get("partial_rotary_factor") if part is None else part
    if isinstance(kinds[0], dict) and kinds[0].get("rope_type") == "proportional":
        if fraction(kinds[0], "partial_rotary_factor", 1.0, path) > 1:
            raise ModelFileError(f"{path}: partial_rotary_factor {short(part)} is above 1: correct config.json")
        part = None  # heads are rotated whole, with some frequencies of zero
    is_unknown = (by_kind and local_key is None) or not all(isinstance(kind, dict) for kind in kinds)
    if is_unknown or (part not in (None, 1.0) and not traits.get("partial_rotary")):
        raise UnsupportedModelError(
            f"{path}: partial or per-layer rope is not implemented: use the Transformers fallback"
        )
    fields: dict[str, Any] = {}
    if part not in (None, 1.0):
        part = fraction({"partial_rotary_factor": part}, "partial_rotary_factor", 1.0, path)
        fields["rotary_dim"] = int(head_dim * part)
        if not 2 <= fields["rotary_dim"] <= head_dim or fields["rotary_dim"] % 2:
            raise ModelFileError(f"{path}: {short(part)} of heads of {head_dim} cannot be rotated: correct config.json")
    theta, scaling = _rope(kinds[0], values, traits, max_position, path)
    if scaling and scaling["rope_type"] == "longrope":
        expected = fields.get("rotary_dim", head_dim) // 2
        for key in ("short_factor", "long_factor"):
            if len(scaling[key]) != expected:
                raise ModelFileError(
                    f"{path}: {key} has {len(scaling[key])} numbers, not {expected}: correct config.json"
                )
    fields |= {"rope_theta": theta, "rope_scaling": scaling}
    if local_key is not None:
        own = values if by_kind else {**values, "rope_theta": values.get(local_key)}
        theta, scaling = _rope(kinds[1], own, traits, max_position, path)
        fields |= {"local_rope_theta": theta, "local_rope_scaling": scaling}
    return fields


def _rope(
    given: dict[str, Any], values: dict[str, Any], traits: dict[str, Any], max_position: int, path: Path
) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling for one type of layer; `given` has its own keys."""
    scaling = {key: value for key, value in given.items() if key not in ("type", "rope_theta", "partial_rotary_factor")}
    scaling.setdefault("rope_type", given.get("type", "default"))
    if scaling["rope_type"] == "proportional":
        scaling["partial_rotary_factor"] = given.get("partial_rotary_factor", 1.0)
        scaling.setdefault("factor", 1.0)
    if not isinstance(scaling["rope_type"], str):
        raise ModelFileError(
            f"{path}: rope_type must be a name (got {short(scaling['rope_type'])}): correct config.json"
        )
    scaling["rope_type"] = traits.get("rope_names", {}).get(scaling["rope_type"], scaling["rope_type"])
    if scaling["rope_type"] in ("llama3", "yarn", "longrope"):
        scaling.setdefault(
            "original_max_position_embeddings", values.get("original_max_position_embeddings", max_position)
        )
    if scaling["rope_type"] in ("yarn", "longrope") and scaling.get("factor") is None:
        original = scaling["original_max_position_embeddings"]
        scaling["factor"] = max_position / original if is_whole(original) and original > 0 else None
    check_rope(scaling, path)
    theta = fraction(given if given.get("rope_theta") is not None else values, "rope_theta", 10000.0, path)
    if theta <= 1:
        raise ModelFileError(f"{path}: rope_theta must be larger than 1 (got {theta}): correct config.json")
    return theta, None if scaling["rope_type"] == "default" else scaling


def check_rope(scaling: dict[str, Any], path: Path | str = "config.json") -> None:
    """Check RoPE scaling options. `path`: the config's name in error messages. Raises UnsupportedModelError for an
    unknown type, ModelFileError for an invalid number."""
    rope_type = scaling.get("rope_type", "default")
    if rope_type not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"{path}: rope type {rope_type!r} is not implemented (known: default, linear, llama3, longrope, "
            "proportional, yarn): the Transformers fallback runs such a safetensors folder"
        )
    for key in (*ROPE_KEYS[rope_type], *(key for key in TABLES["rope_optional"] if scaling.get(key) is not None)):
        values: Any = scaling.get(key)
        if key in ROPE_LISTS and not (isinstance(values, (list, tuple)) and values):
            raise ModelFileError(
                f"{path}: rope type {rope_type!r} needs a list of numbers {key!r} (got {short(values)}): correct "
                "config.json"
            )
        for value in values if key in ROPE_LISTS else [values]:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
                raise ModelFileError(
                    f"{path}: rope type {rope_type!r} needs a positive {key!r} (got {short(value)}): correct "
                    "config.json"
                )
