"""GGUF files of models whose layers differ in their sizes (Gemma 4): lists of numbers become keys of config.json.

The keys are those that llama.cpp's converter writes; `metadata.py` reads the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.layers import FULL, SLIDING
from paceline.model.gguf.container import GGUFFile

LISTED = ("attention.head_count_kv", "feed_forward_length")
"""Keys that hold one number, or a list with one for each layer."""
UNROTATED = 1e20
"""A divisor of a frequency from this number on means that it does not rotate."""


def first_of_lists(file: GGUFFile, arch: str) -> GGUFFile:
    """Return the file with the first number in place of each list of numbers by layer."""
    changed = {f"{arch}.{key}": by_layer(file, f"{arch}.{key}")[:1] for key in LISTED}
    return replace(file, metadata=file.metadata | {key: values[0] for key, values in changed.items() if values})


def by_layer(file: GGUFFile, key: str) -> list[int]:
    """Read a list of numbers by layer; a single number gives a list of it alone, a missing key []."""
    if file.length(key):
        return file.array(key, int)
    value = file.get(key, int)
    return [] if value is None else [value]


def keys_by_layer(file: GGUFFile, arch: str, divisors: str) -> dict[str, Any]:
    """Build the keys of config.json that describe layers. `divisors`: name of the tensor with divisors of the
    frequencies in layers with full attention. Raises ModelFileError or UnsupportedModelError, naming the metadata
    key."""
    num_layers = file.get(f"{arch}.block_count", int) or 0
    slides = file.array(f"{arch}.attention.sliding_window_pattern", bool)
    kv_heads, inner = (by_layer(file, f"{arch}.{key}") for key in LISTED)
    for key, values in (("attention.sliding_window_pattern", slides), (LISTED[0], kv_heads), (LISTED[1], inner)):
        if len(values) not in (num_layers, 1) or (key not in LISTED and len(values) != num_layers):
            raise ModelFileError(
                f"{file.path}: GGUF key {arch}.{key} must have a value for each of {num_layers} layers: fetch the "
                "model again"
            )
    kv_heads, inner = (values * num_layers if len(values) == 1 else values for values in (kv_heads, inner))
    full = [layer for layer, is_sliding in enumerate(slides) if not is_sliding]
    table = file.tensors.get("per_layer_token_embd.weight")
    head_dim = file.get(f"{arch}.attention.key_length", int)
    return {
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides],
        "head_dim": file.get(f"{arch}.attention.key_length_swa", int),
        "num_key_value_heads": next((kv_heads[layer] for layer, own in enumerate(slides) if own), kv_heads[0]),
        "per_layer_config": {
            str(layer): {"head_dim": head_dim, "num_key_value_heads": kv_heads[layer]} for layer in full
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in file.tensors for layer in full[:1]),
        "num_kv_shared_layers": file.get(f"{arch}.attention.shared_kv_layers", int) or 0,
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": file.get(f"{arch}.embedding_length_per_layer_input", int) or 0,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "rope_parameters": _ropes(file, arch, divisors),
        "rope_scaling": None,
    }


def _ropes(file: GGUFFile, arch: str, name: str) -> dict[str, Any]:
    stored = file.tensors.get(name)
    main, local = (file.get(f"{arch}.rope.{key}", float) for key in ("freq_base", "freq_base_swa"))
    full: dict[str, Any] = {"rope_type": "default"}
    if stored is not None:
        divisors = file.read(stored).view("<f4").ravel() if stored.kind.name == "F32" else np.zeros(1)
        rotated = int((divisors == 1).sum())
        if not rotated or not (divisors[:rotated] == 1).all() or not (divisors[rotated:] >= UNROTATED).all():
            raise UnsupportedModelError(
                f"{file.path}: {name} with other numbers than 1 and 1e30 is not implemented for {arch}: use "
                "the model's safetensors folder"
            )
        full = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
    return {
        FULL: full | ({} if main is None else {"rope_theta": main}),
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0 if local is None else local},
    }
