"""Reads a model's sizes from the header of a GGUF file: the keys of a config.json, and the mean bytes per weight.

The parser is imported only for a GGUF file: it needs NumPy and the `gguf` package, which other predictions do not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError, reraised

if TYPE_CHECKING:
    from paceline.model.gguf.container import GGUFFile

SIZES = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""llama.cpp's name of a model family -> its name in Transformers, where they differ."""


def read_header(path: Path) -> tuple[dict[str, Any], float]:
    """Reads the header of a GGUF file, or of all parts of a split one. Returns (keys of the model's config.json, mean
    bytes per weight over all tensors). Raises ModelFileError if a file is damaged or incomplete, UnsupportedModelError
    if it does not describe a known model."""
    from paceline.model.gguf.container import open_gguf

    file = open_gguf(path)
    with reraised(UnsupportedModelError, f"{path} lacks a part of a model", "give the model's config.json", KeyError):
        config = _config(file)
    stored = file.tensors.values()
    return config, sum(each.num_bytes for each in stored) / sum(math.prod(each.shape) for each in stored)


def _config(file: GGUFFile) -> dict[str, Any]:
    metadata, tensors = file.metadata, file.tensors
    arch = metadata["general.architecture"]
    if arch == "gemma4":
        raise UnsupportedModelError(
            "GGUF headers of Gemma 4, whose layers differ, are not read: give the model's config.json"
        )
    sizes = {name: metadata.get(f"{arch}.{key}") for name, key in SIZES.items()}
    config = {name: value for name, value in sizes.items() if isinstance(value, int) and value}
    vocab_size = tensors["token_embd.weight"].shape[0]
    config |= {"vocab_size": vocab_size, "tie_word_embeddings": "output.weight" not in tensors}
    return {"model_type": FAMILIES.get(arch, arch), **config}
