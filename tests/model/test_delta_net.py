"""Gated delta nets with a state that lags behind: against the recurrence token by token, and taken back in every
way."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from native_models import needs_library
from torch import Tensor
from torch.nn import functional as F

from paceline.model.checkpoint import expected_shapes, random_tensors
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.native.decoder import NativeDecoder
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.delta_cache import HALF, ROOM, DeltaCache
from paceline.model.torch.delta_net import DeltaNet
from paceline.model.torch.recorded_pass import GraphDecoder

VOCAB = 50
SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=3, kernel=3)
CONFIG = DecoderConfig(
    "qwen3_5_text", VOCAB, 16, 24, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, max_position=512,
    qk_norm=True,
    norm_offset=1.0, output_gate=True, rotary_dim=4, delta=SHAPE, linear_layers=(0, 2),
)  # fmt: skip


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in expected_shapes(CONFIG).items()}
    return {name: tensor - 2.0 if name.endswith("A_log") else tensor for name, tensor in drawn.items()}


Made = type[Decoder] | type[NativeDecoder]


@pytest.fixture(params=[Decoder, GraphDecoder, pytest.param(NativeDecoder, marks=needs_library)])
def decoder_class(request: pytest.FixtureRequest) -> Made:
    return request.param


def target_of(num_rows: int = 3, decoder_class: Made = Decoder) -> Decoder | NativeDecoder:
    return decoder_class(CONFIG, weights().items(), num_rows=num_rows, max_len=300)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def feed(target: Decoder | NativeDecoder, row: int, tokens: list[int], parents: list[int] | None = None) -> Tensor:
    out = target.forward(ForwardBatch([row], [target.cache.lengths[row]], [len(tokens)], tokens, parents=parents))
    assert out.logits_TV is not None
    return out.logits_TV.clone()


def one_by_one(tokens: list[int]) -> Tensor:
    """Logits [T, V] of a fresh cache."""
    return _one_by_one(tuple(tokens))


@cache
def _one_by_one(tokens: tuple[int, ...]) -> Tensor:
    target = target_of(1)
    row = target.cache.allocate()
    assert row is not None
    return torch.cat([feed(target, row, [token]) for token in tokens])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)


def recurrence(parts: dict[str, Tensor], hidden_TD: Tensor) -> Tensor:
    """The layer as its equations say it, token after token, in double precision."""
    w = {name.removeprefix("linear_attn."): tensor.double() for name, tensor in parts.items()}
    x, keys, share = hidden_TD.double(), SHAPE.keys, SHAPE.num_value_heads // SHAPE.num_key_heads
    mixed, out = x @ w["in_proj_qkv.weight"].T, []
    state = torch.zeros(SHAPE.num_value_heads, SHAPE.key_dim, SHAPE.value_dim, dtype=torch.double)
    for at in range(len(x)):
        window = torch.stack([mixed[at - back] if at >= back else torch.zeros_like(mixed[0]) for back in (2, 1, 0)])
        q, k, v = F.silu((window * w["conv1d.weight"][:, 0].T).sum(0)).split([keys, keys, SHAPE.values])
        q, k = (part.view(SHAPE.num_key_heads, -1).repeat_interleave(share, 0) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        v, beta = v.view(SHAPE.num_value_heads, -1), torch.sigmoid(w["in_proj_b.weight"] @ x[at])
        state = (
            state * (-w["A_log"].exp() * F.softplus(w["in_proj_a.weight"] @ x[at] + w["dt_bias"])).exp()[:, None, None]
        )
        change = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k))
        state = state + torch.einsum("hk,hv->hkv", k, change)
        output = torch.einsum("hkv,hk->hv", state, q) * SHAPE.key_dim**-0.5
        normed = output / (output.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * w["norm.weight"]
        out.append((normed * F.silu(w["in_proj_z.weight"] @ x[at]).view_as(normed)).flatten() @ w["out_proj.weight"].T)
    return torch.stack(out).float()


@pytest.mark.slow
def test_the_layer_is_the_recurrence() -> None:
    """Passes of every size, over the room of the trail and several times it."""
    prefix = "model.layers.0."
    parts = {name.removeprefix(prefix): tensor for name, tensor in weights().items() if name.startswith(prefix)}
    hidden_TD = torch.randn(3 * ROOM + 20, 16, generator=torch.Generator().manual_seed(1))
    expected = recurrence(
        {name: tensor for name, tensor in parts.items() if name.startswith("linear_attn.")}, hidden_TD
    )
    layer, cache = DeltaNet(CONFIG, parts), DeltaCache(CONFIG, 1, 300, torch.float32)
    cache.allocate()
    at = 0
    for count in (1, 2, 1, 30, ROOM + 5, 1, 1, HALF, HALF + 1, len(hidden_TD)):
        count = min(count, len(hidden_TD) - at)
        stages = cache.stages(ForwardBatch([0], [at], [count], [0] * count))
        close(layer(hidden_TD[at : at + count], cache.memories[0], stages), expected[at : at + count])
        cache.append([0], [count])
        at += count
    assert at == len(hidden_TD)


@pytest.mark.slow
def test_in_bfloat16_it_is_near(decoder_class: Made) -> None:
    """The state is float32 all the same."""
    tokens = text(100)
    target = decoder_class(CONFIG, weights().items(), num_rows=1, max_len=300, dtype=torch.bfloat16)
    row, expected = target.cache.allocate(), one_by_one(tokens)
    assert row is not None and isinstance(target.kv, DeltaCache)
    actual = torch.cat([feed(target, row, tokens[begin : begin + 7]) for begin in range(0, 100, 7)])
    assert (actual.float() - expected).abs().mean() < 0.02 * expected.std()
    assert target.kv.memories[0].states_BHKV.dtype == torch.float32


def test_random_weights_have_norms_of_one() -> None:
    """All the same, whether a family adds one to what is stored or not."""
    stored = dict(random_tensors(CONFIG))
    assert (stored["model.layers.0.linear_attn.norm.weight"] == 1.0).all()
    assert all(
        (tensor == 0.0).all() for name, tensor in stored.items() if name.endswith(("layernorm.weight", "q_norm.weight"))
    )


@pytest.mark.slow
def test_rows_with_different_accepted_lengths(decoder_class: Made) -> None:
    """Three rows in one pass, of equal and of unequal counts; each takes back what it likes, until all have settled
    twice."""
    target, rng = target_of(decoder_class=decoder_class), random.Random(1)
    texts = [text(110, seed) for seed in range(3)]
    expected = [one_by_one(tokens) for tokens in texts]
    rows = [0, 1, 2]
    for row in rows:
        assert target.cache.allocate() == row
    while min(target.cache.lengths) < 100:
        starts, counts, keeps, fed = list(target.cache.lengths), list[int](), list[int](), list[int]()
        same = rng.randint(1, 9) if rng.random() < 0.5 else 0
        for row in rows:
            counts.append(same or rng.randint(1, 9))
            keeps.append(min(rng.randint(1, counts[-1]), 110 - starts[row]))
            fed += texts[row][starts[row] :][: keeps[-1]] + text(counts[-1] - keeps[-1], rng.randrange(1000))
        logits_TV = target.forward(ForwardBatch(rows, starts, counts, fed)).logits_TV
        assert logits_TV is not None
        for row, logits_CV in zip(rows, logits_TV.split(counts), strict=True):
            close(logits_CV[: keeps[row]], expected[row][starts[row] : starts[row] + keeps[row]])
        target.cache.rollback(rows, [start + keep for start, keep in zip(starts, keeps, strict=True)])


@pytest.mark.slow
def test_what_is_just_behind_is_taken_back_without_reading_again(
    decoder_class: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller model that drafts reads token by token, and takes several of them back."""
    target, tokens = target_of(1, decoder_class), text(110)
    row, expected = target.cache.allocate(), one_by_one(tokens)
    assert row is not None
    passes = list[int]()
    forward = target.forward

    def counted(batch: ForwardBatch) -> Any:
        passes.append(batch.num_tokens)
        return forward(batch)

    monkeypatch.setattr(target, "forward", counted)
    for token in text(130, 5)[: HALF // 2]:
        feed(target, row, [token])
    target.cache.rollback([row], [0])
    at = 0
    while at < len(tokens) - HALF:
        for token in text(HALF - 1, at):
            feed(target, row, [token])
        target.cache.rollback([row], [at])
        for token in tokens[at : at + 12]:
            close(feed(target, row, [token]), expected[at : at + 1])
            at += 1
    assert set(passes) == {1}


@pytest.mark.slow
def test_further_back_the_text_is_read_again(decoder_class: Made) -> None:
    target, tokens = target_of(1, decoder_class), text(200)
    row = target.cache.allocate()
    assert row is not None
    feed(target, row, tokens)
    target.cache.rollback([row], [150])
    assert target.cache.lengths[row] == 150
    target.cache.rollback([row], [120])
    tail = text(9, 3)
    close(feed(target, row, tail), one_by_one(tokens[:120] + tail)[120:])
    assert target.cache.lengths[row] == 129
    target.cache.rollback([row], [0])
    close(feed(target, row, tail), one_by_one(tail))


@pytest.mark.slow
@pytest.mark.parametrize("held", range(SHAPE.kernel + 1))
def test_a_short_trail_begins_with_settled_inputs(decoder_class: Made, held: int) -> None:
    """Taken back to where the state is, or a little behind: the convolution sees inputs that have left the trail."""
    target, tokens, tail = target_of(1, decoder_class), text(100), text(9, 3)
    row = target.cache.allocate()
    assert row is not None and isinstance(target.kv, DeltaCache)
    for begin in range(0, 100, 5):
        feed(target, row, tokens[begin : begin + 5])
    length = 100 - target.kv.held([row])[0] + held
    target.cache.rollback([row], [length])
    assert length > HALF and target.kv.held([row]) == [held]
    close(feed(target, row, tail), one_by_one(tokens[:length] + tail)[length:])


@pytest.mark.slow
def test_a_path_of_a_tree_is_kept(decoder_class: Made) -> None:
    """The path is not the first tokens; a tree larger than the trail has room; and the text goes on from it."""
    for size in (6, ROOM + 10):
        target, tokens = target_of(2, decoder_class), text(40)
        row = target.cache.allocate()
        assert row is not None
        feed(target, row, tokens)
        nodes, parents = text(size, 7), [-1, 0, 0, 1, 2, *range(4, size - 1)]
        logits_TV = feed(target, row, nodes, parents)
        path = [0, 2, 4, 5]
        kept = [nodes[node] for node in path]
        target.cache.keep([row], [40], [path])
        tail = text(5, 9)
        expected = one_by_one([*tokens, *kept, *tail])
        close(logits_TV[path], expected[40:44])
        close(feed(target, row, tail), expected[44:])
        for step in range(3):  # and a rollback behind what was moved
            target.cache.rollback([row], [42])
            close(feed(target, row, tail[step:]), one_by_one([*tokens, *kept[:2], *tail[step:]])[42:])


def test_larger_pending_windows_allocate_no_states(decoder_class: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of all recurrent states was allocated for a moment, and dropped."""
    cache, zeros, shapes = target_of(2, decoder_class).kv, torch.zeros, list[tuple[int, ...]]()

    def counted(*shape: int, **options: Any) -> torch.Tensor:
        shapes.append(shape)
        return zeros(*shape, **options)

    assert isinstance(cache, DeltaCache)
    monkeypatch.setattr(torch, "zeros", counted)
    cache._make_room(ROOM + 10)
    assert len(shapes) == 4 * len(cache.memories) and {shape[1] for shape in shapes} == {ROOM + 10} == {cache.room}


@pytest.mark.slow
def test_a_row_forgets_the_one_before(decoder_class: Made) -> None:
    """Also what was no number."""
    target, tokens = target_of(1, decoder_class), text(20)
    for broken in (True, False):
        row = target.cache.allocate()
        assert row is not None
        if broken:
            feed(target, row, text(9, 4))
            for memory in target.kv.memories if isinstance(target.kv, DeltaCache) else []:
                for tensor in memory.tensors():
                    tensor.fill_(float("nan"))
            target.kv.keys.fill_(0.0)
        else:
            close(feed(target, row, tokens), one_by_one(tokens))
        target.cache.free(row)


def test_its_bytes_are_counted_and_rows_are_not_copied() -> None:
    cache = DeltaCache(CONFIG, 2, 100, torch.bfloat16)
    keys = 2 * 1 * 2 * 100 * 8 * 2
    state, window = 4 * 4 * 3 * 4, 2 * SHAPE.channels * 2
    trail = ROOM * (SHAPE.channels * 2 + (SHAPE.keys + SHAPE.values + 4) * 4)
    assert cache.num_bytes == keys + 2 * 2 * (state + window + trail)
    with pytest.raises(NotImplementedError, match="not copied"):
        cache.adopt(0, 1, 5)
