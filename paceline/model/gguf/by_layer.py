"""GGUF files whose layers differ, in their attention (sliding windows) or in their sizes (Gemma 4): values by layer
become keys of config.json. The metadata keys are those of llama.cpp's converter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.layers import FULL, SLIDING
from paceline.model.gguf.container import GGUFFile

PATTERN, LISTED = "attention.sliding_window_pattern", ("attention.head_count_kv", "feed_forward_length")
"""Keys of lists with a value for each layer; those of LISTED may hold one number."""


def first_of_lists(file: GGUFFile, arch: str, *, may_differ: bool) -> GGUFFile:
    """Return a copy of `file` whose metadata has one number of key heads and one MLP width for the whole model. Where
    the metadata lists a number per layer, the first layer's number replaces the list.

    `arch`: llama.cpp's name of the model family. `may_differ`: accept lists with different numbers; otherwise such a
    list raises UnsupportedModelError.
    """
    firsts = dict[str, int]()
    for key in (f"{arch}.{key}" for key in LISTED):
        if numbers := _numbers(file, key):
            firsts[key] = numbers[0]
        if len(set(numbers)) > 1 and not may_differ:
            raise UnsupportedModelError(
                f"{file.path}: GGUF key {key} with different numbers by layer is not implemented for {arch}: use the "
                "model's safetensors folder"
            )
    return replace(file, metadata=file.metadata | firsts)


def _numbers(file: GGUFFile, key: str) -> list[int]:
    """Numbers by layer; a single number gives a list of one."""
    return file.array(key, int) if file.length(key) else [number for number in [file.get(key, int)] if number]


def window_keys(file: GGUFFile, arch: str, rule: str | int | None) -> dict[str, Any]:
    """Build the keys of config.json that state which layers have a sliding window.

    `arch`: llama.cpp's name of the model family. `rule`: which layers of this family have a window, from `windows` in
    families.json, such as "all" or 6 (all layers except every sixth); None if paceline supports no windows for this
    family. Raises UnsupportedModelError if the file has windows that do not fit the rule.
    """
    window, key = file.get(f"{arch}.attention.sliding_window", int) or None, f"{arch}.{PATTERN}"
    slides = file.array(key, bool) if window and file.length(key) else []
    every = file.get(key, int) if window and not slides else None
    is_other = (every is not None and not isinstance(rule, int)) or (rule == "all" and not all(slides))
    if window and (rule is None or is_other):
        raise UnsupportedModelError(
            f"{file.path}: GGUF key {arch}.attention.sliding_window, with {PATTERN} {every or slides or 'missing'}, is "
            f"not implemented for this {arch} model: use the model's safetensors folder"
        )
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
        "sliding_window_pattern": every,
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in slides] or None,
    }


def keys_by_layer(file: GGUFFile, arch: str, divisors: str) -> dict[str, Any]:
    """Build the keys of config.json that describe layers of different sizes (Gemma 4).

    `arch`: llama.cpp's name of the model family. `divisors`: name of a tensor in the file, which contains a divisor for
    each RoPE frequency of the layers with full attention. Raises ModelFileError or UnsupportedModelError, naming the
    metadata key or the tensor.
    """
    num_layers, slides = file.get(f"{arch}.block_count", int) or 0, file.array(f"{arch}.{PATTERN}", bool)
    kv_heads, inner = (_numbers(file, f"{arch}.{key}") for key in LISTED)
    kv_heads, inner = (each * num_layers if len(each) == 1 else each for each in (kv_heads, inner))
    for key, values in zip((PATTERN, *LISTED), (slides, kv_heads, inner), strict=True):
        if len(values) != num_layers:
            raise ModelFileError(
                f"{file.path}: GGUF key {arch}.{key} must have a value for each of {num_layers} layers: fetch it again"
            )
    full = [layer for layer, is_sliding in enumerate(slides) if not is_sliding]
    table, head_dim = file.tensors.get("per_layer_token_embd.weight"), file.get(f"{arch}.attention.key_length", int)
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
        "rope_parameters": {
            FULL: {"rope_theta": file.get(f"{arch}.rope.freq_base", float), **_rotated(file, arch, divisors)},
            SLIDING: {"rope_theta": file.get(f"{arch}.rope.freq_base_swa", float) or 10000.0},
        },
        "rope_scaling": None,
    }


def _rotated(file: GGUFFile, arch: str, name: str) -> dict[str, Any]:
    """RoPE's type, and the part of a head that it rotates: where frequencies are divided by 1 instead of 1e30."""
    stored = file.tensors.get(name)
    if stored is None:
        return {"rope_type": "default"}
    divisors = file.read(stored).view("<f4").ravel() if stored.kind.name == "F32" else np.zeros(1)
    rotated = int((divisors == 1).sum())
    if not rotated or not (divisors[:rotated] == 1).all() or not (divisors[rotated:] > 1e20).all():
        raise UnsupportedModelError(
            f"{file.path}: {name} with other numbers than 1 and 1e30 is not implemented for {arch}: use the model's "
            "safetensors folder"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
