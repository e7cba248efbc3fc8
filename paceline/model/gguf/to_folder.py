"""Converts a GGUF file to a Transformers folder: config, tokenizer, and dequantised weights.

    write_folder(resolve("smollm2-135m"), Path("smollm2"))

For programs that do not read GGUF files (Transformers, TRL, vLLM), and for training. `writer.py` is the inverse.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CacheError, UnsupportedModelError, reraised
from paceline.model import checkpoint
from paceline.model.adapter import base_of, is_adapter
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.torch.attention import inverse_frequencies
from paceline.runs.folder import sync_folder, whole_file, write_whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OTHER_NAMES = ("phi3",)
"""Families that cannot be written, as their folders use other tensor names; nor can models with experts."""
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LAST_FILE = "generation_config.json"
"""The file that is written last: a folder that contains it is complete."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_folder(source: Path, folder: Path, dtype: str = "float32") -> Path:
    """Convert a GGUF file to a new Transformers folder with weights in `dtype`; returns the folder.

    Raises ModelFileError for a damaged file, UnsupportedModelError for a model of an unknown architecture, with experts
    or of family phi3, CacheError if `folder` exists or cannot be written.
    """
    config = checkpoint.load_config(source)
    if config.num_experts or config.family in OTHER_NAMES:
        raise UnsupportedModelError(
            f"{source}: a folder of a {config.family} model holds several matrices as one, and is not written: "
            "fetch the model's own folder"
        )
    tensors = checkpoint.check_tensors(config, checkpoint.load_tensors(source), source)
    return write_model(folder, config_json_of(source), tensors, source, dtype)


def config_json_of(source: Path) -> dict[str, Any]:
    """Return a model's config.json as a dict: that of a Hugging Face folder unchanged, that of a GGUF file built from
    its metadata for use by Transformers. The latter includes the token ids of bos, eos and pad. Raises
    UnsupportedModelError if Transformers has no equivalent of the GGUF file's RoPE scaling."""
    shape = checkpoint.config_json(source)
    if base_of(source).is_dir():
        return shape
    if (shape.get("rope_scaling") or {}).get("rope_type") == "factors":
        shape["rope_scaling"] = _llama3_scaling(source, max(shape["rope_scaling"]["factors"]))
    tokenizer = Tokenizer.from_path(source)
    names, ends = tokenizer.special_tokens, list(tokenizer.eos_token_ids)
    ids = {f"{name}_id": tokenizer.backend.token_to_id(names.get(name, "")) for name in ("bos_token", "pad_token")}
    return shape | ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends}


def _llama3_scaling(source: Path, factor: float) -> dict[str, Any]:
    """The `rope_scaling` of Llama 3.1 or 3.2, which differ in `factor` alone, that gives a file's frequency factors."""
    scaling = LLAMA3_SCALING | {"factor": factor}
    config = checkpoint.load_config(source)
    stored, expected = (inverse_frequencies(each)[0] for each in (config, replace(config, rope_scaling=scaling)))
    if not torch.allclose(stored, expected, rtol=1e-4, atol=0.0):
        raise UnsupportedModelError(
            f"{source}: its rope_freqs.weight is not the scaling of Llama 3, which alone Transformers has: fetch the "
            "model's own folder"
        )
    return scaling


def write_model(
    folder: Path, shape: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], words: Path, dtype: str = "float32"
) -> Path:
    """Write a model as a new folder in Transformers' format; returns the folder.

    `shape`: content of config.json; `tensors`: (Hugging Face name, weight), converted to `dtype`; `words`: a GGUF file
    or folder with the tokenizer to copy. Raises CacheError if `folder` exists or cannot be written.
    """
    weights = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in tensors}
    special = {name: shape[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in shape}
    file = base_of(words) / LAST_FILE
    with reraised(CacheError, f"cannot write {folder}", "choose another folder", OSError, SafetensorError):
        folder.mkdir(parents=True)
        with whole_file(folder / "model.safetensors") as scratch:
            save_file(weights, scratch, metadata={"format": "pt"})
        write_tokenizer(words, folder)
        (folder / "config.json").write_text(_json(dict(shape) | {"torch_dtype": dtype}), encoding="utf-8")
        sync_folder(folder)  # LAST_FILE marks the others as complete
        write_whole(folder / LAST_FILE, _json(checkpoint.read_json(file) if file.is_file() else special))
    return folder


def write_tokenizer(words: Path, folder: Path) -> None:
    """Write the tokenizer of `words`, a GGUF file or a folder, to `folder` as Hugging Face files. If `words` is an
    adapter's folder, files that it lacks are those of its base."""
    if is_adapter(words):
        write_tokenizer(base_of(words), folder)  # its own files, if there are any, replace them
    if words.is_dir():
        for name in TOKENIZER_FILES:
            if (words / name).is_file():
                shutil.copyfile(words / name, folder / name)
        return
    tokenizer = Tokenizer.from_path(words)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    # Not the model's own tokenizer class: Transformers 5 rebuilds those with their default word splitting.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    config |= {"chat_template": tokenizer.chat_template} if tokenizer.chat_template else {}
    (folder / "tokenizer_config.json").write_text(_json(config), encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
