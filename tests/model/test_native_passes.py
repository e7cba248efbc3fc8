"""Passes of the native library: they refuse what does not fit, and write where they should and nowhere else."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from native_models import BASE, ISAS, in_order, native_decoder, needs_library, random_weights, same_bits, use
from torch import Tensor

from paceline.errors import NativeError
from paceline.model.config.decoder import DecoderConfig
from paceline.model.native import library as native_lib
from paceline.model.native.decoder import NativeDecoder, cache_view
from paceline.model.native.library import CPass, pointer
from paceline.model.target import ForwardBatch, ForwardOutput
from paceline.model.torch.decoder import Decoder

pytestmark = needs_library
DTYPES = [torch.float32, torch.bfloat16]


def tiny(**changes: Any) -> tuple[DecoderConfig, NativeDecoder]:
    config = replace(BASE, num_layers=1, **changes)
    native = native_decoder(config, random_weights(config), torch.float32, num_rows=2)
    native.cache.allocate()
    native.cache.allocate()
    return config, native


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ForwardBatch([0], [0], [1], [97]), "outside the vocabulary"),
        (ForwardBatch([0], [0], [2], [3, -1]), "outside the vocabulary"),
        (ForwardBatch([0], [127], [2], [1, 1]), "do not fit the cache"),
        (ForwardBatch([0], [-1], [1], [1]), "do not fit the cache"),
        (ForwardBatch([-1], [0], [1], [1]), "do not fit the cache"),
        (ForwardBatch([2], [0], [1], [1]), "do not fit the cache"),
        (ForwardBatch([0, 1], [0, 0], [1, 0], [1]), "do not fit the cache"),
        (ForwardBatch([], [], [], []), "at least one token"),
    ],
)
def test_passes_refuse(batch: ForwardBatch, message: str) -> None:
    """In words, before anything is written; and the next pass runs."""
    _, native = tiny()
    with pytest.raises(NativeError, match=message):
        native.forward(batch)
    assert native.cache.lengths == [0, 0] and not native.kv.keys.any() and not native.kv.values.any()
    assert native.forward(ForwardBatch([1], [0], [1], [5])).argmax_T is not None


def test_structs_are_as_long_as_the_library_s() -> None:
    """A field that one side lacks would shift all behind it: a pass whose every pointer is set works only when none
    is."""
    config, native = tiny()
    native.set_taps((0,))
    stages = torch.zeros(len(native_lib.STAGES))
    buffers = native_lib.Buffers()
    work = buffers.work
    work.num_rows, work.num_taps, work.num_logit_rows, work.logits_stride, work.stage_s = 1, 1, 1, 97, pointer(stages)
    taps, logits = torch.empty(1, 48), torch.empty(1, 97)
    work.taps, work.logits = pointer(taps), pointer(logits)
    argmax = buffers.room("argmax", 1)
    buffers.fill(rows=[0], starts=[0], counts=[1], tokens=[5], tap_layers=[0], logit_rows=[0])
    native._model.forward(native._native_cache, work)
    assert argmax[0] == logits.argmax() and (stages > 0).sum() >= 6
    expected = Decoder(config, random_weights(config).items(), max_len=128)
    expected.cache.allocate()
    torch.testing.assert_close(
        logits, expected.forward(ForwardBatch([0], [0], [1], [5])).logits_TV, atol=1e-4, rtol=1e-4
    )


SENTINEL = 0x7FB1
"""Bits of a NaN that nothing computes: what is read where nothing was written spoils the result, what is written
shows."""


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    bits = torch.full(shape, SENTINEL if dtype == torch.bfloat16 else SENTINEL << 16, dtype=_bits(dtype))
    return bits.view(dtype)


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype == torch.bfloat16 else torch.int32


def is_untouched(tensor: Tensor) -> bool:
    value = SENTINEL if tensor.dtype == torch.bfloat16 else SENTINEL << 16
    return bool((tensor.contiguous().view(_bits(tensor.dtype)) == value).all())


def random_shape(rng: random.Random) -> DecoderConfig:
    num_kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
    num_layers = rng.choice([1, 2])
    window = rng.choice([None, None, 1, 3, 20])
    return DecoderConfig(
        family="llama",
        vocab_size=rng.choice([1, 2, 5, 31, 257, 300]),
        hidden_size=rng.choice([1, 3, 15, 16, 17, 31, 32, 33, 64, 100]),
        intermediate_size=rng.choice([1, 2, 5, 16, 33, 70]),
        num_layers=num_layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=2 * rng.randint(1, 70),
        max_position=96,
        rms_norm_eps=1e-5,
        tie_embeddings=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        output_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        qk_norm=rng.random() < 0.5,
        windows=(window,) * num_layers if window else (),
        **random_traits(rng, num_layers),
    )


def random_traits(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """Draw a random config with the features that families add to Llama's layers."""
    num_experts = rng.choice([0, 0, 1, 4])
    traits: dict[str, Any] = {
        "norms": rng.choice(["before", "after", "around"]),
        "is_qk_norm_whole": rng.random() < 0.3,
        "activation": rng.choice(["silu", "gelu_tanh", "clamped_swiglu"]),
        "residual_scale": rng.choice([1.0, 0.5]),
        "attention_cap": rng.choice([0.0, 5.0]),
        "logit_cap": rng.choice([0.0, 5.0]),
        "has_sinks": rng.random() < 0.3,
        "rotary_dim": rng.choice([None, 2]),
        "ropes": tuple(rng.choice(["main", "local", "none"]) for _ in range(num_layers)),
    }
    if num_experts:
        traits |= {"num_experts": num_experts, "experts_per_token": rng.randint(1, num_experts)}
        traits |= {"normed_experts": rng.random() < 0.5, "expert_size": rng.choice([1, 16, 33])}
        traits |= rng.choice([{"shared_expert_size": 5}, {"has_expert_biases": True}, {}])
    return traits


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_passes_write_their_own_places_only(seed: int) -> None:
    """Random shapes and batches: numbers as PyTorch's, guards around outputs untouched, NaNs wherever nothing is
    written."""
    rng = random.Random(seed)
    config, dtype, num_rows, max_len = random_shape(rng), rng.choice(DTYPES), rng.randint(1, 5), rng.randint(81, 96)
    weights = random_weights(config, seed)
    reference = Decoder(config, weights.items(), num_rows=num_rows, max_len=max_len, dtype=torch.float32)
    native = NativeDecoder(config, weights.items(), num_rows=num_rows, max_len=max_len, dtype=dtype)
    use(rng.choice(ISAS), rng.choice([1, 1, 2, 3]))
    taps = tuple(rng.sample(range(config.num_layers), rng.randint(0, config.num_layers)))
    reference.set_taps(taps)
    for _ in range(num_rows):
        reference.cache.allocate()
    for part in in_order(native.kv):
        poison = guarded(tuple(native.kv.keys.shape), dtype)
        poison[..., config.head_dim :] = 0  # what stands behind a head is zero at first, and stays so
        part.copy_(poison.view(part.shape))
    lengths = [0] * num_rows
    for _ in range(3):
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
        counts = [min(rng.choice([1, 1, 2, 4, 7, 16, 17]), max_len - lengths[row]) for row in rows]
        starts = [lengths[row] for row in rows]
        tokens = rng.choices(range(config.vocab_size), k=sum(counts))
        batch = ForwardBatch(rows, starts, counts, tokens)
        expected = reference.forward(batch)
        before = in_a_row(native)
        logit_rows = rng.sample(range(len(tokens)), rng.randint(0, min(len(tokens), 64)))
        logits, argmax, tapped = guarded_pass(native, batch, taps, logit_rows)
        check_close(logits, expected.logits_TV, logit_rows, dtype)
        check_close(tapped, expected.taps_TF, range(len(tokens)) if taps else [], dtype)
        assert argmax == [int(each.argmax()) for each in logits]
        check_cache(native, before, batch)
        for row, count in zip(rows, counts, strict=True):
            lengths[row] += count - rng.randint(0, count - 1)
        reference.cache.rollback(rows, [lengths[row] for row in rows])


