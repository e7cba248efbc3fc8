"""The text of a model of pictures, as files of Qwen3.5 and Gemma 4 hold it: an inner config, longer names, parts that
are left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from family_models import Written, model_of, reference, target_of, text
from safetensors.torch import load_file, save_file

from paceline.config import EngineConfig
from paceline.errors import ModelFileError
from paceline.model.target import ForwardBatch
from paceline.simulate.costs import catalogue
from paceline.train.plan.target_facts import read_target


@pytest.fixture
def whole(written: Written, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    source, _ = model_of("qwen3.5", written, tmp_path_factory)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    inner = json.loads((source / "config.json").read_text())
    tied = inner.pop("tie_word_embeddings")
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 1},
    }
    (folder / "config.json").write_text(json.dumps({**outer, "tie_word_embeddings": tied, "text_config": inner}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    others = {"model.visual.patch_embed.proj.weight": torch.ones(3, 4), "mtp.fc.weight": torch.ones(32, 64)}
    save_file(tensors | others, folder / "model.safetensors")
    return folder


def test_its_text_is_the_text_model_s(whole: Path, written: Written, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, model = model_of("qwen3.5", written, tmp_path_factory)
    target, tokens = target_of(whole), text(20)
    target.cache.allocate()
    logits_TV = target.forward(ForwardBatch([0], [0], [20], tokens)).logits_TV
    assert logits_TV is not None
    torch.testing.assert_close(logits_TV, reference(model, tokens)[0], atol=1e-4, rtol=1e-4)
    assert (
        catalogue.find(str(whole)).num_parameters
        == catalogue.find(str(model_of("qwen3.5", written, tmp_path_factory)[0])).num_parameters
    )


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_gemma_4(name: str, written: Written, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Files of the small ones also hold keys of layers that read those of others."""
    source, model = model_of(name, written, tmp_path_factory)
    folder, tokens = tmp_path / "whole", text(20)
    shutil.copytree(source, folder)
    outer = {"architectures": ["Gemma4ForConditionalGeneration"]}
    inner = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
    tensors = load_file(source / "model.safetensors")
    tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in tensors.items()}
    others = {"model.embed_vision.embedding_projection.weight": torch.ones(3, 4)}
    if name == "gemma4-small":
        others["model.language_model.layers.2.self_attn.k_proj.weight"] = torch.ones(16, 32)
    save_file(tensors | others, folder / "model.safetensors")
    target = target_of(folder)
    target.cache.allocate()
    logits_TV = target.forward(ForwardBatch([0], [0], [20], tokens)).logits_TV
    assert logits_TV is not None
    torch.testing.assert_close(logits_TV, reference(model, tokens)[0], atol=1e-4, rtol=1e-4)
    assert read_target(EngineConfig(str(folder))).family == "gemma4_text"


def test_training_knows_its_family(whole: Path) -> None:
    assert read_target(EngineConfig(str(whole))).family == "qwen3_5_text"


def test_other_tensors_are_refused_as_ever(whole: Path) -> None:
    tensors = load_file(whole / "model.safetensors") | {"model.audio.proj.weight": torch.ones(2, 2)}
    save_file(tensors, whole / "model.safetensors")
    with pytest.raises(ModelFileError, match="'model.audio.proj.weight' is not part of a qwen3_5_text model"):
        target_of(whole)
