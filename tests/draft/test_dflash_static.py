"""The recorded forms of DFlash's passes, computed on CPU, are the ragged ones."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer
from engine_runs import run
from tiny_dflash import HIDDEN, PROMPT, VARIANTS, VOCAB, network, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2
from tiny_drafters import DRAFTERS
from tiny_dspark import network_3, raw_3
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.dspark.drafter import DSparkDrafter
from paceline.engine.engine import Engine
from paceline.model.torch import parts
from paceline.model.torch.attention import Scores
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.plan.planner import FixedPlanner
from paceline.types import SamplingParams

pytestmark = pytest.mark.slow

NUM_ROWS, FREE = 4, 128


def each_query_alone(query_THD: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """`attend_rows` over the keys that a query sees and no others, so that its bits do not depend on what is hidden."""
    num_rows, kv_heads, length, _ = keys.shape
    count, group = len(query_THD) // num_rows, query_THD.shape[1] // kv_heads
    out = torch.zeros_like(query_THD)
    for token, query_HD in enumerate(query_THD):
        row, slot = divmod(token, count)
        seen_S = torch.ones(length, dtype=torch.bool) if mask is None else mask[row, 0, slot] == 0
        for head, query_D in enumerate(query_HD):
            seen_keys, seen_values = (tensor[row, head // group, seen_S] for tensor in (keys, values))
            weights = ((seen_keys * query_D).sum(-1) * query_D.shape[-1] ** -0.5).softmax(0)
            out[token, head] = (weights[:, None] * seen_values).sum(0)
    return out.flatten(1)


def each_token_alone(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear whose bits do not depend on how many tokens there are."""
    flat = inputs.flatten(0, -2)
    product = torch.stack([(weight * token).sum(-1) for token in flat]).unflatten(0, inputs.shape[:-1])
    return product if bias is None else product + bias


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in one order, whatever stands beside them: then equal passes are equal to the bit on any processor."""
    monkeypatch.setattr(parts, "can_pack", lambda weight: False)
    monkeypatch.setattr(F, "linear", each_token_alone)
    for module in ("attention", "kernels.attend"):
        monkeypatch.setattr(f"paceline.model.torch.{module}.attend_rows", each_query_alone)


def paths(drafter_of: Any) -> tuple[Any, Any]:
    """The same drafter beside a target without a recorder, and beside one with."""
    both = []
    for kind in (Decoder, GraphDecoder):
        drafter = drafter_of()
        drafter.bind(tiny_target(num_rows=NUM_ROWS, kind=kind))
        both.append(drafter._path)
    return both[0], both[1]


def rounds(plain: Any, static: Any, num_rounds: int, seed: int = 0) -> Any:
    """Rows and anchors of rounds over random rows; both paths have then injected the same features, some of them
    features of many positions, as prompts are."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, num_features = plain.config.block_size, len(plain.config.target_layer_ids) * HIDDEN
    for number in range(num_rounds):
        rows = sorted(rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS)))
        counts = [rng.randint(1, size + 9 if number % 4 == 0 else size) for _ in rows]
        taps_TF = torch.randn(sum(counts) + 2, num_features, generator=generator)
        for path in (plain, static):
            path.inject(rows, [path.cache.lengths[row] for row in rows], counts, taps_TF)
        yield rows, [rng.randrange(VOCAB) for _ in rows]
        assert plain.cache.lengths == static.cache.lengths


def assert_same_context(plain: Any, static: Any, tolerance: float) -> None:
    for row, length in enumerate(plain.cache.lengths):
        for name in ("keys", "values"):
            one, two = (getattr(path.cache, name)[0, row, :, :length] for path in (plain, static))
            torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("keys", VARIANTS.values(), ids=VARIANTS.keys())
def test_recorded_passes_equal_ragged_ones_to_the_bit(keys: dict[str, Any]) -> None:
    plain, static = paths(lambda: DFlashDrafter(network(raw_config(**{"block_size": 4, "num_layers": 3, **keys}))))
    size, width = plain.config.block_size, plain.config.num_slots
    for rows, anchors in rounds(plain, static, 4):
        one, two = (path.draft(rows, anchors, width, size, True) for path in (plain, static))
        assert torch.equal(one.logits_BKV, two.logits_BKV) and one.best_BK == two.best_BK
    assert_same_context(plain, static, 0.0)
    recorder = static._target.recorder
    assert recorder.replayed["block"] == 4 and recorder.replayed["inject"] > 0


@pytest.mark.parametrize("width", [1, 3])
def test_recorded_passes_are_ragged_ones_with_real_kernels(width: int) -> None:
    """Fewer drafts than slots, and how sure the drafter is of each."""
    plain, static = paths(lambda: DFlashDrafter(network(raw_config(**VARIANTS["scaled"]))))
    for rows, anchors in rounds(plain, static, 6):
        one, two = (path.draft(rows, anchors, width, plain.config.block_size, True) for path in (plain, static))
        torch.testing.assert_close(one.logits_BKV, two.logits_BKV, atol=1e-4, rtol=1e-4)
        scaled = 1.5 * torch.tanh(one.logits_BKV * 0.7 / 1.5)
        torch.testing.assert_close(torch.tensor(two.sure_BK), scaled.log_softmax(-1).amax(-1), atol=1e-4, rtol=1e-4)
        assert len(two.best_BK) == len(rows) and all(len(best_K) == width for best_K in two.best_BK)
    assert_same_context(plain, static, 1e-4)


