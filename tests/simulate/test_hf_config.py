"""A config.json of each family: parameters and attention counted by hand, and errors that name what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from paceline.errors import ConfigError, PacelineError, UnsupportedModelError
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import shape_of
from paceline.simulate.costs.roofline import check_shares, shares_evenly
from paceline.simulate.costs.shapes import Attention, Experts, from_json

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
ATTENTION = 8 * (8 + 4 + 4 + 8)
"""Queries, keys, values and output of SMALL."""
MLP = 3 * 8 * 20
GQA = Attention("gqa", 4, 4, 2, 2)
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}


def test_dense_with_grouped_queries() -> None:
    shape = shape_of(SMALL, "small")
    assert shape.attention == (GQA,)
    assert shape.dense == 800 + 4 * (ATTENTION + MLP)
    assert (shape.embedding, shape.experts, shape.max_context) == (800, None, 64)


def test_a_tied_head_is_kept_once() -> None:
    assert shape_of({**SMALL, "tie_word_embeddings": True}).embedding == 0
    assert shape_of({**SMALL, "model_type": "gemma2", "head_dim": 2}).embedding == 0, "Gemma's default"


def test_head_width_of_its_own_and_no_groups() -> None:
    config = {**SMALL, "head_dim": 6}
    del config["num_key_value_heads"]
    shape = shape_of(config)
    assert shape.attention == (Attention("gqa", 4, 4, 4, 6),)
    assert shape.dense == 800 + 4 * (8 * 4 * 24 + MLP)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [16],
        ),
        ({"model_type": "gemma2", "sliding_window": 16}, [16, None, 16, None]),
        ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 4}, [16, 16, 16, None]),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 16}, [None, 16, 16, 16]),
    ],
)
def test_sliding_windows(extra: dict[str, Any], windows: list[int | None]) -> None:
    layers = {group.window: group.layers for group in shape_of({**SMALL, **extra}).attention}
    assert layers == {window: windows.count(window) for window in windows}


def test_mixture_of_experts() -> None:
    """Two of six experts and a gated shared one; the first layer is dense."""
    extra = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0]}
    shape = shape_of({**SMALL, **extra, "shared_expert_intermediate_size": 7})
    each, shared = 3 * 8 * 5, 3 * 8 * 7
    assert shape.experts == Experts(6, 2, 3 * (2 * each + shared), 3 * (6 * each + shared))
    assert (shape.experts.each, shape.experts.shared) == (3 * each, 3 * shared)
    assert shape.dense == 800 + 4 * ATTENTION + MLP + 3 * (8 * 6 + 8)


def test_gpt_oss_stores_experts_in_four_bits() -> None:
    extra = {"model_type": "gpt_oss", "num_local_experts": 6, "experts_per_token": 2}
    shape = shape_of({**SMALL, **extra, "quantization_config": {"quant_method": "mxfp4"}})
    assert shape.experts is not None
    assert shape.experts.active == 4 * 2 * MLP
    assert (shape.precisions.weights, shape.precisions.experts) == ("bfloat16", "float4")


def test_hybrid_with_linear_attention() -> None:
    """Qwen3.5's text part: three gated delta-net layers to one of full attention, whose output has a gate."""
    config = {
        "model_type": "qwen3_5",
        "text_config": {**SMALL, **LINEAR, "model_type": "qwen3_5_text", "attn_output_gate": True},
    }
    shape = shape_of(config)
    state = 2 * (4 * 3 * 5 + (2 * 2 * 3 + 4 * 5) * 4)
    assert shape.attention == (Attention("linear", 3, state_bytes=state), Attention("gqa", 1, 4, 2, 2))
    keys, values = 6, 20
    linear = 8 * (2 * keys + 2 * values + 2 * 4) + values * 8 + (2 * keys + values) * 4
    assert shape.dense == 800 + 3 * linear + (ATTENTION + 8 * 8) + 4 * MLP


def test_the_states_of_the_performance_model() -> None:
    """Bytes per layer and sequence that it gives for 48 and for 32 value heads."""
    for name, expected in (("Qwen3.5-27B", 1654784), ("Qwen3.5-35B-A3B", 1114112)):
        linear = next(group for group in catalogue.find(name).attention if group.kind == "linear")
        assert linear.state_bytes == expected


def mla(**extra: Any) -> dict[str, Any]:
    ranks = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}
    return {**SMALL, "model_type": "deepseek_v3", **ranks, **extra}


def test_latent_attention() -> None:
    shape = shape_of(mla())
    assert shape.attention == (Attention("mla", 4, 4, latent=10, rope=2),)
    layer = 8 * 6 + 6 * 4 * 5 + 8 * 12 + 10 * 4 * 8 + 4 * 5 * 8
    assert shape.dense == 800 + 4 * (layer + MLP)
    full = shape_of(mla(q_lora_rank=None))
    assert full.dense == 800 + 4 * (layer - 8 * 6 - 6 * 4 * 5 + 8 * 4 * 5 + MLP)


def test_sparse_latent_attention_reads_what_its_indexer_chooses() -> None:
    shape = shape_of(mla(index_n_heads=3, index_head_dim=7, index_topk=16))
    expected = Attention("mla", 4, 4, latent=10, rope=2, window=0, ratio=1, topk=16, indexer_heads=3, indexer_dim=7)
    assert shape.attention == (expected,)
    assert shape.dense == shape_of(mla()).dense + 4 * (6 * 21 + 8 * (7 + 3))


