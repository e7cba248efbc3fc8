"""Folders of tiny models: their config, their weights, and the same from Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.model.checkpoint import load_config, random_tensors

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_config(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> Path:
    raw = SHAPE | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return folder


def write_weights(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    weights = dict(random_tensors(load_config(write_config(folder, **changes)), seed=1))
    save_file(weights, folder / "model.safetensors")
    return weights


def transformers_model(architecture: str, **changes: Any) -> Any:
    import transformers

    name = architecture.removesuffix("ForCausalLM")
    torch.manual_seed(0)
    return getattr(transformers, architecture)(getattr(transformers, f"{name}Config")(**SHAPE, **changes))
