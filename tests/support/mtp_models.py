"""Tiny models of random weights with a multi-token-prediction layer in their file, or without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, Written, model_of, transformers_model
from safetensors.torch import load_file, save_file

from paceline.draft.mtp.checkpoint import MtpLayer, target_names
from paceline.train.methods.mtp import new_layer

FEW = 40
Folder = Callable[[str], Path]


def mtp_folders(folders: pytest.TempPathFactory) -> Folder:
    """A family's tiny model, by its name in `FAMILIES`, without such a layer; "name+" has one, a copy as `new_layer`
    makes it, its weights shaken. "few" is Qwen3.5 with few tokens, whose next one is mostly the last one's doing."""
    written: Written = {}
    folders_by_name: dict[str, Path] = {}

    def one(name: str) -> Path:
        if name not in folders_by_name:
            folders_by_name[name] = write(name.removesuffix("+"), name.endswith("+"), folders.mktemp("mtp") / "model")
        return folders_by_name[name]

    def write(name: str, has_layer: bool, folder: Path) -> Path:
        if name == "few":
            small = {"vocab_size": FEW, "tie_word_embeddings": False}
            family = replace(FAMILIES["qwen3.5"], std=0.08, options=FAMILIES["qwen3.5"].options | small)
            transformers_model(family).save_pretrained(folder)
        else:
            shutil.copytree(model_of(name, written, folders)[0], folder)
        if has_layer:
            layer = shaken(new_layer(folder))
            file = folder / "model.safetensors"
            save_file(load_file(file) | target_names(layer), file, {"format": "pt"})
            if not layer.tells_normed:
                raw = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
        return folder

    return one


def shaken(layer: MtpLayer, seed: int = 5) -> MtpLayer:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator)).contiguous()
        for name, tensor in layer.tensors.items()
    }
    return replace(layer, tensors=tensors)
