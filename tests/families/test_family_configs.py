"""Each family's config: as Transformers writes it and as files on the hub have it, for our decoder and for
`simulate`."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ModelFileError, PacelineError, UnsupportedModelError
from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, DeltaShape, RopeKind, decoder_config
from paceline.model.torch.attention import rope_tables
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.model_config import ConfigReader, shape_of

HERE = Path("config.json")


def test_simulate_reads_it(name: str, family_model: tuple[Path, Any]) -> None:
    """Every matrix is counted, and nothing else; each layer's window is seen."""
    folder, model = family_model
    shape = catalogue.find(str(folder))
    of_layers = {id(each): each for each in model.parameters() if each.ndim > 1}
    counted = sum(each.numel() for key, each in model.named_parameters() if id(each) in of_layers and "bias" not in key)
    assert shape.num_parameters == counted
    raw = json.loads((folder / "config.json").read_text())
    ours = decoder_config(raw, HERE)
    windows = sorted(str(ours.window(layer)) for layer in range(ours.num_layers))
    assert windows == sorted(str(group.window) for group in shape.attention for _ in range(group.layers))


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
PHI_FACTORS = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + step / 8 for step in range(48)]}
HUB: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "max_position_embeddings": 65536, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "layer_types": ["full_attention"] * 36,
    },
    "granite-3.3-2b-instruct": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": 49159, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rope_scaling": None, "rms_norm_eps": 1e-5,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "OLMo-2-0425-1B": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6,
    },
    "Olmo-3-7B-Instruct": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 65536, "rope_theta": 500000, "rope_scaling": YARN, "sliding_window": 4096,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    },
    "Phi-4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120,
        "intermediate_size": 17920, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "rope_theta": 250000,
        "rope_scaling": None,
    },
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0, "rope_scaling": PHI_FACTORS, "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192, "rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    },
    "gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 512,
        "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rope_scaling": None, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [], "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
    },
    "Mixtral-8x7B-Instruct-v0.1": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072, "rope_theta": 150000, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "sliding_window": 128,
        "quantization_config": {"quant_method": "mxfp4"}, "swiglu_limit": 7.0, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "max_position_embeddings": 262144, "rope_theta": 10000000, "rope_scaling": None, "partial_rotary_factor": 0.25,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "attention_bias": False, "hidden_act": "silu",
    },
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 262144, "full_attention_interval": 4, "attn_output_gate": True,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "hidden_act": "silu", "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
}  # fmt: skip
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": False}
HUB["gemma-4-31B-it"] = GEMMA4 | catalogue.config_of("gemma-4-31b") | {
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10, "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
HUB["gemma-4-E2B-it"] = GEMMA4 | catalogue.config_of("gemma-4-e2b")
HUB["gemma-4-E2B-it"]["layer_types"] = [*["sliding_attention"] * 4, "full_attention"] * 7
ROPE_FIELDS: dict[str, Any] = {"rope_scaling": None, "local_rope_scaling": None}


def rotated(config: DecoderConfig) -> list[RopeKind]:
    """Its kinds of rotary positions."""
    kinds: set[RopeKind] = {config.rope(layer) for layer in range(config.num_layers)}
    return [kind for kind in kinds if kind != "none"]


@pytest.mark.parametrize("model", HUB)
def test_a_file_of_the_hub_means_what_transformers_makes_of_it(model: str) -> None:
    """Hub files are older than Transformers 5, which writes ropes in other words: both say the same."""
    from transformers import AutoConfig

    raw = {key: value for key, value in HUB[model].items() if key != "quantization_config"}
    theirs = AutoConfig.for_model(**copy.deepcopy(raw)).to_dict() | {"architectures": raw["architectures"]}
    config, again = decoder_config(HUB[model], HERE), decoder_config(json.loads(json.dumps(theirs)), HERE)
    assert replace(config, **ROPE_FIELDS) == replace(again, **ROPE_FIELDS)
    for kind in rotated(config):
        for longest in (64, 30000):
            for ours, other in zip(
                rope_tables(config, 64, kind, longest), rope_tables(again, 64, kind, longest), strict=True
            ):
                assert torch.equal(ours, other)


def test_what_the_files_say() -> None:
    read = {model: decoder_config(raw, HERE) for model, raw in HUB.items()}
    assert read["SmolLM3-3B"].ropes == ("main", "main", "main", "none") * 9 and read["SmolLM3-3B"].tie_embeddings
    granite = read["granite-3.3-2b-instruct"]
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logit_scale) == (0.015625, 0.125)
    olmo = read["Olmo-3-7B-Instruct"]
    assert olmo.windows[:4] == (4096, 4096, 4096, None) and olmo.ropes[:4] == ("local", "local", "local", "main")
    assert olmo.rope_scaling and olmo.rope_scaling["rope_type"] == "yarn" and olmo.local_rope_scaling is None
    assert (olmo.norms, olmo.is_qk_norm_whole, olmo.local_rope_theta) == ("after", True, 500000.0)
    mini = read["Phi-4-mini-instruct"]
    assert mini.rotary_dim == 96 and mini.rope_scaling and mini.rope_scaling["factor"] == 32.0
    gemma2, gemma3 = read["gemma-2-2b-it"], read["gemma-3-1b-it"]
    assert (gemma2.embedding_scale, gemma2.attention_scale) == (48.0, 1 / 16)
    assert (gemma2.attention_cap, gemma2.logit_cap, gemma2.windows[:2]) == (50.0, 30.0, (4096, None))
    assert (gemma3.norm_offset, gemma3.activation, gemma3.logit_cap, gemma3.tie_embeddings) == (
        1.0,
        "gelu_tanh",
        0.0,
        True,
    )
    assert (gemma3.rope_theta, gemma3.local_rope_theta, gemma3.windows[4:7]) == (1e6, 1e4, (512, None, 512))
    gemma4, small = read["gemma-4-31B-it"], read["gemma-4-E2B-it"]
    assert (gemma4.head_sizes(0), gemma4.head_sizes(5), gemma4.attention_scale) == ((16, 256), (4, 512), 1.0)
    assert (gemma4.ropes[4:6], gemma4.rope_theta, gemma4.local_rope_theta) == (("local", "main"), 1e6, 1e4)
    assert (small.head_sizes(4), small.source(14), small.source(15), small.source(19)) == ((1, 512), 14, 13, 14)
    following, dense = read["Qwen3-Next-80B-A3B-Instruct"], read["Qwen3.5-9B"]
    assert (
        following.linear_layers == tuple(layer for layer in range(48) if layer % 4 != 3) and following.has_mixed_delta
    )
    assert (
        following.delta == dense.delta == DeltaShape(16, 32, 128, 128, 4)
        and dense.linear_layers == following.linear_layers[:24]
    )
    assert (following.rotary_dim, following.output_gate, following.norm_offset) == (64, True, 1.0)
    assert (following.num_experts, following.shared_expert_size, dense.num_experts) == (512, 512, 0)
    assert (dense.rotary_dim, dense.rope_theta, dense.rope_scaling) == (64, 1e7, None)
    qwen, mixtral, oss = read["Qwen3-30B-A3B"], read["Mixtral-8x7B-Instruct-v0.1"], read["gpt-oss-20b"]
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_size, qwen.normed_experts) == (128, 8, 768, True)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_size) == (8, 2, 14336)
    assert oss.has_sinks and oss.output_bias and oss.windows[:2] == (128, None) and oss.activation == "clamped_swiglu"


