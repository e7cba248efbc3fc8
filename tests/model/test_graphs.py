"""Passes of fixed shape give what the ordinary pass gives; the graphs themselves need a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from model.test_decoder import decoder_for, text

from paceline.model.decoder import Decoder
from paceline.model.graphs import GraphDecoder, pass_grid
from paceline.model.target import ForwardBatch


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3-norms"])
def test_static_passes_equal_ordinary_ones(family: str) -> None:
    ordinary = decoder_for(family)[1]
    static = GraphDecoder(ordinary.config, list(_tensors(family)), num_rows=4, max_len=128)
    assert_same_passes(ordinary, static)


def test_what_dead_positions_hold_does_not_spread() -> None:
    """Positions behind a row's length may hold what an earlier request left: NaN, if its logits were not finite."""
    ordinary = decoder_for("llama")[1]
    static = GraphDecoder(ordinary.config, list(_tensors("llama")), num_rows=4, max_len=128)
    for cache in (static.kv.keys, static.kv.values):
        cache.fill_(float("nan"))
    assert_same_passes(ordinary, static)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graphs_equal_ordinary_passes() -> None:
    _, ordinary = decoder_for("llama")
    _, source = decoder_for("llama")
    graphed = GraphDecoder(source.config, list(_tensors("llama")), num_rows=4, max_len=128, device="cuda")
    graphed.set_taps((1,))
    graphed.record(8)
    recorded = graphed.recorder.num_recorded
    assert_same_passes(ordinary, graphed)
    assert graphed.recorder.replayed["target"] == 12 and not graphed.recorder.eager
    assert graphed.recorder.num_recorded == recorded == len(pass_grid(4, 8).shapes)


def _tensors(family: str):
    model, _ = decoder_for(family)
    return ((name, tensor.detach()) for name, tensor in model.state_dict().items())


def assert_same_passes(ordinary: Decoder, static: Decoder) -> None:
    """Prompts of several rows, then rounds of ragged blocks with rollback; idle and half-filled rows among them."""
    rng = random.Random(0)
    for decoder in (ordinary, static):
        decoder.set_taps((1,))
        for row in range(4):
            assert decoder.cache.allocate() == row
            prompt = text(30 + 20 * row, seed=row)
            decoder.forward(ForwardBatch([row], [0], [len(prompt)], prompt, "none"))
    for _ in range(12):
        rows = sorted(rng.sample(range(4), rng.randint(1, 4)))
        counts = [rng.randint(1, 6) for _ in rows]
        starts = [ordinary.cache.lengths[row] for row in rows]
        tokens = [rng.randrange(97) for _ in range(sum(counts))]
        outs = [decoder.forward(ForwardBatch(rows, starts, counts, tokens)) for decoder in (ordinary, static)]
        for name in ("logits_TV", "taps_TF"):
            one, other = (getattr(out, name) for out in outs)
            torch.testing.assert_close(other.cpu(), one, atol=1e-4, rtol=1e-4)
        kept = [start + rng.randint(0, min(count, 2)) for start, count in zip(starts, counts, strict=True)]
        for decoder in (ordinary, static):
            decoder.cache.rollback(rows, kept)
