"""Rounds on the device with drafters that draft token by token: drafts, caches and drafting states of ordinary rounds.

`test_device_rounds.py` compares their texts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from device_runs import dflash, dflash2
from engine_runs import run
from tiny_dflash import target_shape, target_weights, tiny_target
from tiny_eagle3 import VARIANTS, drafter_of, eagle3_for, loud_network, raw_eagle3
from tiny_mtp import mtp_for

from paceline.draft.ngram import NgramDrafter
from paceline.engine.device_round import ROUNDS, StaticRound
from paceline.engine.engine import Engine
from paceline.model.text.tokenizer import Tokenizer
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.types import Batch, SamplingParams

pytestmark = pytest.mark.slow

FEW = 5
"""Vocabulary size, small enough that random drafts are sometimes right."""
PROMPTS = [[1, 2, 3, 4, 0, 2], [4, 0, 1], [2] * 20]
GREEDY = [SamplingParams(max_tokens=60)] * 3
MIXED = [SamplingParams(max_tokens=60, temperature=0.9, seed=1), GREEDY[0], SamplingParams(max_tokens=60, seed=3)]
HOT = [SamplingParams(max_tokens=60, temperature=3.0, seed=seed) for seed in range(3)]
"""So flat that of 200 tokens the host must sample some."""
Drafts = dict[tuple[int, int], list[int]]
"""(number of the request, length of its text) -> the drafts of the round."""


def target(vocab: int = FEW) -> Any:
    return tiny_target(vocab=vocab, kind=GraphDecoder)


def engine_of(own: Any, drafter: Any, *, on: bool = True) -> Engine:
    return Engine(own, Tokenizer.stand_in(own.vocab_size), drafter, prefill_chunk=7, device_rounds=on)


def count_of(engine: Engine, name: str = ROUNDS) -> int:
    assert engine.device_rounds is not None
    return engine.device_rounds.counts[name]


def drafts_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """Filled with the drafts of all rounds to come, ordinary and on the device."""
    drafts: Drafts = {}

    def keep(batch: Any, tokens_B: list[list[int]]) -> None:
        for seq, tokens in zip(batch, tokens_B, strict=True):
            drafts[seq.request_id, len(seq.tokens)] = tokens

    propose, outcomes = engine.pool.propose, StaticRound.outcomes

    def proposed(batch: Batch) -> Any:
        block = propose(batch)
        keep(batch.sequences, block.tokens_B)
        return block

    def computed(region: StaticRound, rows: list[int]) -> Any:
        results = outcomes(region, rows)
        running = {seq.row: seq for seq in engine.scheduler.running}
        keep([running[row] for row in rows], [each.drafts for each in results])
        return results

    monkeypatch.setattr(engine.pool, "propose", proposed)
    monkeypatch.setattr(StaticRound, "outcomes", computed)
    return drafts


def contents(drafter: Any, row: int) -> list[torch.Tensor]:
    """Keys and values of a row's entries, and its drafting state."""
    cache = drafter._path.cache
    length = cache.lengths[row]
    return [each[:, row, :, :length].clone() for each in (cache.keys, cache.values)] + [drafter._states[row].clone()]


def both_ways(
    own: Any, make: Callable[[], Any], params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch, steps: int = 16
) -> tuple[Any, Any, Engine]:
    """(drafts, contents of all rows) of some steps by ordinary rounds, the same on the device, and the latter's
    engine."""
    results, engine = list[Any](), None
    for on in (False, True):
        drafter = make()
        engine = engine_of(own, drafter, on=on)
        with monkeypatch.context() as patch:
            drafts = drafts_of(engine, patch)
            ids = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, params, strict=True)]
            for _ in range(steps):
                engine.step()
            rows = [seq.row for seq in engine.scheduler.running]
            drafter.take_in_pending(rows)
            first = min(ids)
            drafts = {(number - first, length): tokens for (number, length), tokens in drafts.items()}
            results.append((drafts, [contents(drafter, row) for row in rows]))
            for number in ids:
                engine.abort(number)
    assert engine is not None
    return results[0], results[1], engine


def assert_same(before: Any, after: Any) -> None:
    assert after[0] == before[0] and len(before[1]) == len(after[1]) > 0
    for ones, others in zip(before[1], after[1], strict=True):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("variant", "params"), [(name, (GREEDY, MIXED)[at % 2]) for at, name in enumerate(VARIANTS)])
