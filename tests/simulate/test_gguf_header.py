"""A GGUF file as a model to predict for: its header tells what its config.json would."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf_files import write_gguf
from model_folders import transformers_model
from numpy import ones

from paceline.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.model.checkpoint import config_json
from paceline.model.gguf.package import finish
from paceline.simulate.answer import predict_all
from paceline.simulate.config import CostsConfig, PredictConfig
from paceline.simulate.costs.catalogue import find
from paceline.simulate.costs.model_config import shape_of


def test_it_has_the_shape_that_the_model_s_own_reader_finds(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, transformers_model("LlamaForCausalLM"), "llama")
    shape, expected = find(str(file)), shape_of(config_json(file))
    assert (shape.name, shape.source) == ("m", "the header of m.gguf")
    for name in ("num_layers", "hidden_size", "dense", "attention", "embedding", "vocab_size"):
        assert getattr(shape, name) == getattr(expected, name), name
    assert shape.precisions.weights == "float32"
    answer = predict_all(CostsConfig(model=str(file), hardware="H100"), PredictConfig())
    assert answer.predictions[0].plain_tokens_per_s


def test_weights_have_the_nearest_format(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", transformers_model("LlamaForCausalLM"), "llama", Quant.Q8_0)
    assert find(str(tmp_path / "m.gguf")).precisions.weights == "q8_0"


def test_parts_are_one_model_and_other_files_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers_model("LlamaForCausalLM")
    write_gguf(tmp_path / "whole.gguf", model, "llama")
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, split_max_tensors=7))
    write_gguf(tmp_path / "x.gguf", model, "llama")
    last = sorted(tmp_path.glob("x-*.gguf"))[-1]
    assert find(str(last)).dense == find(str(tmp_path / "whole.gguf")).dense
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelFileError, match="no whole GGUF file"):
        find(str(tmp_path / "bad.gguf"))
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        find(str(tmp_path / "none.gguf"))


def test_a_file_without_an_embedding_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_tensor("output.weight", ones((4, 32), dtype="float32"))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=r"token_embd.weight.*: give the model's config.json"):
        find(str(tmp_path / "part.gguf"))
