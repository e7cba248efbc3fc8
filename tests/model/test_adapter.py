"""LoRA adapters: the same model as PEFT's merge, from every base, and refusals of whatever else a folder asks for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from lora_folders import PREFIX, matrices, write_adapter, write_with_peft
from model_folders import write_config, write_weights
from native_models import needs_library
from safetensors.torch import load_file, save_file
from small_llm import tiny_model
from small_teacher import write_untaught
from torch.testing import assert_close

from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.loop.adapt.servers.vllm_sglang.drafter_folder import sizes_of
from paceline.model.adapter import base_of, identity_of
from paceline.model.backends import load_target
from paceline.model.checkpoint import load_config, load_tensors
from paceline.model.gguf.to_folder import write_folder
from paceline.model.target import ForwardBatch
from paceline.model.text.tokenizer import Tokenizer
from paceline.train.answers.run_identity import check_same_training
from paceline.train.card import target_hash
from paceline.train.config import TrainConfig
from paceline.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Hello there", "12 he"]
BY_LAYER: dict[str, Any] = {
    "rank_pattern": {"k_proj": 2, "^model.layers.1.mlp.up_proj": 6},
    "alpha_pattern": {"layers.0.self_attn.v_proj": 24},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Weights in bfloat16, several times the usual size, so that text differs from prompt to prompt."""
    folder = tiny_model(tmp_path / "base")
    file = folder / "model.safetensors"
    weights = {name: (tensor if "norm" in name else tensor * 6).bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def answers(model: Path, **options: Any) -> list[list[int]]:
    llm = LLM(str(model), **{"dtype": "float32", "drafter": "none", "max_len": 64, "max_batch": 2, **options})
    return [list(answer.token_ids) for answer in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, **BY_LAYER}], ids=["plain", "rslora"])
