"""Quantisation-aware training for Q4_1: the student computes with its matrices rounded as they will be stored.

Q4_1 stores 32 weights of a row as codes 0 to 15, with a scale and a minimum in float16. Training moves weights by less
than half a quantisation step, so rounding afterwards would undo most of it. Every product therefore uses the rounded
matrix, and the gradient is passed to the exact one unchanged (the straight-through estimator, arXiv 1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK, TOP = 32, 15


def q4_1(weight: Tensor) -> Tensor:
    """Returns a matrix rounded to Q4_1 (4-bit GGUF format) as `gguf.quantize` does, in its own dtype. Its row length
    must be a multiple of 32."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / TOP
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (blocks - low).mul_(inverse).add_(0.5).floor_().clamp_(0, TOP)
    rounded = codes.mul_(scale.half().float()).add_(low.half().float())
    return rounded.reshape(weight.shape).to(weight.dtype)


class _Through(torch.autograd.Function):
    """Straight-through estimator: rounds forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return q4_1(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Product:
    """Replaces a linear layer's forward; rounds the matrix once per weight update."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self._version, self._rounded = layer, -1, None

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self._layer.weight
        key = 2 * weight._version + torch.is_grad_enabled()
        if self._rounded is None or self._version != key:
            self._rounded, self._version = _Through.apply(weight), key
        return nn.functional.linear(inputs, self._rounded, self._layer.bias)


def matrices(model: nn.Module) -> list[nn.Linear]:
    """Returns the linear layers of a model that can be stored in Q4_1 (4-bit GGUF format). They lie inside the decoder
    layers, and their row length is a multiple of 32."""
    linear = [each for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".layers." in f".{name}."]
    return [each for each in linear if each.in_features % BLOCK == 0]


def compute_rounded(model: nn.Module) -> None:
    """Makes the linear layers in `matrices(model)` compute with weights rounded to Q4_1 (4-bit GGUF format). The
    parameters and their gradients are not rounded (straight-through estimator)."""
    for layer in matrices(model):
        layer.forward = _Product(layer)  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Rounds the weights of the linear layers in `matrices(model)` to Q4_1 (4-bit GGUF format), in place."""
    for layer in matrices(model):
        layer.weight.copy_(q4_1(layer.weight))
