"""FP8 checkpoints: the same model as their dequantised weights, in any order of their files, or an error that names the
tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model import fp8
from paceline.model.checkpoint import load_config, load_tensors
from paceline.train.tiny import write_tiny_target

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantised(weight_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight in FP8, and the factor of each block of 128 x 128: its largest value becomes 448."""
    rows, columns = (-(-size // 128) for size in weight_RC.shape)
    factors = torch.ones(rows, columns)
    stored = torch.empty(weight_RC.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            block = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            factors[row, column] = weight_RC[block].abs().max() / 448
            stored[block] = (weight_RC[block] / factors[row, column]).to(torch.float8_e4m3fn)
    return stored, factors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_target(tmp_path / "model")


def in_fp8(folder: Path, **config: Any) -> dict[str, torch.Tensor]:
    """Rewrites the folder's matrices; the weights that it should then have."""
    tensors = load_file(folder / "model.safetensors")
    stored, expected = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        stored[name], expected[name] = tensor, tensor
        if name.endswith("_proj.weight"):
            stored[name], factors = quantised(tensor.float())
            stored[f"{name}_scale_inv"] = factors
            wide = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = stored[name].float() * wide[: tensor.shape[0], : tensor.shape[1]]
    names = sorted(stored, key=lambda name: hash(name.encode()) % 7 if "_proj" in name else 0)
    half = len(names) // 2
    parts = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, own in parts.items():
        save_file({name: stored[name].contiguous() for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": CONFIG | config}))
    return expected


def test_weights_are_multiplied_by_their_blocks_factors(model: Path) -> None:
    """Also where weight and factors are in two files."""
    expected = in_fp8(model)
    load_config(model)
    read = dict(load_tensors(model))
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name].float(), tensor.float()), name


def test_ragged_blocks() -> None:
    weight_RC = torch.randn(200, 300)
    stored, factors = quantised(weight_RC)
    assert factors.shape == (2, 3)
    read = fp8.expanded(stored, factors, "x")
    torch.testing.assert_close(read, weight_RC, atol=0.3, rtol=0.07)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "a.weight lacks its weight or its factors"),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, "a.weight lacks"),
        (
            {"a.weight": torch.ones(130, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)},
            r"a.weight is float8_e4m3fn of shape \(130, 2\), with factors of shape \(1, 1\)",
        ),
        ({"a.weight": torch.ones(2, 2), "a.weight_scale_inv": torch.ones(1, 1)}, "a.weight lacks"),
    ],
)
def test_damaged_ones_are_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        list(fp8.dense(tensors.items(), "folder"))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "modelopt"},
        {"weight_block_size": [64, 64]},
        {"weight_block_size": None},
        {"fmt": "e5m2"},
    ],
)
def test_others_are_refused_with_a_way_out(config: dict[str, Any], model: Path) -> None:
    in_fp8(model, **config)
    with pytest.raises(UnsupportedModelError, match="are not implemented: use the original checkpoint, one in FP8"):
        load_config(model)