def test_peft_merges_the_same_model(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Its weights, its logits and its greedy text; natively, and with drafts, the same text again."""
    pytest.importorskip("peft")
    adapter = tmp_path / "adapter"
    merged = write_with_peft(adapter, base, r=4, lora_alpha=12, **options)
    theirs, ours = merged.state_dict(), dict(load_tensors(adapter))
    for name, tensor in ours.items():
        assert_close(tensor.float(), theirs[name], rtol=0.0, atol=1e-6)
    changed = [name for name, tensor in load_tensors(base) if not torch.equal(tensor.float(), ours[name].float())]
    assert len(changed) == 14 and ours[changed[0]].dtype == torch.float32, "not rounded before the sum"
    texts = answers(adapter, backend="torch")
    llm = LLM(str(adapter), dtype="float32", drafter="none", backend="torch", max_len=64)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        for token in text:
            logits = merged(ids).logits[0, -1]
            assert int(logits.argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        assert_close(logits_of(llm, ids[0]), merged(ids).logits[0], rtol=0.0, atol=1e-5)
    assert texts != answers(base, backend="torch")
    assert answers(adapter) == answers(adapter, drafter="random-dflash", speculate="full") == texts


def logits_of(llm: LLM, ids: torch.Tensor) -> torch.Tensor:
    row = llm.target.cache.allocate()
    assert row is not None
    logits_TV = llm.target.forward(ForwardBatch([row], [0], [len(ids)], ids.tolist())).logits_TV
    assert logits_TV is not None
    return logits_TV


@needs_library
def test_backends_and_drafters_agree(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    plain = answers(adapter, backend="torch")
    for options in ({"backend": "native"}, {"drafter": "ngram"}, {"drafter": "random-dflash", "speculate": "full"}):
        assert answers(adapter, **options) == plain
    assert plain != answers(base)


def test_an_adapter_is_added_to_dequantised_blocks(tmp_path: Path) -> None:
    """And written to a folder of its own, it is an ordinary model."""
    file = write_untaught(tmp_path / "base.gguf", GGMLQuantizationType.Q8_0)
    adapter = write_adapter(tmp_path / "adapter", file)
    before, pairs = dict(load_tensors(file)), matrices(file)
    for name, tensor in load_tensors(adapter, keep_blocks=True):
        module = PREFIX + name.removesuffix(".weight")
        expected = before[name]
        if f"{module}.lora_A.weight" in pairs:
            expected = expected + (pairs[f"{module}.lora_B.weight"] @ pairs[f"{module}.lora_A.weight"]) * 2.0
        assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, expected)
    folder = write_folder(adapter, tmp_path / "merged")
    assert answers(folder) == answers(adapter) != answers(file)
    settings = EngineConfig(str(adapter), dtype="float32", device="cpu", weight_format="blocks")
    with pytest.raises(ConfigError, match="leave --weight-format out"):
        load_target(settings)
    assert load_target(replace(settings, weight_format="q8_0", max_len=32)).num_layers == load_config(file).num_layers


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"peft_type": "LOHA"}, UnsupportedModelError, "peft_type 'LOHA'"),
        ({"use_dora": True}, UnsupportedModelError, "use_dora is True"),
        ({"bias": "all"}, UnsupportedModelError, "bias is 'all'"),
        ({"fan_in_fan_out": True}, UnsupportedModelError, "fan_in_fan_out is True"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, UnsupportedModelError, "layer_replication"),
        ({"init_lora_weights": "pissa"}, UnsupportedModelError, "init_lora_weights is 'pissa'"),
        ({"a_later_setting": 1}, UnsupportedModelError, "a_later_setting is 1"),
        ({"target_modules": ["q_proj"]}, ModelFileError, "which it leaves out"),
        ({"target_modules": ["proj", "q_proj"]}, ModelFileError, "no matrices of 'proj'"),
        ({"r": 8}, ModelFileError, "asks for rank 8"),
        ({"rank_pattern": {"k_proj": 2}}, ModelFileError, "asks for rank 2"),
        ({"rank_pattern": {"(": 2}}, ModelFileError, "invalid rank_pattern"),
        ({"lora_alpha": None}, ModelFileError, "lora_alpha of"),
        ({"base_model_name_or_path": None}, ModelFileError, "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": "/not/here"}, ModelNotFoundError, "link the base's folder"),
    ],
    ids=str,
)
def test_refused_configs(base: Path, tmp_path: Path, changes: dict[str, Any], error: type, message: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, **changes)
    with pytest.raises(error, match=message):
        list(load_tensors(adapter))


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (("layers.1.self_attn.q_proj.lora_A", "layers.7.self_attn.q_proj.lora_A"), "has only lora_"),
        (("layers.1.", "layers.7."), "match no weight of its base, first 'model.layers.7."),
        (("layers.1.self_attn.q_proj.lora_B.weight", "layers.1.self_attn.q_proj.lora_B.bias"), "no LoRA matrix"),
        (("lora_A.weight", "lora_embedding_A"), "no LoRA matrix"),
        (("self_attn.q_proj", "self_attn.k_proj"), "another base"),
    ],
)
def test_refused_tensors(base: Path, tmp_path: Path, renamed: tuple[str, str], message: str) -> None:
    pairs = {name.replace(*renamed): tensor for name, tensor in matrices(base, ("q_proj", "up_proj")).items()}
    modules = [renamed[1].rpartition(".")[2] if renamed[0].endswith("q_proj") else "q_proj", "up_proj"]
    adapter = write_adapter(tmp_path / "adapter", base, pairs, target_modules=modules)
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        list(load_tensors(adapter))


def test_a_head_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_weights(tmp_path / "base", tie_word_embeddings=True)
    pair = {f"{PREFIX}lm_head.lora_A.weight": torch.ones(4, 32), f"{PREFIX}lm_head.lora_B.weight": torch.ones(96, 4)}
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "base", pair, target_modules=["lm_head"])
    with pytest.raises(ModelFileError, match="lm_head of the adapter cannot be added"):
        list(load_tensors(adapter))


def test_refused_folders(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    second = write_adapter(tmp_path / "second", base, base_model_name_or_path=str(adapter))
    with pytest.raises(UnsupportedModelError, match="is an adapter too"):
        load_config(second)
    weights = adapter / "adapter_model.safetensors"
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="never read"):
        list(load_tensors(adapter))
    shutil.copy(base / "model.safetensors", adapter)
    with pytest.raises(ModelFileError, match="both an adapter and a whole model"):
        load_config(adapter)
    (tmp_path / "other").mkdir()
    write_config(tmp_path / "other", "MambaForCausalLM")
    with pytest.raises(UnsupportedModelError, match="for paceline's own engine alone"):
        sizes_of(str(second))
    third = write_adapter(tmp_path / "third", base, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(UnsupportedModelError, match="merge it with PEFT"):
        load_target(EngineConfig(str(third), dtype="float32", device="cpu"))


def test_a_config_that_is_nested_too_deeply_is_refused(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base)
    (folder / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFileError, match="copy the adapter again"):
        load_config(folder)


def test_a_link_replaces_the_name_of_the_base(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, base_model_name_or_path="/not/here")
    (adapter / "base").symlink_to(base)
    assert base_of(adapter) == base.resolve()
    wanted = "model.layers.0.self_attn.q_proj.weight"
    one = dict(load_tensors(adapter, is_wanted=lambda name: name == wanted))
    assert [*one] == [wanted] and torch.equal(one[wanted], dict(load_tensors(adapter))[wanted])


def test_words_come_from_the_adapter_or_its_base(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    theirs, ours = Tokenizer.from_path(base), Tokenizer.from_path(adapter)
    assert (ours.chat_template, ours.eos_token_ids) == (theirs.chat_template, theirs.eos_token_ids)
    (adapter / "chat_template.jinja").write_text("own")
    assert (Tokenizer.from_path(adapter).chat_template, theirs.chat_template != "own") == ("own", True)
    shutil.copy(base / "tokenizer.json", adapter)
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert Tokenizer.from_path(adapter).eos_token_ids == (*theirs.eos_token_ids, 256)


def test_a_target_is_told_from_the_same_with_an_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    before, card = identity_of(str(adapter)), target_hash(str(adapter))
    assert identity_of(f"{tmp_path}/../{tmp_path.name}/adapter") == before, "one folder, two names"
    places = [shutil.copytree(base, tmp_path / name) for name in "xy"]
    linked = [shutil.copytree(adapter, tmp_path / f"{place.name}-adapter") for place in places]
    for folder, place in zip(linked, places, strict=True):
        (folder / "base").symlink_to(place)
    assert (
        target_hash(str(linked[0])) == target_hash(str(linked[1])) and len(set(map(identity_of, map(str, linked)))) == 2
    )
    (tmp_path / "config.json").write_text(json.dumps({"target": before}))
    check_same_training(TrainConfig(tmp_path, EngineConfig(str(adapter))))
    assert identity_of(str(base)) == str(base) and target_hash(str(base)) in card != target_hash(str(base))
    write_adapter(adapter, base, lora_alpha=9)
    assert identity_of(str(adapter)) != before and target_hash(str(adapter)) != card
    for model in (adapter, base):
        with pytest.raises(ConfigError, match="choose another --out"):
            check_same_training(TrainConfig(tmp_path, EngineConfig(str(model))))