def guarded_pass(
    native: NativeDecoder, batch: ForwardBatch, taps: tuple[int, ...], logit_rows: list[int]
) -> tuple[Tensor, list[int], Tensor]:
    """Logits of the wanted tokens, their largest, and taps: all stand between guards, logits have some in each row."""
    vocab, width = native.vocab_size, len(taps) * native.hidden_size
    logits, tapped = (
        guarded((len(logit_rows) + 2, vocab + 3), torch.float32),
        guarded((batch.num_tokens + 2, width), native.dtype),
    )
    argmax = native_lib.int32s([-7] * (len(logit_rows) + 2))
    arrays = {"rows": batch.rows, "starts": batch.starts, "counts": batch.counts, "tokens": batch.tokens}
    arrays |= {"tap_layers": list(taps), "logit_rows": logit_rows}
    keep = {name: native_lib.int32s(values) for name, values in arrays.items()}
    work = CPass(
        num_rows=len(batch.rows),
        num_taps=len(taps),
        taps=pointer(tapped[1:]) if taps else None,
        num_logit_rows=len(logit_rows),
        logits=pointer(logits[1:]),
        logits_stride=vocab + 3,
        argmax=ctypes.addressof(argmax) + 4,
        **{name: ctypes.addressof(array) for name, array in keep.items()},
    )
    native._model.forward(cache_view(native.kv), work)
    assert is_untouched(logits[0]) and is_untouched(logits[-1]) and is_untouched(logits[:, vocab:])
    assert is_untouched(tapped[0]) and is_untouched(tapped[-1]) and argmax[0] == argmax[len(logit_rows) + 1] == -7
    return logits[1:-1, :vocab], list(argmax)[1:-1], tapped[1:-1]


