"""Products of a few tokens with a matrix on CUDA, which take no longer than reading the matrix, unlike cuBLAS's.

Sums use another order than PyTorch's product, so results differ in the last bits, and one token's from those of
several.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.torch.kernels import available
from paceline.model.torch.kernels.layer import GATED, gated_twin

MOST_TOKENS = 16
"""Maximum number of tokens; with more, cuBLAS is faster."""


class Tile(NamedTuple):
    """The part of a weight matrix, `rows` x `columns`, that one Triton program reads at a time; `warps` and `stages`
    are launch options."""

    rows: int
    columns: int
    warps: int
    stages: int


TILES = {
    (True, False): Tile(4, 1024, 4, 4),
    (True, True): Tile(8, 256, 4, 5),
    (False, False): Tile(16, 256, 2, 4),
    (False, True): Tile(16, 256, 4, 4),
}
"""(whether there is one token, whether the product is gated) -> tile; the best of five to seven candidates on an H100
(docs/project/log/2026-11.md)."""


def tile_of(num_tokens: int, size: int, inner: int, is_gated: bool) -> Tile | None:
    """Choose the tile for a product with `size` outputs and `inner` inputs per token; a gated matrix has 2 * size rows.
    Returns None if no tile divides the matrix."""
    tile = TILES[num_tokens == 1, is_gated]
    columns = tile.columns
    while columns >= 64 and inner % columns:
        columns //= 2
    return None if columns < 64 or size % tile.rows else tile._replace(columns=columns)


def can_run(inputs_TD: Tensor, weight: Tensor, is_gated: bool = False) -> bool:
    """Return True if `product` supports these inputs: 1 to 16 tokens and a matrix with a tile, bfloat16, on CUDA with
    Triton, no gradients needed."""
    num_tokens, (size, inner) = inputs_TD.numel() // inputs_TD.shape[-1], weight.shape
    return (
        0 < num_tokens <= MOST_TOKENS
        and inputs_TD.dtype == weight.dtype == torch.bfloat16
        and available.can_use(inputs_TD.device)
        and not (inputs_TD.requires_grad and torch.is_grad_enabled())
        and tile_of(num_tokens, size // 2 if is_gated else size, inner, is_gated) is not None
    )


def product_twin(inputs_TD: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """Multiply inputs [..., D] by the matrix [N, D] and add its bias, in PyTorch operations.

    With `activation`, "silu" or "gelu_tanh", the first half of the product is the gate, the second is up, and the
    result is activation(gate) * up [..., N / 2].
    """
    product = F.linear(inputs_TD, weight, bias)
    return product if activation is None else gated_twin(product, activation)


def product(inputs_TD: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    """Compute `product_twin`, with the same arguments, in one kernel launch; requires that `can_run` is true."""
    inputs_TD = inputs_TD.contiguous()
    num_tokens, (size, inner) = inputs_TD.numel() // inputs_TD.shape[-1], weight.shape
    size = size if activation is None else size // 2
    tile = tile_of(num_tokens, size, inner, activation is not None)
    if tile is None:
        raise ValueError(f"no tile divides a matrix of {size} x {inner}")
    from paceline.model.torch.kernels.triton import skinny as skinny_triton

    launched: Any = skinny_triton
    out = inputs_TD.new_empty(*inputs_TD.shape[:-1], size)
    # 2 to 16 tokens are computed as 16, the fewest rows of `tl.dot`.
    with torch.cuda.device_of(inputs_TD):
        launched.skinny[(size // tile.rows,)](
            inputs_TD, weight, weight if bias is None else bias, out, num_tokens, size,
            INNER=inner, TOKENS=1 if num_tokens == 1 else MOST_TOKENS, ROWS=tile.rows, COLUMNS=tile.columns,
            HAS_BIAS=bias is not None, GATE=0 if activation is None else 1 + GATED.index(activation), PRECISION="ieee",
            STAGES=tile.stages, num_warps=tile.warps, **available.overlap_options(inputs_TD.device),
        )  # fmt: skip
    return out
