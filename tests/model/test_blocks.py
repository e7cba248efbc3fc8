"""Rounding to ggml's blocks: how near it comes, what is left as it is, and where the scales of each format stand."""

from __future__ import annotations

import gguf
import pytest
import torch
from native_models import quantised

from paceline.model.gguf.blocks import BLOCK_KINDS, BLOCK_SIZES, BlockKind, Blocks, quantise

STEPS: dict[BlockKind, int] = {
    "Q4_0": 15,
    "Q4_1": 15,
    "Q5_0": 31,
    "Q5_1": 31,
    "Q8_0": 254,
    "Q4_K": 15,
    "Q5_K": 31,
    "Q6_K": 62,
}
"""Codes of a block from its least to its largest number."""


@pytest.mark.parametrize("kind", STEPS)
def test_rounding_errs_by_a_step_at_most(kind: BlockKind) -> None:
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 6)[:, None]
    weight[2, 64:96], weight[3] = 0.0, 0.0  # a block, and a row, of nothing
    blocks = quantise(weight, kind)
    assert isinstance(blocks, Blocks) and blocks.kind == kind and blocks.shape == (6, 512)
    error, parts = (blocks.dense() - weight).abs().reshape(6, -1, 32), weight.reshape(6, -1, 32)
    step = 2 * parts.abs().amax(2) / STEPS[kind]  # of a block around nothing; less where the least number is its own
    assert (error.amax(2) <= step + 0.02 * parts.abs().amax(2)).all()
    assert error[2, 2].max() == 0 and error[3].max() == 0
    assert error[0].max() > 0


@pytest.mark.parametrize("kind", STEPS)
def test_what_is_no_matrix_of_whole_blocks_is_left_as_it_is(kind: BlockKind) -> None:
    for weight in (torch.ones(512), torch.ones(3, 40), quantised(torch.ones(2, 512), "Q8_0")):
        assert quantise(weight, kind) is weight


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_scales_are_where_the_format_has_them(kind: BlockKind) -> None:
    """One that is infinite makes numbers of its own block infinite, or none."""
    blocks = quantised(torch.randn(2, 512), kind)
    assert blocks.scales().isfinite().all()
    count = blocks.scales().shape[1]
    place = slice(-2, None) if kind == "Q6_K" else slice(2 * count)  # one block's first number, or all of them
    blocks.data[1, place] = 0xFF
    assert not blocks.scales().isfinite().all()
    assert not blocks.dense()[1].isfinite().all() and blocks.dense()[0].isfinite().all()


def test_sizes_of_blocks_are_ggml_s() -> None:
    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] for kind in BLOCK_KINDS}
    assert sizes == BLOCK_SIZES


def test_eight_bits_are_expanded_to_the_bits_of_the_gguf_package() -> None:
    weight = quantise(torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * 3, "Q8_0")
    assert isinstance(weight, Blocks)
    expected = gguf.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(weight.dense(), torch.from_numpy(expected))
    stack = Blocks(weight.data.view(2, 3, -1), (2, 3, 96), "Q8_0")
    assert torch.equal(stack.dense().flatten(0, 1), weight.dense())