def check_close(ours: Tensor, theirs: Tensor | None, logit_rows: Any, dtype: torch.dtype) -> None:
    if len(logit_rows) == 0:
        return
    assert theirs is not None
    theirs = theirs[list(logit_rows)]
    error = float((ours.float() - theirs).abs().max())
    assert error < (1e-4 if dtype == torch.float32 else 0.1) * float(theirs.abs().max() + 0.1)


def in_a_row(native: NativeDecoder) -> list[Tensor]:
    """Copies of all keys and values, position after position."""
    return [part.reshape(native.kv.keys.shape).clone() for part in in_order(native.kv)]


def check_cache(native: NativeDecoder, before: list[Tensor], batch: ForwardBatch) -> None:
    """New positions hold numbers; everything else is as it was, but for the value that shares a pair with the last new
    one."""
    head_dim, is_paired = native.config.head_dim, native.dtype == torch.bfloat16
    for now, then, is_value in zip(in_a_row(native), before, (False, True), strict=True):
        expected = then.clone()
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            end = start + count
            written = now[:, row, :, start:end, :head_dim]
            assert written.isfinite().all()
            expected[:, row, :, start:end, :head_dim] = written
            if is_value and is_paired and end % 2:
                expected[:, row, :, end, :head_dim] = 0
        assert same_bits(expected, now)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("name", "place"), [("lm_head.weight", 3), ("lm_head.weight", 90), ("model.embed_tokens.weight", 3)]
)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_have_no_largest(wrong: float, name: str, place: int, isa: str) -> None:
    """-1 in place of a token, as PyTorch's path has it, however many threads share the head."""
    use(isa)
    config = replace(BASE, num_layers=1)
    weights = dict(random_weights(config))
    weights[name] = weights[name].clone()
    weights[name][place] = wrong
    native = native_decoder(config, weights, torch.float32)
    native.cache.allocate()
    out = native.forward(ForwardBatch([0], [0], [3], [1, 2, 3]))
    assert out.logits_TV is not None and out.argmax_T == ForwardOutput(out.logits_TV, None).best_T() == [-1, -1, -1]


@pytest.mark.parametrize("place", [0, 700, 4095])
def test_a_wide_head_has_one_answer_whoever_computes_it(place: int) -> None:
    """Equal logits: the first wins, and none wins next to a NaN, in whichever order threads compute the head."""
    config = replace(BASE, num_layers=1, vocab_size=4096)
    weights = dict(random_weights(config))
    head = torch.ones_like(weights["lm_head.weight"])
    native_lib.set_threads(3)
    batch = ForwardBatch([0], [0], [3], [1, 2, 3], only_argmax=True)
    native = native_decoder(config, weights | {"lm_head.weight": head}, torch.float32)
    broken = head.clone()
    broken[place] = float("nan")
    other = native_decoder(config, weights | {"lm_head.weight": broken}, torch.float32)
    for each, expected in ((native, 0), (other, -1)):
        each.cache.allocate()
        for _ in range(20):
            assert each.forward(batch).argmax_T == [expected] * 3
            each.cache.rollback([0], [0])


def test_a_window_as_large_as_an_integer_can_be_is_none() -> None:
    """Position + window is beyond 32 bits."""
    (_, plain), (_, windowed) = tiny(), tiny(windows=(2**31 - 1,))
    batch = ForwardBatch([0], [0], [4], [5, 6, 7, 8])
    assert same_bits(plain.forward(batch).logits_TV, windowed.forward(batch).logits_TV)
