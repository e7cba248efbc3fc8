"""Number formats: how many bytes a value takes in memory, and in which arithmetic it is multiplied."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Format:
    """A format of weights, activations or cache entries."""

    num_bytes: float
    """Of one value, its share of the scales included."""
    computes_as: tuple[str, ...]
    """Rates of `hardware.Machine.flops_per_s` that may multiply it, the fastest first."""


_WIDE = ("bfloat16", "float32")
FORMATS: dict[str, Format] = {
    "float32": Format(4.0, ("float32", "bfloat16")),
    "bfloat16": Format(2.0, _WIDE),
    "float16": Format(2.0, _WIDE),
    "float8": Format(1.0, ("float8", *_WIDE)),
    "int8": Format(1.0, ("float8", *_WIDE)),
    "float4": Format(0.53, ("float4", "float8", *_WIDE)),
    "int4": Format(0.53, _WIDE),
    "q8_0": Format(34 / 32, _WIDE),
    "q4_1": Format(20 / 32, _WIDE),
}
"""float4 is MXFP4, a scale byte for 32 values; int4 keeps 16-bit scales for 128 values and multiplies as 16-bit."""
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp8": "float8", "fp4": "float4"}
SHORT |= {"mxfp4": "float4", "nvfp4": "float4"}


def format_named(name: str) -> str:
    """The format's full name, from it or from a short one (bf16, fp8, mxfp4). Raises ConfigError."""
    full = SHORT.get(name.strip().lower(), name.strip().lower())
    if full not in FORMATS:
        raise ConfigError(f"precision {name!r} is not known: choose from {', '.join(FORMATS)}")
    return full


def num_bytes(name: str) -> float:
    return FORMATS[name].num_bytes


def arithmetic(name: str, flops_per_s: dict[str, float]) -> str:
    """The rate that multiplies this format on a machine. Raises ConfigError when it has none that could."""
    for rate in FORMATS[name].computes_as:
        if flops_per_s.get(rate):
            return rate
    raise ConfigError(
        f"this machine has no known arithmetic rate for {name}: it needs one of {', '.join(FORMATS[name].computes_as)}"
    )
