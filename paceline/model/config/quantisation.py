"""Refuses quantised checkpoints that are not read. Imports no PyTorch."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as short
from typing import Any

from paceline.errors import UnsupportedModelError

FP8_BLOCK = 128
"""Rows and columns of an FP8 weight that share a factor (`model/fp8.py`)."""


def refuse_quantised(config: Any, known: str | None, path: Path) -> None:
    """Raise UnsupportedModelError if a checkpoint's weights are quantised in a format that cannot be read.

    `config`: the quantization_config of config.json; None if the weights are not quantised. Two formats can be read:
    FP8 in blocks of 128 x 128, and `known`, a quant_method that only this model family supports (None: there is no such
    method).
    """
    if config is None:
        return
    method = config.get("quant_method") if isinstance(config, dict) else config
    blocks = config.get("weight_block_size") if isinstance(config, dict) else None
    is_fp8 = method == "fp8" and blocks == [FP8_BLOCK, FP8_BLOCK] and config.get("fmt", "e4m3") == "e4m3"
    if not is_fp8 and (known is None or method != known):
        raise UnsupportedModelError(
            f"{path}: weights quantised as {short(method)} (quantization_config) are not implemented: use the original "
            f"checkpoint, one in FP8 with blocks of {FP8_BLOCK} x {FP8_BLOCK}, a GGUF file, or the Transformers "
            "fallback"
        )
