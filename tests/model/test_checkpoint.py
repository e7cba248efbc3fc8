"""Configs and weights against Transformers, at tiny shapes."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import transformers_model, write_config, write_weights
from safetensors.torch import save_file

from paceline.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from paceline.model.checkpoint import (
    check_tensors,
    eos_token_ids,
    expected_shapes,
    load_config,
    load_tensors,
    random_tensors,
)


@pytest.mark.parametrize("architecture", [f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")])
@pytest.mark.parametrize("tied", [False, True])
def test_saved_by_transformers(architecture: str, tied: bool, tmp_path: Path) -> None:
    """Whatever Transformers saves we find whole: every tensor, name and shape."""
    model = transformers_model(architecture, tie_word_embeddings=tied, head_dim=16)
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert (config.family, config.tie_embeddings, config.head_dim) == (
        architecture.removesuffix("ForCausalLM").lower(),
        tied,
        16,
    )
    assert config.rms_norm_eps == model.config.rms_norm_eps
    tensors = dict(check_tensors(config, load_tensors(tmp_path), tmp_path))
    state = model.state_dict()
    assert all(tensors[name].equal(state[name]) for name in tensors)
    assert len(tensors) == len(state) - tied


def test_attention_and_mlp_bias(tmp_path: Path) -> None:
    transformers_model("LlamaForCausalLM", attention_bias=True, mlp_bias=True).save_pretrained(tmp_path)
    config = load_config(tmp_path)
    assert config.qkv_bias and config.output_bias and config.mlp_bias
    assert len(list(check_tensors(config, load_tensors(tmp_path), tmp_path))) == len(expected_shapes(config))


def test_defaults_when_keys_are_absent(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        "Qwen3ForCausalLM",
        max_position_embeddings="absent",
        num_attention_heads=32,
        num_key_value_heads="absent",
    )
    config = load_config(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.max_position, config.rope_theta) == (128, 32, 32768, 10000.0)
    assert load_config(write_config(tmp_path, num_key_value_heads=None)).num_kv_heads == 4
    assert load_config(write_config(tmp_path, head_dim=None)).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architecture": "MistralForCausalLM", "sliding_window": 16}, (16, 16)),
        ({"architecture": "MistralForCausalLM", "sliding_window": None}, ()),
        ({"architecture": "MistralForCausalLM"}, (4096, 4096)),
        ({"architecture": "Qwen2ForCausalLM", "sliding_window": 16, "use_sliding_window": False}, ()),
        (
            {
                "architecture": "Qwen2ForCausalLM",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 16),
        ),
        (
            {
                "architecture": "Qwen3ForCausalLM",
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
        ({"architecture": "LlamaForCausalLM", "sliding_window": 16}, ()),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, **changes)).windows == windows


def test_rope_keys_old_and_new(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = load_config(write_config(tmp_path, rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"}))
    new = load_config(write_config(tmp_path, rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5}))
    both = {"rope_theta": 5e5, "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert old == new == load_config(write_config(tmp_path, **both, rope_scaling=scaling | {"type": "llama3"}))
    assert (new.rope_theta, new.rope_scaling) == (5e5, scaling | {"rope_type": "llama3"})
    assert (
        load_config(write_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 2.0})).rope_scaling
        is None
    )


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert eos_token_ids(tmp_path) == (9, 7)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"architecture": "GemmaForCausalLM"}, UnsupportedModelError, "GemmaForCausalLM.*Transformers fallback"),
        ({"architectures": None, "model_type": "mamba"}, UnsupportedModelError, "mamba"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModelError, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, UnsupportedModelError, "per-layer"),
        ({"rope_scaling": {"type": "linear"}}, ModelFileError, "factor"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            UnsupportedModelError,
            "rope_scaling and rope_parameters that differ",
        ),
        ({"vocab_size": "absent"}, ModelFileError, "vocab_size"),
        ({"hidden_size": "32"}, ModelFileError, "hidden_size"),
        ({"num_hidden_layers": True}, ModelFileError, "num_hidden_layers"),
        ({"num_attention_heads": 0}, ModelFileError, "num_attention_heads"),
        ({"num_key_value_heads": 3}, ModelFileError, "divide"),
        ({"rms_norm_eps": -1}, ModelFileError, "rms_norm_eps"),
    ],
)
def test_refused_configs(changes: dict[str, Any], error: type[Exception], named: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=named) as caught:
        load_config(write_config(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\xff", "[" * 100_000])
def test_broken_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_config(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load_config(tmp_path)
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        next(load_tensors(tmp_path))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "owned"),))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ModelFileError, match="convert them to safetensors"):
        next(load_tensors(tmp_path))
    assert not (tmp_path / "owned").exists()


def write_shards(folder: Path) -> dict[str, torch.Tensor]:
    weights = dict(random_tensors(load_config(write_config(folder)), seed=1))
    names = list(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weights


def test_shards(tmp_path: Path) -> None:
    weights = write_shards(tmp_path)
    loaded = dict(check_tensors(load_config(tmp_path), load_tensors(tmp_path), tmp_path))
    assert loaded.keys() == weights.keys()
    assert all(loaded[name].equal(weights[name]) for name in weights)


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.safetensors is missing"):
        list(load_tensors(tmp_path))


def test_tensor_missing_from_its_shard(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"model-00001-of-00002\.safetensors.*model\.extra"):
        list(load_tensors(tmp_path))


@pytest.mark.parametrize(
    "weight_map", [{}, None, {"a": "../outside.safetensors"}, {"a": "/etc/passwd"}, {"a": 1}, {"a": "x.bin"}]
)
def test_bad_index(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="index"):
        list(load_tensors(tmp_path))


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_safetensors(size: int, tmp_path: Path) -> None:
    write_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
    with pytest.raises(ModelFileError, match=r"model\.safetensors is truncated"):
        list(load_tensors(tmp_path))


def test_check_tensors_names_the_culprit(tmp_path: Path) -> None:
    weights = write_weights(tmp_path)
    config = load_config(tmp_path)
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ModelFileError, match=norm):
        list(check_tensors(config, ((name, tensor) for name, tensor in weights.items() if name != norm), "x"))
    with pytest.raises(ModelFileError, match=norm):
        list(check_tensors(config, (weights | {norm: torch.ones(7)}).items(), "x"))
    with pytest.raises(ModelFileError, match=r"k_proj\.bias"):
        list(check_tensors(config, [("model.layers.0.self_attn.k_proj.bias", torch.ones(16))], "x"))
    old = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert dict(check_tensors(config, old.items(), "x")).keys() == weights.keys()


def test_random_tensors_repeat(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, "Qwen3ForCausalLM"))
    first, again, other = (dict(random_tensors(config, seed)) for seed in (3, 3, 4))
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == expected_shapes(config)
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])
    assert first["model.layers.0.self_attn.q_norm.weight"].eq(1).all()
