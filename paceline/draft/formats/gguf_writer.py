"""Writes a DFlash drafter as a GGUF file for llama.cpp (`--spec-type draft-dflash -md FILE`); `--drafter FILE` reads it
too.

    left_out = write_gguf(read_stored(folder), Path("drafter.gguf"), head_rows=rows, target=Path("target.gguf"))

`gguf_reader.py` lists keys and names. Rejects settings that llama.cpp would silently ignore.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.draft.dflash.checkpoint import StoredDrafter
from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.formats.gguf_reader import (
    ARCH,
    CONFIG,
    COUNTS,
    DRAFT_IDS,
    FRACTIONS,
    LAYER_NAMES,
    MASK,
    ROPE,
    SCALES,
    SECOND,
    TOKENS,
    WHOLE_NAMES,
)
from paceline.errors import ConfigError, UnsupportedModelError, refuse
from paceline.model.config.values import TABLES
from paceline.model.gguf.package import copy_keys, finish, gguf_package
from paceline.runs.folder import whole_file

if TYPE_CHECKING:
    import gguf

STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
"""Data types that are stored unchanged, with their names in ggml."""
YARN = {"rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"}
CAUSAL = "layers in which a position attends only to earlier ones: llama.cpp's attend to their whole block"


def write_gguf(
    stored: StoredDrafter,
    file: Path,
    *,
    head_rows: Callable[[Tensor], Tensor] | None = None,
    target: Path | None = None,
) -> list[str]:
    """Writes the drafter as one GGUF file. Returns a text for each part that was left out, or that only paceline reads.

    `target`: the target's GGUF file, whose tokenizer is copied; without it llama.cpp does not load the drafter.
    `head_rows`: function (token ids) -> these rows of the target's LM head. Only a DFlash v1 drafter with a draft
    vocabulary but no head of its own needs it; without it, llama.cpp drafts over all tokens.

    Raises UnsupportedModelError for a setting that llama.cpp cannot express, ConfigError for a target of another
    vocabulary, CacheError if the file cannot be written.
    """
    config, (ids, head_VD), notes = stored.config, stored.vocabulary, list[str]()
    _check_sayable(config, stored.tensors)
    tensors = dict(stored.tensors)
    if ids is not None and head_VD is None and head_rows is not None and config.second is None:
        head_VD = head_rows(ids).to(tensors["fc.weight"].dtype)
    if head_VD is not None:
        tensors["lm_head.weight"] = head_VD
        if ids is not None:
            tensors["d2t"] = ids
    elif ids is not None:
        remedy = "" if config.second else "; --model gives it the head's rows"
        notes.append(f"the draft vocabulary of {len(ids)} tokens, for llama.cpp, which drafts among all tokens{remedy}")
    notes += [f"{name}: the target's own is used" for name in stored.others]
    if config.second is None and (config.output_multiplier, config.final_logit_softcapping) != (1.0, 0.0):
        notes.append(
            "output_multiplier and final_logit_softcapping, which llama.cpp reads of DFlash 2 alone; the best stay "
            "the best"
        )
    with whole_file(file, "free space or choose another file") as scratch:
        writer = gguf_package().GGUFWriter(scratch, ARCH)
        _add_config(writer, config)
        if ids is not None and "d2t" not in tensors:
            writer.add_array(DRAFT_IDS, ids.tolist())
        notes += _add_tokenizer(writer, config, target)
        for name, tensor in tensors.items():
            _add_tensor(writer, _their_name(name), tensor)
        finish(writer)
    return notes


def _check_sayable(config: DFlashConfig, tensors: dict[str, Tensor]) -> None:
    """Raises UnsupportedModelError for a setting or tensor that llama.cpp cannot express."""
    shape = config.shape
    scaling = shape.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    without_name = [name for name in tensors if _their_name(name) == ""]
    unsayable = {
        CAUSAL: any(config.is_causal),
        "sample_from_anchor": config.from_anchor,
        "input_embedding_scale": config.input_embedding_scale != 1.0,
        f"rope_scaling {kind}": kind not in ("default", "linear", "yarn")
        or bool(kind != "default" and set(scaling) - YARN),
        f"the tensor {next(iter(without_name), '')}": bool(without_name),
    }
    text = f"llama.cpp's {ARCH} has no place for {{}}: use another format"
    refuse(UnsupportedModelError, *((is_so, text.format(what)) for what, is_so in unsayable.items()))


def _their_name(name: str) -> str:
    """llama.cpp's name of a tensor, or "" without one."""
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    _, _, rest = name.partition("layers.")
    number, _, inner = rest.partition(".")
    return f"blk.{number}.{LAYER_NAMES[inner]}" if inner in LAYER_NAMES else ""


