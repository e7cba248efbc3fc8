"""Rotary position tables: from a DecoderConfig to the cosines and sines every decoder layer multiplies with.

The layout is Hugging Face's half split (the frequencies twice, side by side), the formulas are Transformers'
`modeling_rope_utils`; the tests compare with it for every rope type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from paceline.model.config import DecoderConfig, check_rope


def rope_tables(config: DecoderConfig, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [max_len, head_dim] each; yarn's attention factor is folded in.

    Raises UnsupportedModelError for a rope type we do not know, ModelFileError when its numbers are missing.
    """
    inv_freq, attention_factor = inverse_frequencies(config)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def inverse_frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    """Angle per position, float32 [head_dim / 2], and the factor that multiplies cosine and sine."""
    scaling = config.rope_scaling or {"rope_type": "default"}
    check_rope(scaling)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match scaling["rope_type"]:
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, scaling, config), _yarn_attention_factor(scaling)
        case "factors":
            return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
        case _:
            return plain, 1.0


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > context / low, plain / factor, plain)
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, blended, stretched)


def _yarn(plain: Tensor, scaling: dict[str, Any], config: DecoderConfig) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): slow dimensions are interpolated, fast ones kept, a ramp between."""
    dim, context = config.head_dim, scaling["original_max_position_embeddings"]

    def dimension_turning(times: float) -> float:
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension_turning(scaling.get("beta_fast") or 32)
    high = dimension_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001  # the same guard against a zero-width ramp as Transformers
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / scaling["factor"] * (1 - kept) + plain * kept


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
