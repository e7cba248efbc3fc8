"""Folders of LoRA adapters: written by hand, and by the `peft` library with its own merged model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.model.checkpoint import expected_shapes, load_config

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def matrices(base: Path, modules: tuple[str, ...] = MODULES, rank: int = 4) -> dict[str, Tensor]:
    """Random matrices for these modules of every layer, under PEFT's names."""
    generator, tensors = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, shape in expected_shapes(load_config(base)).items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            tensors[f"{PREFIX}{module}.lora_A.weight"] = 0.2 * torch.randn(rank, shape[1], generator=generator)
            tensors[f"{PREFIX}{module}.lora_B.weight"] = 0.2 * torch.randn(shape[0], rank, generator=generator)
    return tensors


def write_adapter(folder: Path, base: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """An adapter of rank 4 and alpha 8, with these keys of its config changed."""
    folder.mkdir(exist_ok=True)
    raw = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8, "bias": "none"}
    raw |= {"target_modules": [*MODULES], "use_dora": False, "qalora_group_size": 16} | changes
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    save_file(matrices(base) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def write_with_peft(folder: Path, base: Path, **options: Any) -> Any:
    """An adapter that PEFT saved; returns the model that PEFT merged it into, in float32."""
    import peft
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = peft.LoraConfig(target_modules=[*MODULES], task_type="CAUSAL_LM", **options)
        adapted = peft.get_peft_model(model, config)
        torch.manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data.normal_(0.0, 0.2)
        adapted.save_pretrained(str(folder))
        merged: Any = adapted.merge_and_unload()
    return merged.eval()
