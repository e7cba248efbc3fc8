"""Reads a DFlash drafter from a GGUF file (llama.cpp's architecture `dflash`, DFlash 1 and 2), which `gguf_writer.py`
writes.

    raw, tensors, vocabulary, others = read_gguf(Path("drafter.gguf"))

llama.cpp (src/models/dflash.cpp and conversion/qwen.py, as of 2026) stores the sizes under the usual keys;
`dflash.target_layers`, each one more than z-lab's id, since it names the layer whose input is read;
`dflash.block_size`; `tokenizer.ggml.mask_token_id`; for DFlash 2 `dflash.conv_*` and `dflash.selector_*`; `d2t`, the
target's token for each row of the drafter's own head; and the target's whole tokenizer. The rest has keys that
llama.cpp does not read: `paceline.config`, z-lab's config.json, and `paceline.draft_ids`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.draft.dflash.config import DFlash2Sizes, DFlashConfig
from paceline.draft.vocabulary import Vocabulary, check_ids, split
from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.checkpoint import check_finite
from paceline.model.gguf.container import GGUFFile, is_gguf, open_gguf
from paceline.model.gguf.metadata import decimal, tensor_of

ARCH = "dflash"
CONFIG, DRAFT_IDS = "paceline.config", "paceline.draft_ids"
MASK, TOKENS = "tokenizer.ggml.mask_token_id", "tokenizer.ggml.tokens"
COUNTS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "block_size": "block_size",
}
FRACTIONS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
SECOND = DFlash2Sizes.__slots__
SCALES = {"output_multiplier": "logit_scale", "final_logit_softcapping": "final_logit_softcapping"}
ROPE = {"factor": "factor", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
WHOLE_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "embed_tokens.weight": "token_embd.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
SHAPE_FIELDS = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
SHAPE_FIELDS += ("max_position", "rms_norm_eps", "rope_theta", "rope_scaling", "windows")
OWN_FIELDS = ("block_size", "target_layer_ids", "mask_token_id", "is_causal", *SCALES)
"""Fields of DecoderConfig and of DFlashConfig that llama.cpp's keys express."""
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
"""For tensors of a layer: z-lab's name -> llama.cpp's name after `blk.{i}.`. WHOLE_NAMES has the other tensors."""


def is_gguf_drafter(path: Path) -> bool:
    """True if the file is a GGUF file with a DFlash drafter. Raises ModelFileError for a damaged GGUF file."""
    return is_gguf(path) and open_gguf(path).metadata.get("general.architecture") == ARCH


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], Vocabulary, dict[str, Tensor]]:
    """Reads a DFlash drafter from a GGUF file; dequantises its tensors. Returns (config with z-lab's keys, network
    tensors with z-lab's names, draft vocabulary, unused tensors).

    Raises UnsupportedModelError if the file is not a DFlash drafter, ModelFileError if it is damaged or inconsistent.
    """
    file = open_gguf(path)
    arch = file.get("general.architecture", str)
    if arch != ARCH:
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {arch!r:.60} is no DFlash drafter's, which llama.cpp calls {ARCH!r}: "
            "convert the drafter's folder with paceline export --format gguf, or with llama.cpp's convert_hf_to_gguf.py"
        )
    tensors = {_own_name(name, path): tensor_of(file, stored) for name, stored in file.tensors.items()}
    if "d2t" in tensors:  # the target's tokens: offsets in other formats
        tensors["d2t"] = tensors["d2t"].long() - torch.arange(len(tensors["d2t"]))
    raw, ids = _config(file, tensors), torch.tensor(file.array(DRAFT_IDS, int))
    network, vocabulary, others = split(_narrowed(tensors), path)
    for name, tensor in network.items():
        check_finite(name, tensor, path)
    if len(ids):
        vocabulary = Vocabulary(check_ids(ids, f"{path}: {DRAFT_IDS}", "export the drafter again"))
    return raw, network, vocabulary, others


def _own_name(name: str, path: Path) -> str:
    whole = next((own for own, gguf_name in WHOLE_NAMES.items() if gguf_name == name), None)
    head, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    own = next((own for own, gguf_name in LAYER_NAMES.items() if gguf_name == inner), None) if head == "blk" else None
    if whole or (own and number.isdecimal()):
        return whole or f"layers.{number}.{own}"
    raise UnsupportedModelError(
        f"{path}: tensor {name!r:.80} is of no DFlash drafter that is implemented: give the drafter's folder, if "
        "there is one"
    )


