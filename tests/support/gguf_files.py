"""GGUF files of Transformers models, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant

from paceline.model.gguf import metadata as our_gguf
from paceline.model.gguf.package import finish

GGUF_NAMES = {hf: ours for ours, hf in our_gguf.LAYER_NAMES.items()}


def gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    top = {hf: ours for ours, hf in our_gguf.NAMES.items()}
    if base in top:
        return f"{top[base]}.{kind}"
    _, _, index, rest = base.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def add_sizes(writer: gguf.GGUFWriter, config: Any) -> int:
    """Write the size keys that all families have; returns the head size, which some leave out."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_gguf(path: Path, model: Any, arch: str, quant: Quant | dict[str, Quant] = Quant.F32, **metadata: Any) -> None:
    """What convert_hf_to_gguf writes for a Transformers model, without its vocabulary; matrices by what their names
    hold."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_key_length(add_sizes(writer, config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in metadata.items():
        getattr(writer, key)(value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = permute(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        wanted = (
            [kind for part, kind in quant.items() if part in name] or [Quant.F32]
            if isinstance(quant, dict)
            else [quant]
        )
        kind = Quant.F32 if values.ndim == 1 else wanted[0]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    finish(writer)


def byte_level_vocabulary(num_tokens: int, specials: tuple[str, ...] = (), seed: int = 0) -> dict[str, Any]:
    """Metadata of a byte-level BPE vocabulary as large as a real one's: bytes, words merged of them, special tokens
    last."""
    from tokenizers import pre_tokenizers

    rng, tokens, merges = random.Random(seed), sorted(pre_tokenizers.ByteLevel.alphabet()), []
    known = set(tokens)
    while len(tokens) + len(specials) < num_tokens:
        left, right = rng.choice(tokens), rng.choice(tokens)
        if len(left + right) < 12 and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    return {
        "add_tokenizer_model": "gpt2",
        "add_tokenizer_pre": "qwen2",
        "add_token_list": [*tokens, *specials],
        "add_token_types": [1] * len(tokens) + [3] * len(specials),
        "add_token_merges": merges,
    }
