"""A GGUF file as a Hugging Face folder: its config, its tokenizer, and float32 weights equal to the dequantised ones.

`hub.py` keeps built-in models this way: training, Transformers and other tools read a folder, not a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file

from paceline.model import checkpoint, gguf
from paceline.model.tokenizer import Tokenizer


def write_folder(gguf_file: Path, folder: Path, advance: Callable[[float], None]) -> None:
    """Write into an empty folder; `advance` hears how much of 1 is done. Raises ModelFileError or OSError."""
    config, raw = checkpoint.load_config(gguf_file), gguf.config_json(gguf_file) | {"torch_dtype": "float32"}
    tokenizer = Tokenizer.from_path(gguf_file)
    num_tensors, weights = len(checkpoint.expected_shapes(config)), {}
    for name, tensor in checkpoint.check_tensors(config, checkpoint.load_tensors(gguf_file), gguf_file):
        weights[name] = tensor
        advance(len(weights) / num_tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(folder)
    names, ends = tokenizer.special_tokens, list(tokenizer.eos_token_ids)
    ids = {f"{name}_id": tokenizer.backend.token_to_id(names.get(name, "")) for name in ("bos_token", "pad_token")}
    special = ids | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    for name, values in (("config.json", raw | special), ("generation_config.json", special)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
