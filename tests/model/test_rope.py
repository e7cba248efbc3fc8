"""Our rotary tables against Transformers', for every rope type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import ModelFileError, UnsupportedModelError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.attention import rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"attention_factor": 0.8},
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    YARN | {"original_max_position_embeddings": 4, "factor": 1.0},
]


def decoder_config(scaling: dict[str, Any] | None, head_dim: int = 64, theta: float = 10000.0) -> DecoderConfig:
    return DecoderConfig(
        "llama", 100, 4 * head_dim, 64, 1, 4, 2, head_dim, 4096, rope_theta=theta, rope_scaling=scaling
    )


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, (scaling or {"none": 0}).values())))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equals_transformers(scaling: dict[str, Any] | None, family: str) -> None:
    from transformers import LlamaConfig, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    theta = 500000.0 if family == "llama" else 1000000.0
    parameters = dict(scaling or {"rope_type": "default"}) | {"rope_theta": theta}
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    if family == "llama":
        rope = LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=parameters))
    else:
        rope = Qwen3RotaryEmbedding(Qwen3Config(**shape, rope_parameters=parameters))
    expected_cos, expected_sin = rope(torch.zeros(1), torch.arange(600)[None])
    cos, sin = rope_tables(decoder_config(scaling, theta=theta), 600)
    assert cos.shape == (600, 64) and cos.dtype == torch.float32
    torch.testing.assert_close(cos, expected_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin, expected_sin[0], atol=1e-6, rtol=0)


def test_gguf_factors_equal_llama3() -> None:
    """GGUF stores llama3 scaling as one divisor per frequency; both ways must give the same table."""
    from paceline.model.torch.attention import inverse_frequencies

    plain, _ = inverse_frequencies(decoder_config(None))
    scaled, _ = inverse_frequencies(decoder_config(LLAMA3))
    factors = {"rope_type": "factors", "factors": (plain / scaled).tolist()}
    torch.testing.assert_close(
        rope_tables(decoder_config(factors), 300), rope_tables(decoder_config(LLAMA3), 300), atol=2e-5, rtol=0
    )


def test_unknown_type_names_itself() -> None:
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        rope_tables(decoder_config({"rope_type": "dynamic", "factor": 2.0}), 8)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear"}, LLAMA3 | {"factor": 0}, YARN | {"factor": "4"}])
def test_missing_number(scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="factor"):
        rope_tables(decoder_config(scaling), 8)
