"""Types of layers in config.json, and the options of models whose layers differ in their sizes (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.values import short, whole

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Layer types that config.json lists under `layer_types`."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Options of a model whose layers differ in their sizes (Gemma 4).

    Its layers also apply an RMSNorm without weights to values, and multiply their output by a learned scalar.
    """

    full_head_dim: int
    """Size of a head in layers with full attention; in those with a sliding window it is `DecoderConfig.head_dim`."""
    full_kv_heads: int
    """Number of key heads in layers with full attention."""
    has_key_values: bool
    """True if layers with full attention have no value projection: values are the keys before norm and RoPE."""
    sources: tuple[int, ...]
    """For each layer, the index of the layer whose keys and values it reads: its own index, or that of an earlier layer
    of the same type (full attention or sliding window)."""
    has_wide_mlps: bool
    """True if the MLP is twice as wide in layers that read the keys and values of an earlier layer."""
    input_size: int
    """Width of the per-layer embedding that every layer adds to the residual stream; 0: none."""
    input_vocab: int
    """Number of rows of the table of per-layer embeddings."""


def layer_sizes_of(values: dict[str, Any], windows: tuple[int | None, ...], path: Path) -> LayerSizes:
    """Read the options of a model whose layers differ in their sizes. `values`: content of config.json with the
    family's defaults; `windows`: sliding window of each layer. Raises ModelFileError or UnsupportedModelError, naming
    `path`."""
    num_layers = values["num_hidden_layers"]
    whole(values, "sliding_window", path)
    is_full = [window is None for window in windows] or [True] * num_layers
    head_dim, kv_heads = _full_heads(values, is_full, path)
    num_heads = values["num_attention_heads"]
    input_size = whole(values, "hidden_size_per_layer_input", path, 0, least=0)
    if num_heads % kv_heads or head_dim % 2:
        raise ModelFileError(
            f"{path}: {num_heads} heads of {head_dim} over {kv_heads} key heads of layers with full attention do not "
            "divide evenly: correct the config, or fetch the model again"
        )
    input_vocab = whole(values, "vocab_size_per_layer_input", path)
    if input_size and input_vocab < values["vocab_size"]:
        raise ModelFileError(
            f"{path}: vocab_size_per_layer_input {input_vocab} is smaller than vocab_size {values['vocab_size']}: "
            "correct config.json"
        )
    return LayerSizes(
        full_head_dim=head_dim,
        full_kv_heads=kv_heads,
        has_key_values=values.get("attention_k_eq_v") is True,
        sources=_sources(is_full, whole(values, "num_kv_shared_layers", path, 0, least=0), path),
        has_wide_mlps=values.get("use_double_wide_mlp") is True,
        input_size=input_size,
        input_vocab=input_vocab,
    )


def _full_heads(values: dict[str, Any], is_full: list[bool], path: Path) -> tuple[int, int]:
    """(head size, number of key heads) of layers with full attention, from `per_layer_config` (Transformers 5) or from
    keys for these layers, as in files on the hub."""
    given, kv_heads = values.get("per_layer_config"), whole(values, "num_key_value_heads", path)
    if given is None:
        has_own = values.get("attention_k_eq_v") is True
        own = whole(values, "num_global_key_value_heads", path, kv_heads) if has_own else kv_heads
        return whole(values, "global_head_dim", path), own
    full = [layer for layer, own in enumerate(is_full) if own]
    changed: Any = next(iter(given.values()), {}) if isinstance(given, dict) else None
    known = isinstance(changed, dict) and changed.keys() <= {"head_dim", "num_key_value_heads"}
    if not known or any(each != changed for each in given.values()) or _numbers(given) not in ([], full):
        raise UnsupportedModelError(
            f"{path}: per_layer_config {short(given)} is not implemented: use the Transformers fallback"
        )
    head_dim = whole(values, "head_dim", path)
    return whole(changed, "head_dim", path, head_dim), whole(changed, "num_key_value_heads", path, kv_heads)


def _numbers(given: dict[str, Any]) -> list[int]:
    return sorted(int(key) if key.isdecimal() else -1 for key in given)


def _sources(is_full: list[bool], num_shared: int, path: Path) -> tuple[int, ...]:
    """Value of `LayerSizes.sources`: the last `num_shared` layers read those of the last layer of their type before."""
    first = len(is_full) - num_shared
    last = {kind: layer for layer, kind in enumerate(is_full[: max(first, 0)])}
    if not set(is_full) <= last.keys():
        raise ModelFileError(
            f"{path}: num_kv_shared_layers {num_shared} leaves no layer of each type with keys and values of its own: "
            "correct config.json"
        )
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(is_full))
