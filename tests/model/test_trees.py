"""Token trees: positions computed from parents, and caches that keep one path of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from doubles import FakeTarget
from native_models import (
    SHAPES,
    blocks_of,
    in_turns,
    native_decoder,
    needs_library,
    random_weights,
    restored,
    twins,
    use,
)
from torch import Tensor

from paceline.errors import NativeError, UnsupportedModelError
from paceline.model.gguf.blocks import BlockKind
from paceline.model.kv_cache import StaticKVCache
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch
from paceline.model.torch.attention import ancestors
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import GraphDecoder, StaticPass

ROWS, STARTS, SLOTS = [0, 2], [14, 5], [[0, 2, 3, 6], [1]]


def test_positions_follow_parents() -> None:
    chain = ForwardBatch([1, 0], [7, 3], [3, 2], [5, 5, 5, 5, 5])
    assert chain.positions == [7, 8, 9, 3, 4]
    chain.parents = [-1, 0, 1, -1, 0]
    assert chain.positions == [7, 8, 9, 3, 4]
    chain.parents = [-1, 0, 0, -1, -1]
    assert chain.positions == [7, 8, 8, 3, 3]


def test_a_tree_is_refused_where_only_chains_are_computed() -> None:
    with pytest.raises(UnsupportedModelError, match="use a plan that drafts chains"):
        ForwardBatch([0], [0], [3], [1, 2, 3], parents=[-1, 0, 0]).require_chains()
    ForwardBatch([0], [0], [3], [1, 2, 3]).require_chains()


PARENTS = [[-1, 0, 0, 1, 3, 2, -1, 6], [-1, 0, 1, 0, 3]]
"""Parents of the nodes, for each row of ROWS."""


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def text_of(row: int, length: int) -> list[int]:
    return [(7 * row + at) % 97 for at in range(length)]


def begun(target: Decoder | NativeDecoder, row: int, start: int) -> None:
    assert target.cache.allocate(row) == row
    target.forward(ForwardBatch([row], [0], [start], text_of(row, start), "none"))


def drafted(row: int, size: int) -> list[int]:
    return [(11 * row + 5 * node + 3) % 97 for node in range(size)]


def along_chains(target: Decoder | NativeDecoder) -> tuple[Tensor, Tensor]:
    """Logits and taps of every node of PARENTS, each from a pass over nothing but its path, as plain decoding has
    them."""
    logits, taps = [], []
    for row, start, parents in zip(ROWS, STARTS, PARENTS, strict=True):
        tokens = drafted(row, len(parents))
        for path in paths_of(parents):
            begun(target, row, start)
            out = target.forward(ForwardBatch([row], [start], [len(path)], [tokens[node] for node in path]))
            assert out.logits_TV is not None and out.taps_TF is not None
            logits.append(out.logits_TV[-1].clone())
            taps.append(out.taps_TF[-1].clone())
            target.cache.free(row)
    return torch.stack(logits), torch.stack(taps)


def as_trees(target: Decoder | NativeDecoder) -> tuple[Tensor, Tensor]:
    for row, start in zip(ROWS, STARTS, strict=True):
        begun(target, row, start)
    tokens = [token for row, parents in zip(ROWS, PARENTS, strict=True) for token in drafted(row, len(parents))]
    every = [parent for parents in PARENTS for parent in parents]
    out = target.forward(ForwardBatch(ROWS, STARTS, [len(parents) for parents in PARENTS], tokens, parents=every))
    assert out.logits_TV is not None and out.taps_TF is not None
    return out.logits_TV.clone(), out.taps_TF.clone()


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "isa"), in_turns(SHAPES))
def test_a_node_has_the_bits_of_its_path(shape: str, dtype: torch.dtype, isa: str) -> None:
    _, native = twins(SHAPES[shape], dtype)
    with restored():
        use(isa, num_threads=2)
        native.set_taps((0, 2))
        expected = along_chains(native)
        for one, other in zip(as_trees(native), expected, strict=True):
            assert torch.equal(one, other)


@needs_library
@pytest.mark.parametrize("kinds", [("Q4_1", "Q8_0"), ("Q4_K", "Q6_K")])
def test_a_node_of_a_quantised_model_has_the_bits_of_its_path(kinds: tuple[BlockKind, ...]) -> None:
    config = replace(SHAPES["llama"], hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64)
    native = native_decoder(config, blocks_of(random_weights(config), kinds), torch.bfloat16)
    native.set_taps((1,))
    expected = along_chains(native)
    for one, other in zip(as_trees(native), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_a_kept_path_has_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    for row, start, parents in zip(ROWS, STARTS, PARENTS, strict=True):
        tokens = drafted(row, len(parents))
        for path in paths_of(parents):
            _, native = twins(SHAPES["mistral-window"], dtype)
            begun(native, row, start)
            native.forward(ForwardBatch([row], [start], [len(parents)], tokens, "none", parents=parents))
            native.cache.keep([row], [start], [path])
            after = native.forward(ForwardBatch([row], [start + len(path)], [1], [42])).logits_TV
            assert after is not None
            kept = after.clone()
            native.cache.free(row)
            begun(native, row, start)
            native.forward(ForwardBatch([row], [start], [len(path)], [tokens[node] for node in path], "none"))
            plain = native.forward(ForwardBatch([row], [start + len(path)], [1], [42])).logits_TV
            assert plain is not None and torch.equal(kept, plain)


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_the_decoder_computes_the_same_trees(shape: str) -> None:
    reference, native = twins(SHAPES[shape], torch.float32)
    for target in (reference, native):
        target.set_taps((0, 2))
    for one, other in zip(as_trees(reference), as_trees(native), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("shape", ["llama", "qwen2-some-windows"])
def test_passes_of_fixed_shape_compute_the_same_trees(shape: str) -> None:
    """A recorded pass as a GPU replays it; a chain after a tree is a chain again."""
    config = SHAPES[shape]
    weights = random_weights(config)
    static, plain = (kind(config, weights.items(), num_rows=4, max_len=128) for kind in (GraphDecoder, Decoder))
    for target in (static, plain):
        target.set_taps((0, 2))
    for one, other in zip(as_trees(static), as_trees(plain), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    chains = []
    for target in (static, plain):
        target.cache.keep(ROWS, STARTS, [[0, 1, 3, 4], [0, 3]])
        out = target.forward(ForwardBatch(ROWS, [18, 7], [2, 2], [1, 2, 3, 4]))
        assert out.logits_TV is not None
        chains.append(out.logits_TV.clone())
    torch.testing.assert_close(*chains, atol=1e-4, rtol=1e-4)


@needs_library
def test_parents_must_come_first() -> None:
    _, native = twins(SHAPES["llama"], torch.float32)
    assert native.cache.allocate() == 0
    for parents in ([-1, 1, 0], [0, 0, 0], [-2, 0, 1]):
        with pytest.raises(NativeError, match="parent does not come before"):
            native.forward(ForwardBatch([0], [0], [3], [1, 2, 3], parents=parents))


def filled(target: Decoder | NativeDecoder) -> StaticKVCache:
    """Rows 0 and 2 up to their start and nine more, the same in every target."""
    for row in range(4):
        assert target.cache.allocate() == row
    for row, start in zip(ROWS, STARTS, strict=True):
        target.forward(ForwardBatch([row], [0], [start + 9], [(7 * row + at) % 97 for at in range(start + 9)], "none"))
    assert isinstance(target.kv, StaticKVCache)
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


def siblings_parent(parents: list[int]) -> tuple[Tensor, list[int]]:
    """Wrong on purpose: a token whose parent has a sibling before it sees that one in the place of its parent."""
    moved = [
        next((each for each in range(1, parent) if parents[each] == parents[parent]), parent) if parent > 0 else parent
        for parent in parents
    ]
    _, depths = ancestors(parents)
    return ancestors(moved)[0], depths


def siblings_seen(parents: list[int]) -> tuple[Tensor, list[int]]:
    """Wrong on purpose: every token sees all those before it, as in a chain."""
    _, depths = ancestors(parents)
    return torch.ones(len(parents), len(parents), dtype=torch.bool).tril(), depths


def places_for_positions(parents: list[int]) -> tuple[Tensor, list[int]]:
    """Wrong on purpose: a token stands at its place in the pass, not at its place in the text."""
    return ancestors(parents)[0], list(range(len(parents)))


@pytest.mark.parametrize(
    ("kind", "module", "mistake"),
    [
        (Decoder, "attention", siblings_parent),
        (Decoder, "attention", siblings_seen),
        pytest.param(GraphDecoder, "recorded_pass", siblings_parent, marks=pytest.mark.slow),
        pytest.param(GraphDecoder, "recorded_pass", places_for_positions, marks=pytest.mark.slow),
    ],
)
def test_a_mask_with_a_mistake_is_seen(
    kind: type[Decoder],
    module: str,
    mistake: Callable[[list[int]], tuple[Tensor, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the comparison with passes over nothing but a node's path, in ordinary passes and in those of fixed shape;
    without the mistake it holds."""
    config = SHAPES["llama"]
    decoder = kind(config, random_weights(config).items(), num_rows=4, max_len=128)
    decoder.set_taps((0, 2))
    expected = along_chains(decoder)
    torch.testing.assert_close(as_trees(decoder)[0], expected[0], atol=1e-4, rtol=1e-4)
    for row in ROWS:
        decoder.cache.free(row)
    monkeypatch.setattr(f"paceline.model.torch.{module}.ancestors", mistake)
    assert not torch.allclose(as_trees(decoder)[0], expected[0], atol=1e-2)


def test_padding_that_can_be_seen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of fixed shape fills a row of five tokens up to eight; nobody may attend to the three."""
    config = SHAPES["llama"]
    static = GraphDecoder(config, random_weights(config).items(), num_rows=4, max_len=128)
    static.set_taps((0, 2))
    expected = along_chains(static)
    right = StaticPass.set_parents

    def wrong(self: StaticPass, rows: list[int], counts: list[int], parents: list[int] | None) -> None:
        right(self, rows, counts, parents)
        for row, count in zip(rows, counts, strict=True):
            self.relation_2BJ[1, row] |= (1 << 8) - (1 << count)
            self.counts_B[row] = 8

    monkeypatch.setattr(StaticPass, "set_parents", wrong)
    first = len(PARENTS[0])
    logits_TV = as_trees(static)[0]
    torch.testing.assert_close(logits_TV[:first], expected[0][:first], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits_TV[first:], expected[0][first:], atol=1e-2)
