"""Refuses GGUF files with settings that change the computation and that paceline does not compute."""

from __future__ import annotations

import math

from paceline.errors import UnsupportedModelError
from paceline.model.gguf.container import GGUFFile


def refuse_unread(file: GGUFFile, arch: str) -> None:
    """Raise UnsupportedModelError, naming the metadata key, if the file has a setting that changes the model's
    computation and that paceline does not implement. `arch`: llama.cpp's name of the model family."""
    head_dim, rotated = (file.get(f"{arch}.{key}", int) for key in ("attention.key_length", "rope.dimension_count"))
    rope_type, factor = file.get(f"{arch}.rope.scaling.type", str), file.get(f"{arch}.rope.scaling.factor", float)
    attention_factor = file.get(f"{arch}.rope.scaling.attn_factor", float)
    # YaRN's own factor is 1 to llama.cpp, which multiplies by the key, but itself to the converter of OLMo 3.
    plain = (1.0, 0.1 * math.log(max(factor or 1.0, 1.0)) + 1)
    unread = {
        "attention.causal": file.get(f"{arch}.attention.causal", bool) is False,
        "rope.dimension_count": arch != "phi3" and None not in (head_dim, rotated) and rotated != head_dim,
        "rope.scaling.attn_factor": rope_type == "yarn"
        and attention_factor is not None
        and not any(math.isclose(attention_factor, each, rel_tol=1e-5) for each in plain),
    }
    for key, is_so in unread.items():
        if is_so:
            raise UnsupportedModelError(
                f"{file.path}: GGUF key {arch}.{key} {file.metadata[f'{arch}.{key}']} is not implemented here: use "
                "the model's safetensors folder"
            )
