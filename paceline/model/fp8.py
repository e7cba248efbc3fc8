"""Reads weights of 8-bit floating point: `NAME.weight` in float8_e4m3fn and `NAME.weight_scale_inv`, a factor for each
block of 128 x 128 values, as DeepSeek's and Qwen's FP8 checkpoints store them (quant_method "fp8")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.model.config.decoder import FP8_BLOCK

SUFFIX = "_scale_inv"


def dense(tensors: Iterable[tuple[str, Tensor]], source: object) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for a checkpoint's `tensors`, with FP8 weights dequantised to float32. An FP8 weight and its
    tensor of scale factors become one float32 tensor; all other tensors are unchanged.

    Raises ModelFileError, naming `source`, if an FP8 weight has no scale factors, if scale factors have no weight, or
    for a wrong shape.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        weight = name.removesuffix(SUFFIX)
        if weight == name and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif weight not in waiting:
            waiting[weight] = tensor
        else:
            other = waiting.pop(weight)
            pair = (tensor, other) if weight == name else (other, tensor)
            yield weight, expanded(*pair, f"{source}: {weight}")
    if waiting:
        raise ModelFileError(f"{source}: {next(iter(waiting))} lacks its weight or its factors: fetch the model again")


def expanded(weight_RC: Tensor, factors: Tensor, name: str) -> Tensor:
    """Dequantise an FP8 weight [R, C] to float32. `factors` [ceil(R / 128), ceil(C / 128)]: one scale factor for each
    block of 128 x 128 values. Raises ModelFileError, with the tensor's `name`, for a wrong dtype or shape."""
    shape = tuple(-(-size // FP8_BLOCK) for size in weight_RC.shape)
    if weight_RC.dtype != torch.float8_e4m3fn or weight_RC.ndim != 2 or tuple(factors.shape) != shape:
        kind = str(weight_RC.dtype).removeprefix("torch.")
        raise ModelFileError(
            f"{name} is {kind} of shape {tuple(weight_RC.shape)}, with factors of shape {tuple(factors.shape)}: it "
            f"needs one for each block of {FP8_BLOCK} x {FP8_BLOCK}, fetch the model again"
        )
    wide = factors.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight_RC.float() * wide[: weight_RC.shape[0], : weight_RC.shape[1]]