def _add_config(writer: gguf.GGUFWriter, config: DFlashConfig) -> None:
    shape, values = config.shape, {**config.raw, **(config.raw.get("dflash_config") or {})}
    sizes = {key: getattr(shape, field) for field, key in TABLES["sizes"].items()}
    sizes |= {"num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "block_size": config.block_size}
    writer.add_type("model")
    writer.add_name("DFlash 2 drafter" if config.second else "DFlash drafter")
    for name, gguf_key in COUNTS.items():
        writer.add_uint32(f"{ARCH}.{gguf_key}", sizes[name])
    writer.add_uint32(f"{ARCH}.attention.value_length", shape.head_dim)
    writer.add_float32(f"{ARCH}.{FRACTIONS['rms_norm_eps']}", shape.rms_norm_eps)
    writer.add_float32(f"{ARCH}.{FRACTIONS['rope_theta']}", shape.rope_theta)
    writer.add_bool(f"{ARCH}.attention.causal", False)
    writer.add_array(f"{ARCH}.target_layers", [layer + 1 for layer in config.target_layer_ids])
    for name in SECOND if config.second else ():
        writer.add_uint32(f"{ARCH}.{name}", getattr(config.second, name))
    for name, gguf_key in SCALES.items():
        if values.get(name):
            writer.add_float32(f"{ARCH}.{gguf_key}", getattr(config, name))
    windows = [shape.window(layer) for layer in range(shape.num_layers)]
    if any(windows):
        writer.add_uint32(f"{ARCH}.attention.sliding_window", next(each for each in windows if each))
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", [bool(each) for each in windows])
    _add_rope_scaling(writer, shape.rope_scaling or {})
    if config.vocab_size:
        writer.add_uint32(f"{ARCH}.vocab_size", config.vocab_size)
    writer.add_uint32(MASK, config.mask_token_id)
    writer.add_string(CONFIG, json.dumps(config.raw))


def _add_rope_scaling(writer: gguf.GGUFWriter, scaling: dict[str, Any]) -> None:
    if scaling.get("rope_type", "default") == "default":
        return
    writer.add_string(f"{ARCH}.rope.scaling.type", scaling["rope_type"])
    for name, gguf_key in ROPE.items():
        if scaling.get(name) is not None:
            writer.add_float32(f"{ARCH}.rope.scaling.{gguf_key}", scaling[name])
    if original := scaling.get("original_max_position_embeddings"):
        writer.add_uint32(f"{ARCH}.rope.scaling.original_context_length", original)


def _add_tokenizer(writer: gguf.GGUFWriter, config: DFlashConfig, target: Path | None) -> list[str]:
    """Copy the keys `tokenizer.*` from the target's file; returns a remark if no target is given."""
    if target is None:
        return [
            "the target's tokenizer, without which llama.cpp does not load the file: name the target's GGUF file "
            "(--model)"
        ]
    reader = gguf_package().GGUFReader(target)
    tokens = len(reader.fields[TOKENS].data) if TOKENS in reader.fields else 0
    if tokens != config.vocab_size:
        raise ConfigError(
            f"{target} has {tokens} tokens, the drafter's target {config.vocab_size}: name the GGUF of its target"
        )
    copy_keys(reader, writer, [name for name in reader.fields if name.startswith("tokenizer.") and name != MASK])
    return []


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    """Add a tensor: matrices in their dtype, others in float32, as llama.cpp expects for element-wise operations."""
    is_matrix = tensor.dim() == 2 or tensor.dtype == torch.int64
    converted = tensor if is_matrix and tensor.dtype in STORED else tensor.float()
    data = converted.detach().cpu().contiguous()
    kind = gguf_package().GGMLQuantizationType[STORED[data.dtype]]
    if kind.name == "BF16":  # NumPy has no such type
        writer.add_tensor(name, data.view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, data.numpy(), raw_dtype=kind)
