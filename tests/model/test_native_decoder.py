"""The native decoder against the PyTorch one, family by family; and against itself in other company: no bit may
differ."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from native_models import (
    BASE,
    ISAS,
    SHAPES,
    blocks_of,
    in_turns,
    native_decoder,
    needs_library,
    random_weights,
    same_bits,
    tell,
    tokens_of,
    twins,
    use,
)
from torch import Tensor

from paceline.errors import ContextLengthError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.gguf.blocks import BlockKind, Blocks
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch, ForwardOutput, head_weight
from paceline.model.torch.decoder import Decoder

pytestmark = [pytest.mark.slow, needs_library]
TAPS = (2, 0)
DTYPES = [torch.float32, torch.bfloat16]
NEAR_TIE = 0.02
"""Tolerance in bfloat16 at these sizes, as a share of the largest logit; the two best are close."""
MOST_FLIPS = 0.1
"""Share of positions whose best token may be another near-tie: 0 to 4 of 55 here, by how PyTorch rounds on a processor.
Every flip must be a near-tie, and the errors smaller than PyTorch's, so this only limits their number."""


@cache
def tapped_twins(shape: str, dtype: torch.dtype) -> tuple[Decoder, NativeDecoder]:
    reference, native = twins(SHAPES[shape], dtype)
    reference.set_taps(TAPS)
    native.set_taps(TAPS)
    return reference, native


@cache
def reference_outputs(shape: str, dtype: torch.dtype) -> list[ForwardOutput]:
    return tell(tapped_twins(shape, dtype)[0])


def relative(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


@pytest.mark.parametrize(("shape", "isa"), in_turns(SHAPES))
def test_float32_is_pytorch_s(shape: str, isa: str) -> None:
    native = tapped_twins(shape, torch.float32)[1]
    one_thread: list[ForwardOutput] = []
    for num_threads in (1, 3):
        use(isa, num_threads)
        outputs = tell(native)
        for ours, theirs in zip(outputs, reference_outputs(shape, torch.float32), strict=True):
            assert ours.taps_TF is not None and theirs.taps_TF is not None
            assert relative(ours.taps_TF, theirs.taps_TF) < 1e-4
            assert (ours.logits_TV is None) == (theirs.logits_TV is None)
            if ours.logits_TV is not None and theirs.logits_TV is not None:
                assert relative(ours.logits_TV, theirs.logits_TV) < 1e-4
                assert ours.argmax_T == theirs.best_T()
        one_thread = one_thread or outputs
        assert all(map(same_output, outputs, one_thread)), "the number of threads changes the numbers"


def same_output(left: ForwardOutput, right: ForwardOutput) -> bool:
    is_same = same_bits(left.logits_TV, right.logits_TV) and same_bits(left.taps_TF, right.taps_TF)
    return is_same and left.argmax_T == right.argmax_T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "shape", [shape for shape, config in SHAPES.items() if not config.num_experts and not config.delta]
)
def test_bfloat16_errs_no_more_than_pytorch_and_flips_near_ties_only(shape: str, isa: str) -> None:
    native = tapped_twins(shape, torch.bfloat16)[1]
    use(isa)
    num_positions, num_flips, ours_off, theirs_off = 0, 0, 0.0, 0.0
    for ours, theirs, exact in zip(
        tell(native), reference_outputs(shape, torch.bfloat16), reference_outputs(shape, torch.float32), strict=True
    ):
        assert ours.taps_TF is not None and theirs.taps_TF is not None and ours.taps_TF.dtype == torch.bfloat16
        assert relative(ours.taps_TF, theirs.taps_TF) < 0.03
        if ours.logits_TV is None or theirs.logits_TV is None or exact.logits_TV is None:
            continue
        ours_off += float((ours.logits_TV.float() - exact.logits_TV).square().sum())
        theirs_off += float((theirs.logits_TV.float() - exact.logits_TV).square().sum())
        largest = float(exact.logits_TV.abs().max())
        for own, other, logits_V in zip(ours.best_T(), theirs.best_T(), exact.logits_TV, strict=True):
            num_positions += 1
            num_flips += own != other
            assert abs(float(logits_V[own] - logits_V[other])) < NEAR_TIE * largest, "this was no near-tie"
    assert num_flips <= MOST_FLIPS * num_positions, f"{num_flips} of {num_positions} near-ties fell the other way"
    assert ours_off < theirs_off, "PyTorch rounds in more places"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", ["oss-experts", "shared-expert", "delta-nets"])
