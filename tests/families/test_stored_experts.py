"""Experts of files that hold a layer's together, in any of the forms: the same model as from each expert's own
tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, reference, target_of, text, transformers_model
from safetensors.torch import load_file, save_file

from paceline.errors import ModelFileError
from paceline.model.checkpoint import load_config
from paceline.model.stored_experts import expanded, taken_apart
from paceline.model.target import ForwardBatch


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    target = target_of(folder)
    target.cache.allocate()
    out = target.forward(ForwardBatch([0], [0], [len(tokens)], tokens))
    assert out.logits_TV is not None
    return out.logits_TV


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "qwen3-next", "qwen3.5-moe"])
def test_as_transformers_holds_them(name: str, tmp_path: Path) -> None:
    model, tokens = transformers_model(FAMILIES[name]), text(20)
    model.config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [type(model).__name__]}))
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path, tokens), reference(model, tokens)[0], atol=1e-4, rtol=1e-4)


def test_mxfp4_is_expanded_as_transformers_does() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    actual = expanded(blocks, scales, "x")
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)


@pytest.mark.slow
def test_gpt_oss_in_mxfp4(made_gpt_oss: tuple[Path, Any], tmp_path: Path) -> None:
    """A file in blocks says what a dense file of the same numbers says."""
    source, generator = made_gpt_oss[0], torch.Generator().manual_seed(1)
    dense = load_file(source / "model.safetensors")
    packed = dict(dense)
    sizes = {"gate_up": (128, 32), "down": (32, 64)}
    for layer in range(4):
        for which, (rows, columns) in sizes.items():
            key = f"model.layers.{layer}.mlp.experts.{which}_proj"
            blocks = torch.randint(0, 256, (5, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 126, (5, rows, columns // 32), dtype=torch.uint8, generator=generator)
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            del packed[key]
            dense[key] = expanded(blocks, scales, key).float().transpose(1, 2).contiguous()
    texts = []
    for folder, tensors in ((tmp_path / "dense", dense), (tmp_path / "packed", packed)):
        folder.mkdir()
        config = (source / "config.json").read_text()
        method = '{"quantization_config": {"quant_method": "mxfp4"},'
        (folder / "config.json").write_text(config if folder.name == "dense" else method + config.lstrip()[1:])
        save_file(tensors, folder / "model.safetensors")
        texts.append(logits(folder, text(12)))
    assert torch.equal(*texts)


@pytest.fixture
def made_gpt_oss(tmp_path: Path) -> tuple[Path, Any]:
    """Its experts are 64 wide: MXFP4 has blocks of 32."""
    from dataclasses import replace

    family = FAMILIES["gpt-oss"]
    model = transformers_model(replace(family, options=family.options | {"intermediate_size": 64, "hidden_size": 32}))
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source", model


def test_what_is_no_stack_of_experts_is_refused(made_gpt_oss: tuple[Path, Any]) -> None:
    config, name = load_config(made_gpt_oss[0]), "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ModelFileError, match="the config asks for 5 experts"):
        list(taken_apart(config, [(name, torch.zeros(4, 64, 32))], "file"))
    broken = [(f"{name}_blocks", torch.zeros(5, 32, 2, 16)), (f"{name}_scales", torch.zeros(5, 32, 2))]
    with pytest.raises(ModelFileError, match="is no MXFP4"):
        list(taken_apart(config, broken, "file"))