def test_drafts_caches_and_states_are_those_of_ordinary_rounds(
    variant: str, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = target(vocab=11)
    before, after, engine = both_ways(
        own, lambda: drafter_of(loud_network(raw_eagle3(**VARIANTS[variant])), num_drafted=5), params, monkeypatch
    )
    assert_same(before, after)
    assert max(map(len, after[0].values())) == 5
    assert engine.device_rounds and set(engine.device_rounds.counts) == {ROUNDS}


@pytest.mark.parametrize(("tells_normed", "params"), [(True, GREEDY), (True, MIXED), (False, GREEDY), (False, MIXED)])
def test_mtp_layers_draft_as_in_ordinary_rounds(
    tells_normed: bool, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = target()
    expected = run(engine_of(own, None, on=False), PROMPTS, params)
    before, after, engine = both_ways(own, lambda: mtp_for(own, tells_normed), params, monkeypatch)
    assert_same(before, after)
    assert max(map(len, after[0].values())) == 4
    assert [seq.output_ids for seq in run(engine, PROMPTS, params)] == [seq.output_ids for seq in expected]
    assert engine.device_rounds and set(engine.device_rounds.counts) <= {ROUNDS, "whole distribution"}


@pytest.mark.parametrize("params", [GREEDY, MIXED])
def test_accepted_drafts_leave_the_entries_of_ordinary_rounds(
    params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = target()
    before, after, _ = both_ways(own, lambda: eagle3_for(own, ids=[2, 3]), params, monkeypatch)
    assert_same(before, after)
    lengths = [sorted(length for number, length in after[0] if number == row) for row in range(3)]
    gained = {last - first for every in lengths for first, last in pairwise(every)}
    assert 1 in gained and max(gained) > 3


def test_a_token_that_the_host_samples_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry depends on it, and the device does not have it."""
    own = target(vocab=200)
    before, after, engine = both_ways(own, lambda: eagle3_for(own), HOT, monkeypatch)
    assert_same(before, after)
    assert count_of(engine, "whole distribution") > 5


def test_a_drafter_bound_again_keeps_its_recorded_rounds() -> None:
    own, params = target(), SamplingParams(max_tokens=20)
    drafter = eagle3_for(own, ids=[2, 3])
    before = run(engine_of(own, eagle3_for(own, ids=[2, 3]), on=False), PROMPTS, params)
    recorded = list[Any]()
    for _ in range(2):
        after = run(engine_of(own, drafter), PROMPTS, params)
        assert [seq.rounds for seq in after] == [seq.rounds for seq in before]
        recorded.append((id(drafter.recorded_rounds), own.recorder.num_recorded, drafter._states.data_ptr()))
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize("make", [dflash, dflash2, eagle3_for, mtp_for])
def test_a_replaced_drafter_is_freed_with_its_rounds(make: Callable[[Any], Any]) -> None:
    """At once: memory pressure on a device starts no collection of cycles."""
    own = target()
    engine = engine_of(own, make(own))
    run(engine, PROMPTS, GREEDY)
    left = weakref.ref(engine.pool.drafters[0])
    assert count_of(engine) > 0 and left() is not None
    gc.collect()
    gc.disable()
    try:
        engine.swap(NgramDrafter())
        run(engine, PROMPTS[:1], GREEDY[:1])
        assert left() is None
    finally:
        gc.enable()


def test_a_text_that_goes_on_adopts_what_rounds_on_the_device_wrote() -> None:
    own, params, both = target(), SamplingParams(max_tokens=20), list[Any]()
    for on in (False, True):
        engine = engine_of(own, eagle3_for(own, ids=[2, 3]), on=on)
        first = run(engine, PROMPTS, params)
        again = run(engine, [[*seq.tokens, 2, 0] for seq in first], params)
        both.append([(seq.output_ids, seq.rounds) for seq in again])
    assert both[0] == both[1]


def test_drafts_end_before_logits_that_are_not_finite() -> None:
    own, params = target(), SamplingParams(max_tokens=12)
    drafter = eagle3_for(own)
    drafter.network.lm_head.weight.data[1] = float("nan")
    expected = [seq.output_ids for seq in run(engine_of(own, None, on=False), PROMPTS, params)]
    engine = engine_of(own, drafter)
    answers = run(engine, PROMPTS, params)
    assert [seq.output_ids for seq in answers] == expected and count_of(engine) > 0
    assert not any(each.num_drafted for seq in answers for each in seq.rounds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_recorded_rounds_give_the_texts_of_ordinary_ones(name: str) -> None:
    shape = target_shape(32, FEW)
    own = GraphDecoder(shape, target_weights(shape), num_rows=3, max_len=256, device="cuda")
    make = partial(eagle3_for, ids=[2, 3]) if name == "eagle3" else mtp_for
    params = [SamplingParams(max_tokens=30, temperature=0.8 * (row % 2), seed=row) for row in range(3)]
    before = run(engine_of(own, make(own), on=False), PROMPTS, params)
    engine = engine_of(own, make(own))
    engine.record()
    after = run(engine, PROMPTS, params)
    assert [seq.output_ids for seq in after] == [seq.output_ids for seq in before]
    recorder = own.recorder
    assert recorder.replayed["round"] == count_of(engine) > 0 and not recorder.failed and not recorder.eager["round"]
