"""The cache of layers that differ in their heads: copied rows, kept paths of a tree, shared keys."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from family_models import Written, model_of, reference, target_of, text
from torch import Tensor

from paceline.errors import MemoryBudgetError
from paceline.model.kv_cache import LayeredKVCache
from paceline.model.target import ForwardBatch
from paceline.model.torch.decoder import Decoder

NAMES = ["gemma4", "gemma4-small"]
Made = tuple[Decoder, Any]


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, written: Written, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target with two rows, and the model in Transformers."""
    folder, model = model_of(request.param, written, tmp_path_factory)
    return cast(Decoder, target_of(folder)), model


def feed(target: Decoder, row: int, tokens: list[int], parents: list[int] | None = None) -> Tensor:
    out = target.forward(ForwardBatch([row], [target.cache.lengths[row]], [len(tokens)], tokens, parents=parents))
    assert out.logits_TV is not None
    return out.logits_TV.clone()


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_a_prefix_is_adopted_by_another_row(pair: Made) -> None:
    target, model = pair
    first, second, tokens = target.cache.allocate(), target.cache.allocate(), text(24)
    assert first is not None and second is not None
    feed(target, first, tokens[:20])
    target.cache.adopt(first, second, 17)
    assert target.cache.lengths == [20, 17]
    close(feed(target, second, tokens[17:]), reference(model, tokens)[0][17:])


def test_a_path_of_a_tree_is_kept(pair: Made) -> None:
    target, model = pair
    row, tokens, drafts, after = target.cache.allocate(), text(12), text(5, seed=3), text(3, seed=4)
    assert row is not None
    feed(target, row, tokens)
    feed(target, row, drafts, [-1, 0, 0, 2, 3])
    target.cache.keep([row], [12], [[0, 2, 3]])
    whole = [*tokens, *(drafts[place] for place in (0, 2, 3)), *after]
    close(feed(target, row, after), reference(model, whole)[0][15:])


def test_layers_that_share_keys_add_nothing(written: Written, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = model_of("gemma4-small", written, tmp_path_factory)
    target = cast(Decoder, target_of(folder, max_len=32))
    cache = target.kv
    assert isinstance(cache, LayeredKVCache) and target.config.layer_sizes is not None
    assert target.config.layer_sizes.sources == (0, 1, 0, 1)
    assert cache.keys[2] is cache.keys[0] and cache.values[3] is cache.values[1]
    assert cache.num_bytes == 2 * 4 * 2 * 32 * (2 * 8 + 2 * 16), "keys and values of two rows in float32"
    with pytest.raises(MemoryBudgetError, match="no memory for a KV cache"):
        LayeredKVCache([(2**10, 2**10)], [0], 2**10, 2**18, torch.float32)