def _narrowed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert norms and kernels, float32 in GGUF files, to the dtype of the matrices if that loses nothing."""
    dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.float32
    return {
        name: tensor.to(dtype)
        if tensor.dtype == torch.float32 and tensor.dim() != 2 and torch.equal(tensor.to(dtype).float(), tensor)
        else tensor
        for name, tensor in tensors.items()
    }


def _config(file: GGUFFile, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The config.json stored by our export, else one converted from llama.cpp's keys. Raises ModelFileError if both
    exist and differ in a value that both can express, as after an edit."""
    converted = _z_lab_config(file, tensors)
    exported = file.get(CONFIG, str)
    if exported is None:
        return converted
    try:
        raw = json.loads(exported)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file.path}: GGUF key {CONFIG} is no JSON: export the drafter again") from error
    if not isinstance(raw, dict):
        raise ModelFileError(f"{file.path}: GGUF key {CONFIG} is no object: export the drafter again")
    native, own = (_values_of(DFlashConfig.from_json(each, file.path)) for each in (converted, raw))
    for name, value in native.items():
        if value != own.get(name):
            raise ModelFileError(
                f"{file.path}: {name} is {value} in llama.cpp's keys and {own.get(name)} in {CONFIG}: export the "
                "drafter again, or take that key out of the file"
            )
    return raw


def _values_of(config: DFlashConfig) -> dict[str, Any]:
    """The values of a drafter's config that llama.cpp's keys express, by field; fractions are rounded to float32."""
    values = {name: getattr(config.shape, name) for name in SHAPE_FIELDS}
    values |= {name: getattr(config, name) for name in OWN_FIELDS} | (asdict(config.second) if config.second else {})
    values["rope_scaling"] = {key: value for key, value in (values["rope_scaling"] or {}).items() if value is not None}
    return json.loads(json.dumps(values), parse_float=lambda text: decimal(float(text)))


def _z_lab_config(file: GGUFFile, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """z-lab's config.json from llama.cpp's keys; missing keys are left to the config parser's defaults and errors."""

    def key(name: str) -> str:
        return f"{ARCH}.{name}"

    config: dict[str, Any] = {name: file.get(key(gguf_key), int) for name, gguf_key in COUNTS.items()}
    config |= {name: decimal(file.get(key(gguf_key), float)) for name, gguf_key in (FRACTIONS | SCALES).items()}
    layers = [layer - 1 for layer in file.array(key("target_layers"), int)]
    if not layers:
        raise ModelFileError(
            f"{file.path} has no {key('target_layers')}, which a drafter's file needs: convert it again"
        )
    if min(layers) < 0:
        raise ModelFileError(
            f"{file.path}: {key('target_layers')} counts from 1, and holds {min(layers) + 1}: convert it again"
        )
    mask = file.get(MASK, int)
    nested = {
        "target_layer_ids": layers,
        "mask_token_id": file.get(key("mask_token_id"), int) if mask is None else mask,
    }
    second = "candidate_selector.hidden_projection.weight" in tensors
    if second:
        nested |= {name: file.get(key(name), int) for name in SECOND}
    config["architectures"] = ["DFlash2DraftModel" if second else "DFlashDraftModel"]
    config["vocab_size"] = file.length(TOKENS) or file.get(key("vocab_size"), int)
    window = file.get(key("attention.sliding_window"), int)
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        if kinds := file.array(key("attention.sliding_window_pattern"), bool):
            config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in kinds]
    if file.get(key("rope.scaling.type"), str) not in (None, "none"):
        config["rope_scaling"] = _rope_scaling(file, key("rope.scaling"))
    present = {name: value for name, value in config.items() if value is not None}
    present_nested = {name: value for name, value in nested.items() if value is not None}
    return {
        **present,
        "model_type": "qwen3",
        "is_causal": bool(file.get(key("attention.causal"), bool)),
        "dflash_config": present_nested,
    }


def _rope_scaling(file: GGUFFile, prefix: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {name: file.get(f"{prefix}.{gguf_key}", float) for name, gguf_key in ROPE.items()}
    scaling["original_max_position_embeddings"] = file.get(f"{prefix}.original_context_length", int)
    present = {name: value for name, value in scaling.items() if value is not None}
    return {"rope_type": file.get(f"{prefix}.type", str), **present}
