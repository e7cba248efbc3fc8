"""GGUF files as models: metadata to DecoderConfig, quantised blocks to float32 tensors under their Hugging Face names.

`gguf_file.py` reads the header, the `gguf` package knows the blocks; ours are the names and the row order of Llama's rope.
Called by `checkpoint.py`; the vocabulary is read by `gguf_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.blocks import BlockKind, Blocks, Weight
from paceline.model.config import LARGEST, MAX_SIZE, DecoderConfig
from paceline.model.gguf_file import GGUFFile, StoredTensor, open_gguf
from paceline.model.rope import check_rope

ARCHITECTURES = ("llama", "qwen2", "qwen3")
BLOCK_KINDS: dict[Quant, BlockKind] = {Quant.Q8_0: "Q8_0", Quant.Q4_1: "Q4_1"}
QUANTS = (Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q4_K, Quant.Q6_K)

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def load_config(path: Path) -> DecoderConfig:
    """The model's shape from GGUF metadata. Raises UnsupportedModelError or ModelFileError, naming the key."""
    file = open_gguf(path)
    arch = file.get("general.architecture", str)
    if arch not in ARCHITECTURES or file.get(f"{arch}.expert_count", int):
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {arch!r:.80}{'' if arch not in ARCHITECTURES else ' with experts'} is not implemented "
            f"(known: {', '.join(ARCHITECTURES)}): the Transformers fallback runs the model from its safetensors folder"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or "blk.0.attn_q.weight" not in file.tensors:
        raise ModelFileError(
            f"{path} holds no token_embd.weight or no layers: fetch the model's own file, not its vocabulary or a part of it"
        )
    num_layers = _count(file, f"{arch}.block_count")
    if f"blk.{num_layers - 1}.attn_q.weight" not in file.tensors:
        raise ModelFileError(f"{path} has not the {num_layers} layers of its {arch}.block_count: fetch the whole model again")
    hidden_size, num_heads = _count(file, f"{arch}.embedding_length"), _count(file, f"{arch}.attention.head_count")
    max_position, window = _count(file, f"{arch}.context_length"), file.get(f"{arch}.attention.sliding_window", int)
    head_dim = _count(file, f"{arch}.rope.dimension_count", hidden_size // num_heads)
    config = DecoderConfig(
        family=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_count(file, f"{arch}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_count(file, f"{arch}.attention.head_count_kv", num_heads),
        head_dim=_count(file, f"{arch}.attention.key_length", head_dim),
        max_position=max_position,
        rms_norm_eps=_number(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=_number(file, f"{arch}.rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(file, arch, max_position),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        windows=(window,) * num_layers if window else (),
    )
    config.check_heads(path)
    return config


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(key, int)
    value = default if value is None else value
    if value is None or not 0 < value <= MAX_SIZE:
        raise ModelFileError(f"{file.path}: GGUF key {key} must be a positive number (got {value!r}): fetch the model again")
    return value


def _number(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A positive number, as the decimal its float32 was written as: 1e-05, not 9.999999747378752e-06."""
    value = file.get(key, float)
    value = default if value is None else value
    if value is None or not 0 < value < LARGEST:
        raise ModelFileError(f"{file.path}: GGUF key {key} must be a positive number (got {value!r}): fetch the model again")
    return float(np.format_float_scientific(np.float32(value)))


@overload
def load_tensors(path: Path) -> Iterator[tuple[str, Tensor]]: ...
@overload
def load_tensors(path: Path, keep_blocks: bool) -> Iterator[tuple[str, Weight]]: ...
def load_tensors(path: Path, keep_blocks: bool = False) -> Iterator[tuple[str, Weight]]:
    """(Hugging Face name, float32 tensor), one at a time, in the file's order.

    With `keep_blocks` matrices in Q8_0 and Q4_1 stay as they are; other quantisations are expanded all the same.
    """
    file = open_gguf(path)
    arch = file.get("general.architecture", str)
    num_heads = _count(file, f"{arch}.attention.head_count")
    permuted = {"q_proj": num_heads, "k_proj": _count(file, f"{arch}.attention.head_count_kv", num_heads)}
    for stored in file.tensors.values():
        if stored.name == ROPE_FACTORS:
            continue
        name = _hf_name(stored.name, path)
        is_kept = keep_blocks and len(stored.shape) == 2 and stored.kind in BLOCK_KINDS
        tensor = _blocks(file, stored) if is_kept else _dequantise(file, stored)
        heads = permuted.get(name.split(".")[-2]) if arch == "llama" else None
        if heads is not None:
            if tensor.shape[0] % (2 * heads):
                raise ModelFileError(f"{path}: the rows of {stored.name!r} are no {heads} heads: fetch the model again")
            tensor = half_split_rows(tensor, heads)
        yield name, tensor


def half_split_rows(tensor: Weight, num_heads: int) -> Weight:
    """Undo convert_hf_to_gguf's `permute`: in a head, ggml's rope pairs neighbouring rows, Hugging Face's the two halves."""
    if isinstance(tensor, Blocks):
        return replace(tensor, data=_half_split(tensor.data, num_heads))
    return _half_split(tensor, num_heads)


def _half_split(tensor: Tensor, num_heads: int) -> Tensor:
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()


def _hf_name(name: str, path: Path) -> str:
    base, _, kind = name.rpartition(".")
    if base in NAMES:
        return f"{NAMES[base]}.{kind}"
    parts = base.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{kind}"
    raise UnsupportedModelError(
        f"{path}: tensor {name!r} belongs to no model we know: use the model's safetensors folder instead"
    )


def _dequantise(file: GGUFFile, stored: StoredTensor) -> Tensor:
    if stored.kind not in QUANTS:
        raise UnsupportedModelError(
            f"{file.path}: quantisation {stored.kind.name} of {stored.name!r} is not implemented "
            f"(known: {', '.join(quant.name for quant in QUANTS)}): fetch the model in one of these"
        )
    return torch.from_numpy(gguf.dequantize(file.read(stored), stored.kind)).reshape(stored.shape)


def _blocks(file: GGUFFile, stored: StoredTensor) -> Blocks:
    return Blocks(torch.from_numpy(file.read(stored)), stored.shape, BLOCK_KINDS[stored.kind])


def _rope_scaling(file: GGUFFile, arch: str, max_position: int) -> dict[str, Any] | None:
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is not None:
        scaling: dict[str, Any] = {"rope_type": "factors", "factors": _dequantise(file, factors).flatten().tolist()}
    else:
        prefix = f"{arch}.rope.scaling"
        scaling = {"rope_type": file.get(f"{prefix}.type", str) or "none", "factor": file.get(f"{prefix}.factor", float)}
        if scaling["rope_type"] in ("none", "default"):
            return None
        if scaling["rope_type"] == "yarn":
            context = file.get(f"{prefix}.original_context_length", int)
            scaling["original_max_position_embeddings"] = max_position if context is None else context
            scaling |= {key: file.get(f"{prefix}.yarn_{key}", float) for key in ("beta_fast", "beta_slow")}
    check_rope(scaling)
    return scaling
