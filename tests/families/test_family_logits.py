"""Each family's pass is Transformers': whole, in chunks with drafts taken back, ragged, as a tree, and of fixed
shape."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import IN_PYTORCH, VOCAB, Written, model_of, reference, target_of, text
from torch import Tensor

from paceline.errors import NativeError
from paceline.model.checkpoint import check_tensors, load_config, load_tensors
from paceline.model.kv_cache import LayeredKVCache
from paceline.model.native.decoder import NativeDecoder
from paceline.model.native.library import load as native_library
from paceline.model.target import ForwardBatch, ForwardOutput, Target
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import GraphDecoder

Made = tuple[Path, Any]
LENGTH = 40


def close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def feed(target: Target, row: int, tokens: list[int], parents: list[int] | None = None) -> ForwardOutput:
    start = target.cache.lengths[row]
    return target.forward(ForwardBatch([row], [start], [len(tokens)], tokens, parents=parents))


def taken(target: Target) -> int:
    row = target.cache.allocate()
    assert row is not None
    return row


@pytest.fixture(params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """auto is the native pass where it can be; PyTorch is what runs on a GPU."""
    return request.param


@pytest.mark.slow
def test_logits_taps_and_ends(name: str, family_model: Made, backend: str) -> None:
    folder, model = family_model
    target, tokens = target_of(folder, backend=backend), text(LENGTH)
    is_torch = backend == "torch" or native_library() is None or name in IN_PYTORCH
    assert isinstance(target, Decoder if is_torch else NativeDecoder)
    target.set_taps((0, 2, 3))
    logits_TV, hidden = reference(model, tokens)
    out = feed(target, taken(target), tokens)
    close(out.logits_TV, logits_TV)
    close(out.taps_TF, torch.cat([hidden[layer] for layer in (0, 2, 3)], dim=-1))
    assert (logits_TV.std(0) > 0.01).all() and logits_TV.argmax(-1).unique().numel() > 5, (
        "the test needs a model that says things"
    )
    close(target.head(hidden[3]), logits_TV)
    with torch.no_grad():
        first = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[0][0]
        raw_TV = hidden[3] @ model.lm_head.weight.T
    close(target.embed(torch.tensor(tokens)), first)
    close(target.matrix_embed(torch.tensor(tokens)), model.get_input_embeddings().weight[tokens])
    close(target.matrix_head(hidden[3]), raw_TV)


@pytest.mark.slow
def test_chunks_with_refused_drafts_and_another_row(name: str, family_model: Made, backend: str) -> None:
    folder, model = family_model
    target, rng = target_of(folder, backend=backend), random.Random(3)
    texts = [text(LENGTH, 1), text(LENGTH, 2)]
    expected = [reference(model, tokens)[0] for tokens in texts]
    rows = [taken(target), taken(target)]
    while max(target.cache.lengths) < LENGTH:
        starts, counts, keeps, fed = list(target.cache.lengths), list[int](), list[int](), list[int]()
        for row in rows:
            counts.append(rng.randint(1, 8))
            keeps.append(min(rng.randint(1, counts[-1]), LENGTH - starts[row]))
            noise = [rng.randrange(VOCAB) for _ in range(counts[-1] - keeps[-1])]
            fed += texts[row][starts[row] :][: keeps[-1]] + noise
        out = target.forward(ForwardBatch(rows, starts, counts, fed))
        assert out.logits_TV is not None
        for row, logits_CV in zip(rows, out.logits_TV.split(counts), strict=True):
            close(logits_CV[: keeps[row]], expected[row][starts[row] : starts[row] + keeps[row]])
        target.cache.rollback(rows, [start + keep for start, keep in zip(starts, keeps, strict=True)])


def test_longrope_has_other_factors_for_long_texts(written: Written, tmp_path_factory: pytest.TempPathFactory) -> None:
    """From the first position on, by what a row of the cache may hold: Transformers chooses by the last one of each
    pass."""
    folder, model = model_of("phi4-mini", written, tmp_path_factory)
    tokens = text(90)
    target = target_of(folder, max_len=128)
    close(feed(target, taken(target), tokens).logits_TV, reference(model, tokens)[0])
    target = target_of(folder, max_len=128)
    shorter = feed(target, taken(target), tokens[:60]).logits_TV
    assert shorter is not None and not torch.allclose(shorter, reference(model, tokens[:60])[0], atol=1e-2)


@pytest.mark.slow
def test_a_tree_says_what_its_paths_say(name: str, family_model: Made, backend: str) -> None:
    folder, model = family_model
    target, tokens = target_of(folder, backend=backend), text(20)
    row = taken(target)
    feed(target, row, tokens)
    drafts, parents = text(6, seed=5), [-1, 0, 0, 1, 2, 2]
    out = feed(target, row, drafts, parents)
    assert out.logits_TV is not None
    for path in ([0, 1, 3], [0, 2, 4], [0, 2, 5]):
        logits_TV, _ = reference(model, [*tokens, *(drafts[place] for place in path)])
        close(out.logits_TV[path], logits_TV[-3:])


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gemma4-small"])
def test_rows_are_copied_and_paths_kept(name: str, family_model: Made) -> None:
    folder, model = family_model
    target, tokens, drafts = target_of(folder, backend="torch"), text(24), text(5, seed=3)
    assert (taken(target), taken(target)) == (0, 1)
    feed(target, 0, tokens[:20])
    target.cache.adopt(0, 1, 17)
    close(feed(target, 1, tokens[17:]).logits_TV, reference(model, tokens)[0][17:])
    feed(target, 1, drafts, [-1, 0, 0, 2, 3])
    target.cache.keep([1], [24], [[0, 2, 3]])
    whole = [*tokens, *(drafts[place] for place in (0, 2, 3)), *text(3)]
    close(feed(target, 1, text(3)).logits_TV, reference(model, whole)[0][27:])


def test_layers_that_share_keys_store_none() -> None:
    cache = LayeredKVCache([(2, 8), (1, 16)] * 2, [0, 1, 0, 1], 2, 32, torch.float32)
    assert cache.keys[2] is cache.keys[0] and cache.values[3] is cache.values[1]
    assert cache.num_bytes == 2 * 4 * 2 * 32 * (2 * 8 + 16)


@pytest.mark.slow
def test_passes_of_fixed_shape(name: str, family_model: Made) -> None:
    """Passes as CUDA graphs record them."""
    folder, model = family_model
    config, tokens = load_config(folder), text(24)
    tensors = check_tensors(config, load_tensors(folder), folder)
    target = GraphDecoder(config, tensors, num_rows=2, max_len=64)
    row = taken(target)
    feed(target, row, tokens[:17])
    out = feed(target, row, tokens[17:])
    close(out.logits_TV, reference(model, tokens)[0][17:])


@pytest.mark.slow
@pytest.mark.skipif(native_library() is None, reason="the native library is not built: run make native")
def test_weights_can_be_rounded_to_blocks(name: str, family_model: Made) -> None:
    """Also where a file holds several matrices as one, or in another order."""
    folder, model = family_model
    tokens = text(LENGTH)
    if name in IN_PYTORCH:
        with pytest.raises(NativeError, match="has no layers of different sizes"):
            target_of(folder, weight_format="q8_0")
        return
    target = target_of(folder, weight_format="q8_0")
    assert isinstance(target, NativeDecoder) and "Q8_0" in target.weight_format
    actual, expected = feed(target, taken(target), tokens).logits_TV, reference(model, tokens)[0]
    assert actual is not None
    off = (actual - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-4 < off.median() < 0.1
