"""Three ways of attending over packed blocks: equal to each other, and blind to what a block must not see."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paceline.draft.dflash.config import DFlashConfig, new_config
from paceline.train.learn.attention import WAYS, FlexAttention, Layout, compiled, make_attention

# On CPU flex attention is spelt out instead of compiled, which is what the test wants.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

HEADS, KV_HEADS, HEAD_DIM, SIZE = 4, 2, 8, 4
CONTEXTS = (9, 5, 14)
ANCHORS = (
    [3, 9, 5],
    [5],
    [14, 1, 8, 11],
)  # in no order, an anchor at 1, two that overlap, contexts that end at the last
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding-both-ways": {"is_causal": False, "sliding_window": 5, "use_sliding_window": True},
    "sliding-causal": {"is_causal": True, "sliding_window": 5, "use_sliding_window": True},
    "narrower-than-block": {"is_causal": False, "sliding_window": 2, "use_sliding_window": True},
}


def config_of(kind: str, head_dim: int = HEAD_DIM) -> DFlashConfig:
    keys = dict(KINDS[kind])
    if "sliding_window" in keys:
        keys["layer_types"] = ["sliding_attention"]
    raw = new_config(HEADS * head_dim, 11, 6, num_layers=1, head_dim=head_dim, block_size=SIZE, **keys)
    return DFlashConfig.from_json(raw | {"num_key_value_heads": KV_HEADS})


def layout_of() -> Layout:
    return Layout(CONTEXTS, tuple(torch.tensor(each) for each in ANCHORS), SIZE)


def inputs(seed: int = 0) -> list[Tensor]:
    """Query, own key and value, context key and value."""
    generator = torch.Generator().manual_seed(seed)
    slots, context = sum(map(len, ANCHORS)) * SIZE, sum(CONTEXTS)
    shapes = [(slots, HEADS), (slots, KV_HEADS), (slots, KV_HEADS), (context, KV_HEADS), (context, KV_HEADS)]
    return [torch.randn(*shape, HEAD_DIM, generator=generator).requires_grad_() for shape in shapes]


def attended(way: str, kind: str, tensors: list[Tensor]) -> Tensor:
    query, own_key, own_value, context_key, context_value = tensors
    attend = make_attention(way, config_of(kind), layout_of(), torch.float32)
    return attend(0, query, (own_key, own_value), (context_key, context_value))


def rotated(heads_HD: Tensor, position: int) -> Tensor:
    half = HEAD_DIM // 2
    angle = position / 10000.0 ** (torch.arange(half) / half)
    first, second = heads_HD[..., :half], heads_HD[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def slot_by_slot(kind: str, tensors: list[Tensor]) -> Tensor:
    """The definition: each slot looks at a list of keys chosen one by one."""
    query, own_key, own_value, context_key, context_value = tensors
    keys, out, block, begin = KINDS[kind], [], 0, 0
    window, is_causal = keys.get("sliding_window", 10**9), keys.get("is_causal", False)
    for length, anchors in zip(CONTEXTS, ANCHORS, strict=True):
        for anchor in anchors:
            for slot in range(SIZE):
                at = anchor + slot
                seen = [
                    (rotated(context_key[begin + place], place), context_value[begin + place])
                    for place in range(length)
                    if place < anchor and at - place < window
                ]
                seen += [
                    (rotated(own_key[block * SIZE + other], anchor + other), own_value[block * SIZE + other])
                    for other in range(SIZE)
                    if abs(other - slot) < window and not (is_causal and other > slot)
                ]
                key, value = (
                    torch.stack(part).repeat_interleave(HEADS // KV_HEADS, dim=1) for part in zip(*seen, strict=True)
                )
                scores = torch.einsum("hd,nhd->hn", rotated(query[block * SIZE + slot], at), key) / HEAD_DIM**0.5
                out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), value).flatten())
            block += 1
        begin += length
    return torch.stack(out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_the_definition(kind: str) -> None:
    tensors = inputs()
    expected = slot_by_slot(kind, tensors)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    gradients = torch.autograd.grad(expected, tensors, upstream)
    for way in ("split", "sdpa"):  # flex has no backward without its kernel
        out = attended(way, kind, tensors)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5, msg=way)
        for own, theirs in zip(torch.autograd.grad(out, tensors, upstream), gradients, strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-6, rtol=1e-4, msg=way)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sliding-causal", "narrower-than-block"])
def test_flex_equals_the_definition(kind: str) -> None:
    """Slow where it is spelt out: each part of its mask, there and not."""
    tensors = inputs()
    with torch.no_grad():
        torch.testing.assert_close(attended("flex", kind, tensors), slot_by_slot(kind, tensors), atol=2e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["split", "sdpa"])  # flex, which compiles for long, equals the definition (above)
def test_a_block_sees_neither_other_blocks_nor_documents_nor_what_follows(way: str, kind: str) -> None:
    tensors = [each.detach() for each in inputs()]
    before = attended(way, kind, tensors).unflatten(0, (-1, SIZE))
    others = [each.detach() for each in inputs(seed=1)]
    block = begin = 0
    for length, anchors in zip(CONTEXTS, ANCHORS, strict=True):
        for anchor in anchors:
            changed = [each.clone() for each in others]
            mine, seen = slice(block * SIZE, (block + 1) * SIZE), slice(begin, begin + min(anchor, length))
            for tensor, original in zip(changed[:3], tensors[:3], strict=True):
                tensor[mine] = original[mine]
            for tensor, original in zip(changed[3:], tensors[3:], strict=True):
                tensor[seen] = original[seen]
            after = attended(way, kind, changed).unflatten(0, (-1, SIZE))
            torch.testing.assert_close(after[block], before[block], atol=1e-6, rtol=1e-6)
            if "sliding_window" not in KINDS[kind]:  # and it does see the last position before its anchor
                changed[4][begin + min(anchor, length) - 1] += 1.0
                again = attended(way, kind, changed).unflatten(0, (-1, SIZE))
                assert (again[block] - before[block]).abs().amax(-1).min() > 1e-3
            block += 1
        begin += length


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_causal_slots_do_not_see_later_ones(way: str) -> None:
    tensors = [each.detach() for each in inputs()]
    before = attended(way, "causal", tensors).unflatten(0, (-1, SIZE))
    for tensor in tensors[1:3]:
        tensor.unflatten(0, (-1, SIZE))[:, 2:] += 1.0
    after = attended(way, "causal", tensors).unflatten(0, (-1, SIZE))
    torch.testing.assert_close(after[:, :2], before[:, :2], atol=1e-6, rtol=1e-6)
    assert (after[:, 2:] - before[:, 2:]).abs().amax(-1).min() > 1e-3


def test_layers_of_different_kinds_get_their_own_masks() -> None:
    raw = new_config(HEADS * HEAD_DIM, 11, 6, num_layers=2, head_dim=HEAD_DIM, block_size=SIZE, sliding_window=5)
    raw |= {
        "layer_types": ["full_attention", "sliding_attention"],
        "num_key_value_heads": KV_HEADS,
        "use_sliding_window": True,
    }
    query, own_key, own_value, context_key, context_value = tensors = inputs()
    for way in ("split", "sdpa"):
        attend = make_attention(way, DFlashConfig.from_json(raw), layout_of(), torch.float32)
        outs = [attend(layer, query, (own_key, own_value), (context_key, context_value)) for layer in (0, 1)]
        torch.testing.assert_close(outs[0], attended(way, "full", tensors))
        torch.testing.assert_close(outs[1], attended(way, "sliding-causal", tensors))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["sliding-both-ways", "sliding-causal"])
def test_contexts_may_begin_where_the_window_does(way: str, kind: str) -> None:
    """Positions that no block sees are left out, and what is left stands where it stood."""
    window, layout = KINDS[kind]["sliding_window"], layout_of()
    starts = tuple(max(0, min(anchors) - window + 1) for anchors in ([3, 9, 5], [5], [14, 8, 11]))
    anchors = (ANCHORS[0], ANCHORS[1], [14, 8, 11])
    lens = tuple(length - start for length, start in zip(CONTEXTS, starts, strict=True))
    assert starts == (0, 1, 4)
    slots = [block for block in range(8) if block != 5]  # the third document without its anchor at 1
    rows = torch.cat([torch.arange(SIZE) + block * SIZE for block in slots])
    begins = [0, CONTEXTS[0], CONTEXTS[0] + CONTEXTS[1]]
    kept = torch.cat([torch.arange(b + s, b + n) for b, s, n in zip(begins, starts, CONTEXTS, strict=True)])
    query, own_key, own_value, context_key, context_value = tensors = [each.detach() for each in inputs()]
    short = Layout(lens, tuple(torch.tensor(each) for each in anchors), SIZE, starts)
    attend = make_attention(way, config_of(kind), short, torch.float32)
    actual = attend(0, query[rows], (own_key[rows], own_value[rows]), (context_key[kept], context_value[kept]))
    torch.testing.assert_close(actual, attended(way, kind, tensors)[rows], atol=2e-6, rtol=1e-5)
    assert layout.starts == (0, 0, 0)


def test_auto_is_split_without_a_gpu() -> None:
    assert type(make_attention("auto", config_of("full"), layout_of(), torch.float32)) is WAYS["split"]


@pytest.mark.nightly
@pytest.mark.slow
def test_packs_of_every_size_share_what_is_compiled() -> None:
    """The mask is compiled for the first pack alone, the product for the first two sizes: no other number of documents,
    blocks or positions makes them again."""
    from torch._dynamo.testing import CompileCounter  # takes a second

    counters = CompileCounter(), CompileCounter()
    functions = compiled(counters[0])[0], compiled(counters[1])[1]
    counts: list[tuple[int, ...]] = []
    packs = [*PACKS[:3], PACKS[4]]
    for seed, (contexts, anchors) in enumerate(packs):
        layout = Layout(contexts, tuple(torch.tensor(each) for each in anchors), SIZE)
        tensors = inputs_of(layout, seed)
        with mock.patch.object(FlexAttention, "_functions", return_value=functions):
            actual = attend_with("flex", layout, tensors)
        counts.append(tuple(each.frame_count for each in counters))
        torch.testing.assert_close(actual, attend_with("split", layout, tensors), atol=2e-6, rtol=1e-5)
    assert counts[:2] == [(1, 1)] * 2 and counts[2:] == [(2, 1)] * (len(packs) - 2)


REAL_HEADS = [(128, torch.bfloat16), (64, torch.bfloat16), (256, torch.bfloat16)]
REAL_HEADS += [(size, torch.float32) for size, _ in REAL_HEADS]
"""Sizes and dtypes of heads: bfloat16 is what runs, float32 is --full-precision; the most frequent comes first."""
named = pytest.mark.parametrize(("head_dim", "dtype"), REAL_HEADS, ids=lambda each: str(each).removeprefix("torch."))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@named
def test_the_compiled_kernel_is_that_of_all_sizes_and_equals_split(head_dim: int, dtype: torch.dtype) -> None:
    """Outputs and gradients. Each case compiles anew, for up to a minute: `-k 128-bfloat16` runs the first alone."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # else a later case meets the limit of kernels for one function
    compiled.cache_clear()
    numbers: list[int] = []
    for seed in range(len(PACKS)):
        assert_way_equals_split("flex", seed, head_dim, dtype, "cuda")
        numbers.append(counters["stats"]["unique_graphs"])
    assert numbers[-1] == numbers[2], "nothing is compiled after the second size"