def test_experts_after_the_first_dense_layers() -> None:
    shape = shape_of(mla(first_k_dense_replace=1, n_routed_experts=6, n_shared_experts=1, num_experts_per_tok=2))
    assert shape.experts is not None
    assert shape.experts.resident == 3 * 7 * MLP


V4_FLASH = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "vocab_size": 129280,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8"},
}


def test_compressed_attention_agrees_with_the_performance_model() -> None:
    """DeepSeek-V4-Flash: its config gives the catalogue's experts and attention, and the rest within a thousandth."""
    shape, expected = shape_of(V4_FLASH), catalogue.find("DeepSeek-V4-Flash")
    assert shape.experts == expected.experts
    assert set(shape.attention) == set(expected.attention)
    assert shape.precisions == expected.precisions
    assert shape.dense == pytest.approx(expected.dense, rel=1e-3)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, "float8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "bits": 8}, "int8"),
        (None, "bfloat16"),
    ],
)
def test_stored_precision(quantization: dict[str, Any] | None, expected: str) -> None:
    assert shape_of({**SMALL, "quantization_config": quantization}).precisions.weights == expected


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "many"}, "which is no size"),
        ({"num_hidden_layers": float("nan")}, "which is no size"),
        ({"num_attention_heads": True}, "which is no size"),
        ({"intermediate_size": None}, "no intermediate_size"),
        ({"num_experts": 4, "num_experts_per_tok": 9}, "not possible"),
        ({"num_experts": 4}, "no num_experts_per_tok"),
        ({"layer_types": ["mamba"] * 4}, "not known"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "gemma4_text", "global_head_dim": "wide"}, "which is no size"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, "16 heads in a hidden_size of 8"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 8}, "4 heads cannot share 8 key heads"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types must list the type of each of 4 layers"),
        ({"layer_types": "full_attention"}, "layer_types must list the type of each of 4 layers"),
        ({"model_type": "gemma2", "sliding_window": 16, "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 1}, "mlp_only_layers must be a list"),
        ({"compress_ratios": [-4] * 4, "qk_rope_head_dim": 2}, "a whole number for each of 4 layers"),
        ({"compress_ratios": [4], "qk_rope_head_dim": 2}, "each of 4 layers"),
        ({"text_config": [1]}, "JSON object"),
    ],
)
def test_incomplete_configs_say_what_is_missing(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UnsupportedModelError, match=remedy):
        shape_of({**SMALL, **change})


def test_a_shape_survives_json() -> None:
    shape = catalogue.find("DeepSeek-V4-Flash")
    assert from_json(asdict(shape)) == shape


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"attention": [{"kind": "gqa", "layers": 1, "colour": 2}]}, "colour"),
        ({"attention": [{"kind": "rnn", "layers": 43}]}, "choose from gqa"),
        ({"attention": [{"kind": "mla", "layers": 43, "ratio": 0}]}, "ratio 0"),
        ({"attention": [{"kind": "gqa", "layers": 1}]}, "num_layers layers together"),
        ({"attention": [{"kind": "gqa", "layers": 43, "heads": 1e300}]}, r"heads is 1e\+300, not a whole number"),
        ({"attention": [{"kind": "gqa", "layers": 43, "window": "x"}]}, "window is 'x', not a whole number"),
        ({"attention": [{"kind": "mla", "layers": 43, "ratio": 4, "topk": []}]}, r"topk is \[\], not a whole number"),
        ({"attention": None}, "cannot be read"),
        ({"dense": float("nan")}, "dense is nan"),
        ({"dense": "much"}, "dense is 'much'"),
        ({"dense": 0}, "above 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"experts": {"num_routed": 6, "per_token": 6, "active": 1, "resident": 1}}, "0 < per_token"),
        ({"experts": {"num_routed": 6}}, "cannot be read"),
        ({"precisions": {"weights": "fp7"}}, "is not known"),
    ],
)
def test_shapes_that_are_none_are_refused(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(PacelineError, match=remedy):
        from_json({**asdict(catalogue.find("DeepSeek-V4-Flash")), **change})


def test_absurd_numbers_of_heads_are_divided_at_once() -> None:
    """A billion heads were tried for a billion numbers of GPUs."""
    many = shape_of({**SMALL, "num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 2})
    assert shares_evenly(many)[-3:] == [640, 800, 1000]


def test_more_gpus_than_are_listed_can_share_the_heads() -> None:
    """2,048 GPUs for 2,048 heads ended in a StopIteration."""
    shape = shape_of({**SMALL, "num_attention_heads": 2048, "num_key_value_heads": 2048, "head_dim": 2})
    check_shares(shape, 2048)
    with pytest.raises(
        ConfigError, match="2048 heads over 2048 key heads, which 2047 GPUs .*: choose from 1, 2, .*1024$"
    ):
        check_shares(shape, 2047)


def test_whole_numbers_may_be_written_as_floats() -> None:
    """A config.json may have them too."""
    shape = catalogue.find("DeepSeek-V4-Flash")
    read = from_json(json.loads(json.dumps(asdict(shape)), parse_int=float))
    assert read == shape and str((read.num_layers, read.attention)) == str((shape.num_layers, shape.attention))