def test_bfloat16_errs_no_more_than_pytorch_in_the_middle(shape: str, isa: str) -> None:
    """A few tokens are further off: rounding sends them to another expert, or a norm makes much of what is all but
    nothing."""
    native = tapped_twins(shape, torch.bfloat16)[1]
    use(isa)
    off: tuple[list[Tensor], list[Tensor]] = [], []
    for *outputs, exact in zip(
        tell(native), reference_outputs(shape, torch.bfloat16), reference_outputs(shape, torch.float32), strict=True
    ):
        assert exact.taps_TF is not None
        for out, errors in zip(outputs, off, strict=True):
            assert out.taps_TF is not None
            errors.append((out.taps_TF.float() - exact.taps_TF).norm(dim=1) / exact.taps_TF.norm(dim=1))
    ours, theirs = map(torch.cat, off)
    assert ours.median() < min(theirs.median(), torch.tensor(0.02))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_not_asked_for_changes_nothing(shape: str, dtype: torch.dtype) -> None:
    """Only the largest logit, or no taps: the rest is the same to the bit."""
    native = tapped_twins(shape, dtype)[1]
    whole, best = tell(native), tell(native, only_argmax=True)
    native.set_taps(())
    untapped = tell(native)
    native.set_taps(TAPS)
    for full, short, bare in zip(whole, best, untapped, strict=True):
        assert short.logits_TV is None and bare.taps_TF is None
        assert short.argmax_T == full.argmax_T == bare.argmax_T
        assert same_bits(full.taps_TF, short.taps_TF) and same_bits(full.logits_TV, bare.logits_TV)
        if full.logits_TV is not None:
            assert full.argmax_T == full.logits_TV.argmax(-1).tolist()
        else:
            assert full.argmax_T is None


SPLITS = [
    [1] * 64,
    [64],
    [2] * 32,
    [3] * 21 + [1],
    [5, 6, 7, 8, 9, 10, 11, 8],
    [16] * 4,
    [17, 31, 16],
    [33, 12, 19],
    [1, 63],
]


BATCHED = ["llama", "mistral-window", "qwen2-biases", "qwen3-norms", "gemma-around", "olmo-after"]
BATCHED += ["oss-experts", "shared-expert"]
COMPANY = [
    (shape, isa, DTYPES[(number + place) % 2]) for number, shape in enumerate(BATCHED) for place, isa in enumerate(ISAS)
]
"""Every pair of a shape, an instruction set and a number type."""


@pytest.mark.parametrize(("shape", "isa", "dtype"), COMPANY)
def test_a_row_is_the_same_in_any_company(shape: str, isa: str, dtype: torch.dtype) -> None:
    """Token by token, in chunks of every size, and beside other rows: the same bits, in the cache too."""
    native, tokens = tapped_twins(shape, dtype)[1], tokens_of(SHAPES[shape], 64, seed=5)
    use(isa)
    alone = chunked(native, tokens, SPLITS[0])
    keys, values = live(native, 0)
    for split in SPLITS[1:]:
        assert same_output(chunked(native, tokens, split), alone), split
        assert all(map(same_bits, live(native, 0), (keys, values))), split
    for split, seed in ((SPLITS[0], 1), (SPLITS[4], 2), (SPLITS[5], 3)):
        assert same_output(chunked(native, tokens, split, random.Random(seed)), alone), split
        assert all(map(same_bits, live(native, 2), (keys, values))), split


