"""GGUF files as models: metadata to what config.json says, quantised blocks to float32 tensors under their Hugging Face names.

`gguf_file.py` reads the header, the `gguf` package knows the blocks; ours are the names and the row order of Llama's rope.
Called by `checkpoint.py`; the vocabulary is read by `gguf_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.blocks import BlockKind, Blocks, Weight
from paceline.model.config import MAX_SIZE
from paceline.model.gguf_file import GGUFFile, StoredTensor, open_gguf

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


def config_json(path: Path) -> dict[str, Any]:
    """What the config.json of the same model says. Raises UnsupportedModelError or ModelFileError, naming the key."""
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
    window = file.get(f"{arch}.attention.sliding_window", int) or None
    family = "mistral" if window and arch == "llama" else arch
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": _count(file, f"{arch}.embedding_length"),
        "intermediate_size": _count(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": _count(file, f"{arch}.attention.head_count"),
        "num_key_value_heads": _count(file, f"{arch}.attention.head_count_kv", f"{arch}.attention.head_count"),
        "head_dim": file.get(f"{arch}.attention.key_length", int) or file.get(f"{arch}.rope.dimension_count", int),
        "hidden_act": "silu",
        "max_position_embeddings": _count(file, f"{arch}.context_length"),
        "rms_norm_eps": _decimal(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(file.get(f"{arch}.rope.freq_base", float)),
        "rope_scaling": _rope_scaling(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
    }


def _count(file: GGUFFile, *keys: str) -> int:
    """The first of these keys that the file has."""
    value = next((value for key in keys if (value := file.get(key, int)) is not None), None)
    if value is None or not 0 < value <= MAX_SIZE:
        raise ModelFileError(
            f"{file.path}: GGUF key {keys[0]} must be a positive number (got {value!r}): fetch the model again"
        )
    return value


def _decimal(value: float | None) -> float | None:
    """A float32 as the decimal it was written as: 1e-05, not 9.999999747378752e-06."""
    return None if value is None else float(np.format_float_scientific(np.float32(value)))


def load_tensors(path: Path, keep_blocks: bool = False) -> Iterator[tuple[str, Weight]]:
    """(Hugging Face name, float32 tensor), one at a time, in the file's order.

    With `keep_blocks` matrices in Q8_0 and Q4_1 stay as they are; other quantisations are expanded all the same.
    """
    file = open_gguf(path)
    arch = file.get("general.architecture", str)
    heads_key = f"{arch}.attention.head_count"
    permuted = {"q_proj": _count(file, heads_key), "k_proj": _count(file, f"{heads_key}_kv", heads_key)}
    for stored in file.tensors.values():
        if stored.name == ROPE_FACTORS:
            continue
        name = _hf_name(stored.name, path)
        is_kept = keep_blocks and len(stored.shape) == 2 and stored.kind in BLOCK_KINDS
        if is_kept:
            tensor = Blocks(torch.from_numpy(file.read(stored)), stored.shape, BLOCK_KINDS[stored.kind])
        else:
            tensor = _dequantise(file, stored)
        heads = permuted.get(name.split(".")[-2]) if arch == "llama" else None
        if heads is not None:
            if tensor.shape[0] % (2 * heads):
                raise ModelFileError(f"{path}: the rows of {stored.name!r} are no {heads} heads: fetch the model again")
            tensor = half_split_rows(tensor, heads)
        yield name, tensor


def half_split_rows(tensor: Weight, num_heads: int) -> Weight:
    """Undo convert_hf_to_gguf's `permute`: in a head, ggml's rope pairs neighbouring rows, Hugging Face's the two halves."""
    if isinstance(tensor, Blocks):
        return replace(tensor, data=half_split_rows(tensor.data, num_heads))
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


def _rope_scaling(file: GGUFFile, arch: str) -> dict[str, Any] | None:
    factors, prefix = file.tensors.get(ROPE_FACTORS), f"{arch}.rope.scaling"
    if factors is not None:
        return {"rope_type": "factors", "factors": _dequantise(file, factors).flatten().tolist()}
    rope_type = file.get(f"{prefix}.type", str)
    if rope_type in (None, "none"):
        return None
    scaling = {
        "factor": file.get(f"{prefix}.factor", float),
        "original_max_position_embeddings": file.get(f"{prefix}.original_context_length", int),
        "beta_fast": file.get(f"{prefix}.yarn_beta_fast", float),
        "beta_slow": file.get(f"{prefix}.yarn_beta_slow", float),
    }
    return {"rope_type": rope_type} | {key: value for key, value in scaling.items() if value is not None}
