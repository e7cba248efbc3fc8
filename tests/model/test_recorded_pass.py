"""Passes of fixed shape give what the ordinary pass gives; the graphs themselves need a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from native_models import SHAPES, random_weights, tokens_of

from paceline.model.checkpoint import expected_shapes
from paceline.model.config.decoder import DecoderConfig, DeltaShape
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.delta_cache import DeltaCache
from paceline.model.torch.recorded_pass import GraphDecoder, pass_grid, rows_at

MIXTURE = DecoderConfig(
    "qwen3_next", 97, 48, 80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, max_position=256, qk_norm=True,
    num_experts=7, experts_per_token=3, expert_size=24, shared_expert_size=16,
)  # fmt: skip
HYBRID = replace(MIXTURE, num_experts=0, shared_expert_size=0, delta=DeltaShape(2, 4, 8, 12, 4), linear_layers=(0, 2))
MODELS = {"mixture": MIXTURE, "hybrid": HYBRID, "both": replace(MIXTURE, delta=HYBRID.delta, linear_layers=(0, 2))}
NARROW, WIDE = (1, 6), (17, 32)
"""Tokens of a row in a pass; the recurrence's kernel of a delta net keeps 32 of them, and spills registers."""


def decoder_for(name: str, kind: Callable[..., Decoder], device: str = "cpu") -> Decoder:
    config = SHAPES[name]
    return kind(config, random_weights(config).items(), num_rows=4, max_len=128, device=device)


@pytest.mark.parametrize("places", [[], [0], [1, 2, 3], [3, 1], [0, 2]])
def test_rows_at_places(places: list[int]) -> None:
    """No places were an IndexError."""
    tensor = torch.arange(10.0).view(5, 2)
    rows = rows_at(tensor, places)
    assert rows.shape == (len(places), 2) and rows.tolist() == [tensor[place].tolist() for place in places]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-norms"])
def test_static_passes_equal_ordinary_ones(name: str) -> None:
    assert_same_passes(decoder_for(name, Decoder), decoder_for(name, GraphDecoder))


@pytest.mark.slow
def test_what_dead_positions_hold_does_not_spread() -> None:
    """Positions behind a row's length may hold what an earlier request left: NaN, if its logits were not finite."""
    static = decoder_for("llama", GraphDecoder)
    assert isinstance(static, GraphDecoder)
    for cache in (static.kv.keys, static.kv.values):
        cache.fill_(float("nan"))
    assert_same_passes(decoder_for("llama", Decoder), static)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [NARROW, WIDE])
def test_static_passes_of_experts_and_states_equal_ordinary_ones(widths: tuple[int, int]) -> None:
    """Also where rows settle, are taken back further than their state, or hold what a request before them left."""
    config, tensors = MODELS["both"], loud(MODELS["both"])
    ordinary, static = (kind(config, tensors, num_rows=4, max_len=200) for kind in (Decoder, GraphDecoder))
    for memory in static.kv.memories if isinstance(static.kv, DeltaCache) else ():
        for tensor in memory.tensors():
            tensor.fill_(float("nan"))
    assert_same_passes(ordinary, static, rounds=40, widths=widths)
    assert static.recorder.replayed["target"] == 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "widths"), [*((name, NARROW) for name in MODELS), ("hybrid", WIDE)])
def test_replayed_graphs_of_experts_and_states_equal_ordinary_passes(name: str, widths: tuple[int, int]) -> None:
    """The ordinary ones on the CPU: the GPU's have kernels in common with them."""
    config, tensors = MODELS[name], loud(MODELS[name])
    ordinary = Decoder(config, tensors, num_rows=4, max_len=200)
    graphed = GraphDecoder(config, tensors, num_rows=4, max_len=200, device="cuda")
    graphed.set_taps((1,))
    graphed.record(max(8, widths[1]))
    assert_same_passes(ordinary, graphed, rounds=40, widths=widths)
    assert graphed.recorder.replayed["target"] == 40 and not graphed.recorder.eager


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_equal_ordinary_passes() -> None:
    graphed = decoder_for("llama", GraphDecoder, "cuda")
    assert isinstance(graphed, GraphDecoder)
    graphed.set_taps((1,))
    graphed.record(8)
    recorded = graphed.recorder.num_recorded
    assert_same_passes(decoder_for("llama", Decoder), graphed)
    assert graphed.recorder.replayed["target"] == 12 and not graphed.recorder.eager
    assert graphed.recorder.num_recorded == recorded == len(pass_grid(4, 8).shapes)


def loud(config: DecoderConfig) -> list[tuple[str, torch.Tensor]]:
    """Weights of which each moves the logits."""
    generator = torch.Generator().manual_seed(3)
    tensors = [(name, torch.randn(size, generator=generator)) for name, size in expected_shapes(config).items()]
    return [(name, 0.3 * tensor - 2.0 * name.endswith("A_log")) for name, tensor in tensors]


def assert_same_passes(ordinary: Decoder, static: Decoder, rounds: int = 12, widths: tuple[int, int] = NARROW) -> None:
    """Prompts of several rows, then rounds of ragged blocks with rollback; idle and half-filled rows among them.
    `widths`: smallest and largest number of tokens of a row."""
    rng = random.Random(0)
    for decoder in (ordinary, static):
        decoder.set_taps((1,))
        for row in range(4):
            assert decoder.cache.allocate() == row
            prompt = tokens_of(ordinary.config, 30 + 20 * row, seed=row)
            decoder.forward(ForwardBatch([row], [0], [len(prompt)], prompt, "none"))
    for _ in range(rounds):
        rows = sorted(rng.sample(range(4), rng.randint(1, 4)))
        counts = [rng.randint(*widths) for _ in rows]
        starts = [ordinary.cache.lengths[row] for row in rows]
        tokens = [rng.randrange(97) for _ in range(sum(counts))]
        outs = [decoder.forward(ForwardBatch(rows, starts, counts, tokens)) for decoder in (ordinary, static)]
        for name in ("logits_TV", "taps_TF"):
            one, other = (getattr(out, name) for out in outs)
            torch.testing.assert_close(other.cpu(), one, atol=1e-4, rtol=1e-4)
        kept = [start + rng.randint(0, min(count, 2)) for start, count in zip(starts, counts, strict=True)]
        for decoder in (ordinary, static):
            decoder.cache.rollback(rows, kept)