def live(native: NativeDecoder, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's 64 tokens."""
    return native.kv.keys[:, row, :, :64].clone(), native.kv.values[:, row, :, :64].clone()


def chunked(
    native: NativeDecoder, tokens: list[int], split: list[int], company: random.Random | None = None
) -> ForwardOutput:
    """Logits, taps and largest of every token in passes of these sizes; with company in row 2, others before and behind
    it."""
    while native.cache.allocate() is not None:
        pass
    native.cache.rollback([0, 1, 2, 3], [0] * 4)
    logits, taps, argmax, done = [], [], [], 0
    for count in split:
        rows, counts, chunk = [0], [count], tokens[done : done + count]
        begin = 0
        if company:
            rows, counts = [3, 2, 0], [company.randint(1, 2), count, company.randint(1, 2)]
            others = company.choices(range(native.vocab_size), k=4)
            begin, chunk = counts[0], others[: counts[0]] + chunk + others[2 : 2 + counts[2]]
        starts = [native.cache.lengths[row] for row in rows]
        if company and max(starts) > 100:
            native.cache.rollback([3, 0], [0, 0])
            starts = [native.cache.lengths[row] for row in rows]
        out = native.forward(ForwardBatch(rows, starts, counts, chunk))
        assert out.logits_TV is not None and out.taps_TF is not None and out.argmax_T is not None
        logits.append(out.logits_TV[begin : begin + count].clone())
        taps.append(out.taps_TF[begin : begin + count])
        argmax += out.argmax_T[begin : begin + count]
        done += count
    return ForwardOutput(torch.cat(logits), torch.cat(taps), argmax)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_full_pass_of_many_rows(dtype: torch.dtype) -> None:
    """64 rows of one token each, against the same rows one by one."""
    config = SHAPES["llama"]
    native = native_decoder(config, random_weights(config), dtype, num_rows=64)
    rows, tokens = [native.cache.allocate() or 0 for _ in range(64)], tokens_of(config, 64, seed=1)
    use(ISAS[0], 2)
    together = native.forward(ForwardBatch(rows, [0] * 64, [1] * 64, tokens)).logits_TV
    assert together is not None
    together = together.clone()
    native.cache.rollback(rows, [0] * 64)
    for row, token in zip(rows, tokens, strict=True):
        assert same_bits(native.forward(ForwardBatch([row], [0], [1], [token])).logits_TV, together[row : row + 1])


def assert_at_least_as_close(
    ours: list[ForwardOutput], theirs: list[ForwardOutput], exact: list[ForwardOutput]
) -> None:
    """Integer products round neither weights nor sums: on average no further from float32 than bfloat16 products."""
    errors = []
    for outputs in (ours, theirs):
        pairs = [(out.logits_TV, reference.logits_TV) for out, reference in zip(outputs, exact, strict=True)]
        errors.append(
            [relative(out, reference) for out, reference in pairs if out is not None and reference is not None]
        )
    assert 0 < sum(errors[0]) < 1.1 * sum(errors[1]) and max(errors[0]) < 0.03


WHOLE_BLOCKS = replace(BASE, hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16, tie_embeddings=True)
"""Rows of 32 at a time, as quantised matrices must be."""
EXPERTS: dict[str, Any] = {"num_experts": 5, "experts_per_token": 2, "expert_size": 32, "shared_expert_size": 64}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_experts_in_blocks(kind: BlockKind, isa: str) -> None:
    """In float32 they are their dense numbers; in bfloat16, whose products take planes, the same bits in any
    company."""
    config = replace(WHOLE_BLOCKS, **EXPERTS, dense_layers=(0,))
    blocks = blocks_of(random_weights(config), (kind,))
    dense = {name: tensor.dense() if isinstance(tensor, Blocks) else tensor for name, tensor in blocks.items()}
    exact = native_decoder(config, dense, torch.float32)
    use(isa, 2)
    assert all(map(same_output, tell(native_decoder(config, blocks, torch.float32)), tell(exact)))
    ours, tokens = native_decoder(config, blocks, torch.bfloat16), tokens_of(config, 64, seed=5)
    ours.set_taps(TAPS)
    alone = chunked(ours, tokens, SPLITS[0])
    for split in SPLITS[1:]:
        assert same_output(chunked(ours, tokens, split), alone), split
    assert same_output(chunked(ours, tokens, SPLITS[4], random.Random(2)), alone)
    exact.set_taps(TAPS)
    expected = chunked(exact, tokens, SPLITS[5])
    assert alone.taps_TF is not None and expected.taps_TF is not None
    off = (alone.taps_TF.float() - expected.taps_TF).norm(dim=1) / expected.taps_TF.norm(dim=1)
    assert off.median() < 0.01, "few tokens choose another expert by rounding"


MIXTURES: list[tuple[BlockKind | None, ...]] = [
    ("Q4_1",), ("Q8_0",), ("Q5_0",), ("Q4_1", "Q8_0"), ("Q8_0", None, "Q4_1", "Q5_1", None),
]  # fmt: skip
QUANTISED = [
    (kinds, DTYPES[(number + place) % 2], isa)
    for number, kinds in enumerate(MIXTURES)
    for place, isa in enumerate(ISAS)
]
"""Every pair of formats, a number type and an instruction set."""


@pytest.mark.parametrize(("kinds", "dtype", "isa"), QUANTISED)
def test_blocks_are_their_dense_numbers(kinds: tuple[BlockKind | None, ...], dtype: torch.dtype, isa: str) -> None:
    config = (
        WHOLE_BLOCKS if len(kinds) < 3 else replace(WHOLE_BLOCKS, tie_embeddings=False, qkv_bias=True, family="qwen2")
    )
    blocks = blocks_of(random_weights(config), kinds)
    dense = {name: tensor.dense() if isinstance(tensor, Blocks) else tensor for name, tensor in blocks.items()}
    use(isa)
    ours, expanded = native_decoder(config, blocks, dtype), native_decoder(config, dense, dtype)
    use(isa, 2)
    if dtype == torch.bfloat16:
        assert_at_least_as_close(tell(ours), tell(expanded), tell(native_decoder(config, dense, torch.float32)))
    else:
        assert all(map(same_output, tell(ours), tell(expanded)))
    if len(kinds) == 1:
        assert ours.weight_format == kinds[0]
        assert ours.weight_bytes < expanded.weight_bytes * (1.1 if kinds[0] == "Q8_0" else 0.75) * 2 / dtype.itemsize
    tokens = torch.arange(config.vocab_size)
    assert same_bits(ours.embed(tokens), expanded.embed(tokens))
    assert same_bits(ours.embed(tokens), dense["model.embed_tokens.weight"].to(dtype))


def test_blocks_give_the_same_bits_on_every_instruction_set() -> None:
    """Products in integers, norms, attention and what lies between: a pass of a model in blocks is the same everywhere.

    Sums of another order differ in the last of 24 bits, and what is rounded to eight of them shows one in thousands:
    many numbers are needed to see it. Products of every format have a test of their own in test_native_lib.py.
    """
    config = replace(WHOLE_BLOCKS, hidden_size=512, intermediate_size=1024, num_heads=8, head_dim=64)
    blocks = blocks_of(random_weights(config), ("Q6_K", "Q5_1"))
    outputs = []
    for isa in ISAS:
        use(isa, 2)
        target = native_decoder(config, blocks, torch.bfloat16)
        outputs.append([out for seed in range(4) for out in tell(target, seed)])
    for other in outputs[1:]:
        assert all(map(same_output, other, outputs[0]))


@pytest.mark.parametrize("shape", ["llama", "qwen2-biases"])
def test_embedding_and_head_are_the_reference_s(shape: str) -> None:
    reference, native = tapped_twins(shape, torch.float32)
    tokens, hidden_TD = torch.tensor(tokens_of(SHAPES[shape], 9, seed=2)), torch.randn(7, native.hidden_size)
    assert torch.equal(native.embed(tokens), reference.embed(tokens))
    assert relative(native.head(hidden_TD), reference.head(hidden_TD)) < 1e-5
    rounded, exact = tapped_twins(shape, torch.bfloat16)[1], tapped_twins(shape, torch.bfloat16)[0]
    assert torch.equal(rounded.embed(tokens), exact.embed(tokens))
    assert head_weight(rounded).dtype == head_weight(exact).dtype == torch.bfloat16
    assert torch.equal(head_weight(rounded), head_weight(exact))


def test_other_dtypes_of_weights() -> None:
    """A checkpoint in bfloat16 is kept as it is, and one in float16 but for bfloat16 products."""
    config = SHAPES["llama"]
    for stored, formats in ((torch.bfloat16, ("bfloat16", "bfloat16")), (torch.float16, ("float16", "bfloat16"))):
        weights = {name: tensor.to(stored) for name, tensor in random_weights(config).items()}
        for dtype, format in zip(DTYPES, formats, strict=True):
            ours = native_decoder(config, weights, dtype)
            assert ours.weight_format == format
            expected = native_decoder(config, {name: tensor.float() for name, tensor in weights.items()}, dtype)
            assert all(map(same_output, tell(ours), tell(expected)))


def test_the_cache_can_be_replaced() -> None:
    native = tapped_twins("llama", torch.float32)[1]
    before = tell(native)
    native.allocate_cache(6, 200)
    assert (native.cache.num_rows, native.cache.max_len) == (6, 200)
    assert all(map(same_output, tell(native), before))
    with pytest.raises(ContextLengthError, match="lower max_len"):
        native.allocate_cache(1, 257)
    native.allocate_cache(4, 128)


def test_a_sequence_may_fill_its_row() -> None:
    config: DecoderConfig = SHAPES["qwen3-norms"]
    reference, native = twins(config, torch.float32, num_rows=1)
    tokens: list[int] = tokens_of(config, 128, seed=3)
    outputs: list[Any] = []
    for decoder in (reference, native):
        decoder.cache.allocate()
        decoder.forward(ForwardBatch([0], [0], [100], tokens[:100], "none"))
        outputs.append(decoder.forward(ForwardBatch([0], [100], [28], tokens[100:])).logits_TV)
    assert relative(outputs[1], outputs[0]) < 1e-4