@torch.inference_mode()
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("keys", [{}, VARIANTS["sliding-both-ways"]], ids=["full", "sliding"])
@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_recorded_selectors_score_the_same_candidates(name: str, keys: dict[str, Any]) -> None:
    keys = {"block_size": 4, **keys}
    drafters = {"dflash2": lambda: DFlash2Drafter(network_2(raw_2(**keys)))}
    drafters |= {"dspark": lambda: DSparkDrafter(network_3(raw_3(**keys)))}
    plain, static = paths(drafters[name])
    size, width = plain.config.block_size, plain.config.num_slots
    for rows, anchors in rounds(plain, static, 4):
        one, two = (path.pick(rows, anchors, width, size) for path in (plain, static))
        assert torch.equal(one.tokens_BKM, two.tokens_BKM) and torch.equal(one.chosen_BKM, two.chosen_BKM)
        torch.testing.assert_close(one.scores_BKPM, two.scores_BKPM, atol=1e-4, rtol=1e-4)
        assert (one.sure_BK is None) == (two.sure_BK is None) == (name == "dflash2")
        if one.sure_BK is not None:
            torch.testing.assert_close(one.sure_BK, two.sure_BK, atol=1e-4, rtol=1e-4)
    assert static._target.recorder.replayed["block"] == 4


def test_idle_rows_and_padding_write_behind_everything() -> None:
    """Rows without a part in a pass keep all that they hold, also behind their lengths; so does a row."""
    _, static = paths(lambda: DFlashDrafter(network(raw_config(block_size=4))))
    cache, max_len = static.cache, static.cache.max_len
    features = torch.randn(12, len(static.config.target_layer_ids) * HIDDEN)
    static.inject([0, 1, 2, 3], [0] * 4, [3] * 4, features)
    cache.rollback([0, 3], [0, 0])
    before = [tensor.clone() for tensor in (cache.keys, cache.values)]
    static.inject([2], [3], [2], features)
    static.draft([2], [5], 3, 4, False)
    for tensor, held in zip((cache.keys, cache.values), before, strict=True):
        assert torch.equal(tensor[:, [0, 1, 3], :, :max_len], held[:, [0, 1, 3], :, :max_len])
        assert torch.equal(tensor[:, 2, :, 9:max_len], held[:, 2, :, 9:max_len])
        assert not torch.equal(tensor[:, 2, :, 3:9], held[:, 2, :, 3:9])


PROMPTS = [PROMPT, PROMPT[:3], PROMPT[4:11], PROMPT[::-1]]
KINDS = [("dflash", 6), ("dflash2", 0), ("dflash2", 6), ("dspark", 0), ("dspark", 6)]


@pytest.mark.parametrize(("name", "num_nodes"), [*KINDS, ("small_model", 0)])
def test_rounds_of_recorded_passes_alone_say_what_plain_ones_do(name: str, num_nodes: int) -> None:
    """Engine, target and drafter as on CUDA: everything is recorded beforehand, and nothing in traffic."""
    params = [SamplingParams(max_tokens=10 + 3 * place) for place in range(4)]
    expected = run(Engine(tiny_target(num_rows=NUM_ROWS), ByteTokenizer(), planner=FixedPlanner(0)), PROMPTS, params)
    target = tiny_target(num_rows=NUM_ROWS, kind=GraphDecoder)
    drafter = DRAFTERS[name](**({"kind": GraphDecoder} if name == "small_model" else {}))
    engine = Engine(target, ByteTokenizer(), drafter, planner=FixedPlanner(num_nodes=num_nodes), device_rounds=False)
    recorders = [target.recorder, drafter.model.recorder] if name == "small_model" else [target.recorder]
    for recorder in recorders:
        recorder.records_late = False
    engine.record(grows_trees=bool(num_nodes))
    recorded = [recorder.num_recorded for recorder in recorders]
    sequences = run(engine, PROMPTS, params)
    assert [seq.output_ids for seq in sequences] == [seq.output_ids for seq in expected]
    assert recorded == [recorder.num_recorded for recorder in recorders]
    assert target.recorder.replayed["target"] > 5 and not target.recorder.eager["target"]
    if name == "small_model":
        assert drafter.model.recorder.replayed["target"] > 10
    else:
        assert target.recorder.replayed["block"] > 5 and not target.recorder.eager["block"]


def test_features_of_rows_go_to_their_rows() -> None:
    """Packed features of several rows, each with its own count."""
    plain, static = paths(lambda: DFlashDrafter(network(raw_config())))
    counts = [2, 1, 4]
    taps_TF = torch.randn(sum(counts), len(plain.config.target_layer_ids) * HIDDEN)
    static.inject([0, 2, 3], [0, 0, 0], counts, taps_TF)
    for row, end, count in zip([0, 2, 3], accumulate(counts), counts, strict=True):
        plain.inject([row], [0], [count], taps_TF[end - count : end])
    assert_same_context(plain, static, 1e-5)
