"""What token trees will need: positions from parents, and caches that keep a path of what a pass wrote."""

from __future__ import annotations

import pytest
import torch
from doubles import FakeTarget
from native_models import SHAPES, needs_library, twins

from paceline.errors import UnsupportedModelError
from paceline.model.decoder import Decoder
from paceline.model.graphs import GraphDecoder
from paceline.model.kv_cache import StaticKVCache
from paceline.model.native_decoder import NativeDecoder
from paceline.model.target import ForwardBatch

ROWS, STARTS, SLOTS = [0, 2], [14, 5], [[0, 2, 3, 6], [1]]


def test_positions_follow_parents() -> None:
    chain = ForwardBatch([1, 0], [7, 3], [3, 2], [5, 5, 5, 5, 5])
    assert chain.positions == [7, 8, 9, 3, 4]
    chain.parents = [-1, 0, 1, -1, 0]
    assert chain.positions == [7, 8, 9, 3, 4]
    chain.parents = [-1, 0, 0, -1, -1]
    assert chain.positions == [7, 8, 8, 3, 3]


@needs_library
def test_a_tree_is_refused() -> None:
    reference, native = twins(SHAPES["llama"], torch.float32)
    graphs = GraphDecoder.__new__(GraphDecoder)
    for target in (reference, native, graphs, FakeTarget()):
        with pytest.raises(UnsupportedModelError, match="use a drafter that proposes chains"):
            target.forward(ForwardBatch([0], [0], [3], [1, 2, 3], parents=[-1, 0, 0]))


def filled(target: Decoder | NativeDecoder) -> StaticKVCache:
    """Rows 0 and 2 up to their start and nine more, the same in every target."""
    for row in range(4):
        assert target.cache.allocate() == row
    for row, start in zip(ROWS, STARTS, strict=True):
        target.forward(ForwardBatch([row], [0], [start + 9], [(7 * row + at) % 97 for at in range(start + 9)], "none"))
    return target.kv


def test_kept_slots_are_moved_together() -> None:
    cache = StaticKVCache(2, 3, 2, 32, 4, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    cache.lengths[:] = [23, 9, 14]
    before = cache.keys.clone(), cache.values.clone()
    cache.keep(ROWS, STARTS, SLOTS)
    assert cache.lengths == [18, 9, 6]
    for old, new in zip(before, (cache.keys, cache.values), strict=True):
        assert torch.equal(new[:, 0, :, :18], old[:, 0, :, [*range(14), 14, 16, 17, 20]])
        assert torch.equal(new[:, 2, :, :6], old[:, 2, :, [*range(5), 6]])
        assert torch.equal(new[:, 1], old[:, 1])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_prefix_is_a_rollback(dtype: torch.dtype) -> None:
    for one, other in zip(*(twins(SHAPES["llama"], dtype) for _ in range(2)), strict=True):
        kept, rolled_back = filled(one), filled(other)
        kept.keep(ROWS, STARTS, [[0, 1, 2], []])
        rolled_back.rollback(ROWS, [17, 5])
        assert kept.lengths == rolled_back.lengths
        assert torch.equal(kept.keys, rolled_back.keys) and torch.equal(kept.values, rolled_back.values)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama", "qwen3-norms"])
def test_the_native_layout_moves_the_same_positions(shape: str, dtype: torch.dtype) -> None:
    """The next pass sees them: its logits are those of the PyTorch decoder, whose layout is plain."""
    logits = []
    for target in twins(SHAPES[shape], dtype):
        filled(target).keep(ROWS, STARTS, SLOTS)
        out = target.forward(ForwardBatch(ROWS, [18, 6], [2, 1], [1, 2, 3]))
        assert out.logits_TV is not None
        logits.append(out.logits_TV.float())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(*logits, atol=tolerance, rtol=tolerance)


def test_a_fake_cache_keeps_a_path() -> None:
    target = FakeTarget(vocab_size=16, num_rows=1)
    assert target.cache.allocate() == 0
    target.forward(ForwardBatch([0], [0], [8], list(range(8))))
    target.cache.keep([0], [3], [[0, 2, 4]])
    assert target.fake_cache.tokens[0][:7] == [0, 1, 2, 3, 5, 7, -1]
