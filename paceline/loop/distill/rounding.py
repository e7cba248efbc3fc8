"""Training for blocks of four bits: the student computes with weights as they will be stored, and learns behind them.

Q4_1 holds 32 weights of a row as codes 0 to 15, with a scale and a minimum in float16. A student that begins with weights read
from such blocks moves them by less than half a step while it learns, and rounding them afterwards would undo most of what it
has learned. So every product is made with the rounded matrix, and the gradient goes to the exact one as if nothing had been
rounded (the straight-through estimator, arXiv 1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK, TOP = 32, 15


def q4_1(weight: Tensor) -> Tensor:
    """The numbers that `gguf.quantize` stores of a matrix whose rows are whole blocks, dequantised."""
    blocks = weight.detach().float().reshape(-1, BLOCK)
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    scale = (high - low) / TOP
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
    codes = (blocks - low).mul_(inverse).add_(0.5).floor_().clamp_(0, TOP)
    made = codes.mul_(scale.half().float()).add_(low.half().float())
    return made.reshape(weight.shape).to(weight.dtype)


class _Through(torch.autograd.Function):
    """Rounded forward, untouched backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return q4_1(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Product:
    """Takes the place of a linear layer's forward; the matrix is rounded once for each of its values."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self._version, self._rounded = layer, -1, None

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self._layer.weight
        key = 2 * weight._version + torch.is_grad_enabled()
        if self._rounded is None or self._version != key:
            self._rounded, self._version = _Through.apply(weight), key
        return nn.functional.linear(inputs, self._rounded, self._layer.bias)


def matrices(model: nn.Module) -> list[nn.Linear]:
    """Those of a causal model's layers that can be stored in blocks: without the head."""
    found = [each for name, each in model.named_modules() if isinstance(each, nn.Linear) and ".layers." in f".{name}."]
    return [each for each in found if each.in_features % BLOCK == 0]


def compute_rounded(model: nn.Module) -> None:
    """From now on the model computes with rounded matrices. Names of parameters stay."""
    for layer in matrices(model):
        layer.forward = _Product(layer)  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """The matrices become their rounded values."""
    for layer in matrices(model):
        layer.weight.copy_(q4_1(layer.weight))