@pytest.mark.slow
@pytest.mark.parametrize("model", HUB)
def test_simulate_and_the_decoder_count_the_same_parameters(model: str) -> None:
    config = decoder_config(HUB[model], HERE)
    matrices = [shape for name, shape in expected_shapes(config).items() if len(shape) > 1]
    assert shape_of(HUB[model]).num_parameters == sum(map(math.prod, matrices))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gemma-3-1b-it", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not implemented"),
        ("gemma-2-2b-it", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not implemented"),
        ("OLMo-2-0425-1B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not implemented"),
        ("Qwen3.5-9B", {"layer_types": ["sliding_attention"] * 32}, "is not implemented"),
        ("Qwen3.5-9B", {"attn_output_gate": False}, "attn_output_gate False is not implemented"),
        ("gemma-4-31B-it", {"enable_moe_block": True}, "enable_moe_block True is not implemented"),
        ("gemma-4-31B-it", {"per_layer_config": {"5": {"head_dim": 8}}}, "per_layer_config .* is not implemented"),
        (
            "SmolLM3-3B",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "per-layer rope is not implemented",
        ),
    ],
)
def test_what_no_family_computes_goes_to_transformers(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        decoder_config(HUB[model] | changes, HERE)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, "no_rope_layers needs a 0 or a 1 for each layer"),
        ("SmolLM3-3B", {"no_rope_layers": [2] * 36}, "no_rope_layers needs a 0 or a 1 for each layer"),
        ("granite-3.3-2b-instruct", {"logits_scaling": 0}, "needs 'logits_scaling' as a number above"),
        (
            "Phi-4-mini-instruct",
            {"rope_scaling": PHI_FACTORS | {"long_factor": [1.0]}},
            "long_factor has 1 numbers, not 48",
        ),
        (
            "Phi-4-mini-instruct",
            {"rope_scaling": PHI_FACTORS | {"long_factor": 2.0}},
            "needs a list of numbers 'long_factor'",
        ),
        ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.001}, "of heads of 128 cannot be rotated"),
        ("Mixtral-8x7B-Instruct-v0.1", {"num_experts_per_tok": 9}, "9 of 8 experts for each token are not possible"),
        ("Qwen3-30B-A3B", {"num_experts": 2**20}, "experts for each token are not possible"),
        ("Qwen3.5-9B", {"linear_num_value_heads": 24}, "24 value heads over 16 key heads do not divide evenly"),
        ("Qwen3.5-9B", {"layer_types": ["linear_attention"] * 32}, "or no layer has full attention"),
        ("Qwen3.5-9B", {"linear_conv_kernel_dim": 0}, "needs 'linear_conv_kernel_dim' as a whole number from 1"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": "x"}, "mlp_only_layers must be a list of layers"),
        ("gemma-4-31B-it", {"num_global_key_value_heads": 5}, "32 heads of 512 over 5 key heads of layers with full"),
        ("gemma-4-31B-it", {"num_kv_shared_layers": 57}, "leaves no layer of each type"),
        ("gemma-4-31B-it", {"sliding_window": None}, "needs 'sliding_window' as a whole number"),
        ("gemma-4-E2B-it", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input 9 is smaller"),
    ],
)
def test_impossible_values_are_named(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        decoder_config(HUB[model] | changes, HERE)


def test_the_text_part_of_a_model_of_pictures() -> None:
    text = {
        key: value for key, value in HUB["Qwen3.5-9B"].items() if key not in ("architectures", "tie_word_embeddings")
    }
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 2}}
    assert decoder_config(whole, HERE) == decoder_config(HUB["Qwen3.5-9B"], HERE)
    for outer, inner in ((True, False), (False, True)):  # Transformers reads the outer one
        tied = whole | {"tie_word_embeddings": outer, "text_config": text | {"tie_word_embeddings": inner}}
        assert decoder_config(tied, HERE).tie_embeddings == ConfigReader(tied).is_tied == outer
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        decoder_config(whole | {"quantization_config": {"quant_method": "fp8"}}, HERE)
    with pytest.raises(ModelFileError, match="needs an object text_config"):
        decoder_config(whole | {"text_config": None}, HERE)


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    2**70,
    0.5,
    1e300,
    float("nan"),
    "x",
    [],
    [1],
    ["x"] * 4,
    {},
    {"a": 1},
    {"rope_type": "yarn"},
]


@pytest.mark.parametrize("model", HUB)
def test_whatever_a_key_holds_it_is_read_or_refused(model: str) -> None:
    rng, refused = random.Random(model), 0
    for _ in range(60):
        raw = copy.deepcopy(HUB[model]) | {
            "layer_types": None,
            "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
        }
        if rng.random() < 0.7:
            del raw["rope_parameters"]
        for _ in range(rng.randint(1, 2)):
            part = rng.choice([raw] + [value for value in raw.values() if isinstance(value, dict)])
            if part:
                part[rng.choice(list(part))] = copy.deepcopy(rng.choice(JUNK))
        try:
            config = decoder_config(raw, HERE)
        except PacelineError:
            refused += 1
        else:
            for kind in rotated(config):
                rope_tables(config, 4, kind)
    assert 0 < refused < 60