@pytest.mark.slow
@named
def test_heads_of_real_sizes(head_dim: int, dtype: torch.dtype) -> None:
    """The GPU test's check, of the other way that runs on a CPU."""
    for seed in (0, 1):
        assert_way_equals_split("sdpa", seed, head_dim, dtype, "cpu")


def assert_way_equals_split(way: str, number: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients over one of PACKS, in `dtype`, against `split` in float32 of the same numbers."""
    contexts, anchors = PACKS[number]
    layout = Layout(contexts, tuple(torch.tensor(each, device=device) for each in anchors), SIZE)
    rounded = [each.to(device, dtype) for each in inputs_of(layout, number, head_dim)]
    wanted_inputs = [each.float().requires_grad_() for each in rounded]
    found_inputs = [each.requires_grad_() for each in rounded]
    expected, actual = attend_with("split", layout, wanted_inputs), attend_with(way, layout, found_inputs)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    pairs = [(actual, expected)]
    pairs += zip(
        torch.autograd.grad(actual, found_inputs, upstream),
        torch.autograd.grad(expected, wanted_inputs, upstream.float()),
        strict=True,
    )
    # TensorFloat-32's, and that of keys rounded after their rotation.
    tolerance = 5e-3 if dtype == torch.float32 else 2.5e-2
    for own, other in pairs:
        assert own.dtype == dtype and torch.isfinite(own).all()
        assert (own.float() - other).norm() <= tolerance * other.norm()


PACKS = [
    ((9, 5, 14), ([3, 9, 5], [5], [14, 1, 8, 11])),
    ((30,), ([7, 30, 12, 9, 22],)),
    ((300, 140), ([200, *range(1, 90)], [139])),
    ((64, 64, 64, 64, 900), ([1], [2], [3], [64], list(range(400, 480)))),
    ((128,), ([128],)),
]
"""(lengths of contexts, anchors) of packs: few tiles and many, of slots and of keys."""


def inputs_of(layout: Layout, seed: int, head_dim: int = HEAD_DIM) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    slots, context = sum(map(len, layout.anchors)) * SIZE, sum(layout.context_lens)
    shapes = [(slots, HEADS), (slots, KV_HEADS), (slots, KV_HEADS), (context, KV_HEADS), (context, KV_HEADS)]
    return [torch.randn(*shape, head_dim, generator=generator) for shape in shapes]


def attend_with(way: str, layout: Layout, tensors: list[Tensor]) -> Tensor:
    query, own_key, own_value, context_key, context_value = tensors
    attend = make_attention(way, config_of("full", query.shape[-1]), layout, query.dtype)
    return attend(0, query, (own_key, own_value), (context_key, context_value))
