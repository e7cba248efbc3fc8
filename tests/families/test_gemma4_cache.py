"""The cache of layers that differ in their heads: copied rows, kept paths of a tree, shared keys."""

from __future__ import annotations

import pytest
import torch
from family_models import Written, model_of, reference, target_of, text
from torch import Tensor

from paceline.model.kv_cache import LayeredKVCache
from paceline.model.target import ForwardBatch, Target


def feed(target: Target, row: int, tokens: list[int], parents: list[int] | None = None) -> Tensor:
    out = target.forward(ForwardBatch([row], [target.cache.lengths[row]], [len(tokens)], tokens, parents=parents))
    assert out.logits_TV is not None
    return out.logits_TV.clone()


@pytest.mark.parametrize("name", ["gemma4", "gemma4-small"])
def test_rows_are_copied_and_paths_kept(
    name: str, written: Written, tmp_path_factory: pytest.TempPathFactory
) -> None:  # fmt: skip
    folder, model = model_of(name, written, tmp_path_factory)
    target, tokens, drafts = target_of(folder), text(24), text(5, seed=3)
    assert (target.cache.allocate(), target.cache.allocate()) == (0, 1)
    feed(target, 0, tokens[:20])
    target.cache.adopt(0, 1, 17)
    expected = reference(model, tokens)[0][17:]
    torch.testing.assert_close(feed(target, 1, tokens[17:]), expected, atol=1e-4, rtol=1e-4)
    feed(target, 1, drafts, [-1, 0, 0, 2, 3])
    target.cache.keep([1], [24], [[0, 2, 3]])
    whole = [*tokens, *(drafts[place] for place in (0, 2, 3)), *text(3)]
    torch.testing.assert_close(feed(target, 1, text(3)), reference(model, whole)[0][27:], atol=1e-4, rtol=1e-4)


def test_layers_that_share_keys_store_none() -> None:
    cache = LayeredKVCache([(2, 8), (1, 16)] * 2, [0, 1, 0, 1], 2, 32, torch.float32)
    assert cache.keys[2] is cache.keys[0] and cache.values[3] is cache.values[1]
    assert cache.num_bytes == 2 * 4 * 2 * 32 * (2 * 8 + 16)
