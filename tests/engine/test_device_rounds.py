"""Rounds on the device, without graphs: texts of ordinary rounds, whoever joins and leaves, greedy and seeded.

That of seeds is plain decoding's, number for number, and so has the target's distribution: test_distribution.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_runs import (
    DRAFTERS,
    FEW,
    PROMPTS,
    VOCAB,
    count_of,
    dflash,
    dflash2,
    dspark,
    engine_of,
    right_now_and_then,
    target,
    texts,
)  # fmt: skip
from engine_runs import run
from tiny_dflash import target_shape, target_weights, tiny_target
from tiny_eagle3 import eagle3_for
from tiny_mtp import mtp_for

from paceline.draft.base import Drafter
from paceline.draft.ngram import NgramDrafter
from paceline.engine import device_round
from paceline.engine import round as decode
from paceline.engine.device_round import ROUNDS
from paceline.engine.round import RuleJudge
from paceline.errors import ConfigError
from paceline.model.torch.recorded_pass import GraphDecoder
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, FixedPlanner
from paceline.types import Batch, DraftBlock, SamplingParams, Sequence, Verdict
from paceline.verify.rules import RULES, mocked

pytestmark = pytest.mark.slow

KINDS: dict[str, Callable[[Any], Drafter] | None] = {
    "none": None,
    "dflash": dflash,
    "causal": lambda own: dflash(own, is_causal=True),
    "few words": lambda own: dflash(own, draft_ids=FEW),
    "dflash2": dflash2,
    "dflash2, few words": lambda own: dflash2(own, draft_ids=FEW),
    "dspark": dspark,
    "dspark from the anchor": lambda own: dspark(own, sample_from_anchor=True),
    "eagle3": eagle3_for,
    "mtp": mtp_for,
    "eagle3, few words": lambda own: eagle3_for(own, ids=[2, 3], version="3"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_and_rounds_are_those_of_ordinary_rounds(kind: str) -> None:
    """Rounds too: drafts are the same, so that what was injected is."""
    own, params, drafter = target(), SamplingParams(max_tokens=14), KINDS[kind]
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    ordinary, device = (engine_of(own, drafter and drafter(own), on=on) for on in (False, True))
    before, after = run(ordinary, PROMPTS, params), run(device, PROMPTS, params)
    assert [seq.output_ids for seq in after] == [seq.output_ids for seq in before] == expected
    assert [seq.rounds for seq in after] == [seq.rounds for seq in before]
    assert [texts(device, [prompt], params)[0] for prompt in PROMPTS[:2]] == expected[:2]
    assert device.device_rounds and set(device.device_rounds.counts) == {ROUNDS} and ordinary.device_rounds is None


@pytest.mark.parametrize("name", ["dflash", "dflash2", pytest.param("dspark", marks=pytest.mark.nightly)])
def test_drafts_that_stand_are_committed_and_injected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, params = target(), SamplingParams(max_tokens=40)
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    caches, rounds = list[Any](), list[Any]()
    for on in (False, True):
        drafter = DRAFTERS[name](own)
        engine = engine_of(own, drafter, on=on)
        with monkeypatch.context() as patch:
            right_now_and_then(patch, engine, [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)])
            answers = run(engine, PROMPTS, params)
            assert [seq.output_ids for seq in answers] == expected
            rounds.append([seq.rounds for seq in answers])
            ids = [engine.add(prompt, params) for prompt in PROMPTS[:3]]
            for _ in range(9):
                engine.step()
            rows = [seq.row for seq in engine.scheduler.running]
            drafter.take_in_pending(rows)
            caches.append([(row, length, [each[:, row, :, :length].clone() for each in held]) for cache, held in (
                (own.kv, (own.kv.keys, own.kv.values)), (drafter._cache, (drafter._path.cache.keys, drafter._path.cache.values))  # noqa: E501
            ) for row in rows for length in [cache.lengths[row]]])  # fmt: skip
            for request in ids:
                engine.abort(request)
    assert rounds[0] == rounds[1]
    kept = [each.num_accepted for seq in rounds[1] for each in seq]
    assert max(kept) == 4 and min(kept) == 0
    for (row, length, ones), (other_row, other_length, others) in zip(*caches, strict=True):
        assert (row, length) == (other_row, other_length) and length > 10
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


SAMPLED = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "filtered": {"temperature": 0.9, "top_p": 0.8, "min_p": 0.05},
    "top-k": {"temperature": 1.2, "top_k": 3},
}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("dflash", "plain"),
        ("dflash", "filtered"),
        ("none", "top-k"),
        ("dflash2", "cool"),
        ("dflash2, few words", "filtered"),
        ("dspark", "plain"),
        pytest.param("none", "cool", marks=pytest.mark.nightly),
        pytest.param("dflash", "top-k", marks=pytest.mark.nightly),
        pytest.param("dflash2", "top-k", marks=pytest.mark.nightly),
    ],
)
def test_texts_of_seeds_are_those_of_ordinary_rounds(kind: str, shape: str) -> None:
    """Alone, in a batch and beside a greedy row."""
    own, drafter = target(), KINDS[kind]
    params = [SamplingParams(**SAMPLED[shape], seed=seed, max_tokens=20) for seed in range(5)]  # pyright: ignore[reportArgumentType]
    params[2] = SamplingParams(max_tokens=20)
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    engine = engine_of(own, drafter and drafter(own))
    assert texts(engine, PROMPTS, params) == expected
    assert [texts(engine, [prompt], [each])[0] for prompt, each in zip(PROMPTS[:2], params, strict=False)] == expected[
        :2
    ]
    assert count_of(engine) > 20 and len(engine.device_rounds.counts) == 1  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("draft_ids", [None, FEW], ids=["all", "few words"])
def test_drafts_are_those_of_ordinary_rounds(
    name: str, draft_ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, of greedy rows and of sampled ones, and how sure the drafter is of each."""
    own, both = target(), list[Any]()
    params = [SamplingParams(temperature=0.9 * (row != 2), seed=row, max_tokens=24) for row in range(5)]
    for on, module in ((False, decode), (True, device_round)):
        rounds, real = list[Any](), module.commit

        def noted(batch: Batch, draft: DraftBlock, verdict: Verdict, real: Any = real, rounds: Any = rounds) -> Any:
            rounds.append({seq.request_id: each for seq, each in zip(batch.sequences, draft.tokens_B, strict=True)})
            return real(batch, draft, verdict)

        engine = engine_of(
            own, DRAFTERS[name](own, draft_ids=draft_ids), on=on, planner=FixedPlanner(4, whole_blocks=False)
        )
        ids, confidences = [engine.add(*each) for each in zip(PROMPTS, params, strict=True)], list[Any]()
        with monkeypatch.context() as patch:
            patch.setattr(module, "commit", noted)
            while engine.has_work:
                engine.step()
                confidences += [each.confidence_B for each in engine.rounds]
        both.append((ids, rounds, confidences))
    (ids, before, sure), (same_ids, after, same_sure) = both
    assert ids == same_ids and before == after and len(before) > 10 and len(sure) == len(same_sure)
    for one_B, other_B in zip(sure, same_sure, strict=True):
        for one, other in zip(one_B or (), other_B or (), strict=True):
            assert (one or []) == pytest.approx(other or [], rel=1e-4, abs=1e-5)


def test_a_draw_that_needs_the_whole_distribution_is_the_hosts() -> None:
    """A vocabulary larger than the number of race candidates, and filters that these cannot decide."""
    own = target(vocab=200)
    params = [
        SamplingParams(temperature=3.0, seed=1, max_tokens=30),
        SamplingParams(temperature=3.0, top_p=0.95, seed=2, max_tokens=30),
        SamplingParams(temperature=3.0, min_p=1e-6, seed=3, max_tokens=30),
    ]
    expected = texts(engine_of(own, None, on=False), PROMPTS[:3], params)
    engine = engine_of(own, dflash(own))
    assert texts(engine, PROMPTS[:3], params) == expected
    assert count_of(engine, "whole distribution") > 20


@pytest.mark.parametrize(("drafter", "kept"), [(dflash, 1), (dflash, [0.9, 0.6, 0.3]), (eagle3_for, 2.5)])
def test_mocked_acceptance_keeps_what_the_rule_says(drafter: Any, kept: Any) -> None:
    own = target()
    both = list[Any]()
    for on in (False, True):
        engine = engine_of(own, drafter(own), on=on, judge=RuleJudge(mocked(kept)))
        seeded = [SamplingParams(max_tokens=24, ignore_eos=True, seed=seed) for seed in range(len(PROMPTS))]
        answers = run(engine, PROMPTS, seeded)
        both.append([(seq.output_ids, seq.rounds, seq.lossless) for seq in answers])
    assert both[0] == both[1] and not both[1][0][2]
    assert count_of(engine) > 10


def test_end_tokens_stop_strings_and_limits_cut_a_round_short(monkeypatch: pytest.MonkeyPatch) -> None:
    own = target()
    expected = texts(engine_of(own, None, on=False), PROMPTS, SamplingParams(max_tokens=40))
    ends = [SamplingParams(max_tokens=40, stop_token_ids=(text[17],)) for text in expected]
    ends[1] = SamplingParams(max_tokens=13)
    before = run(engine_of(own, None, on=False), PROMPTS, ends)
    engine = engine_of(own, dflash(own))
    right_now_and_then(monkeypatch, engine, [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)])
    after = run(engine, PROMPTS, ends)
    assert [(seq.output_ids, seq.finish_reason) for seq in after] == [
        (seq.output_ids, seq.finish_reason) for seq in before
    ]
    assert {seq.finish_reason for seq in after} == {"stop", "length"}


@pytest.mark.parametrize("drafter", [dflash, eagle3_for])
def test_rows_to_the_end_of_the_cache(drafter: Any) -> None:
    own = tiny_target(2, vocab=VOCAB, kind=GraphDecoder)
    own.allocate_cache(2, 48)
    prompts = [[1, 2, 3], [4, 3]]
    params = [SamplingParams(max_tokens=45), SamplingParams(max_tokens=46)]
    expected = texts(engine_of(own, None, on=False), prompts, params)
    assert texts(engine_of(own, drafter(own)), prompts, params) == expected


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"logit_bias": {1: 2.0}}, "shaped logits"),
        ({"presence_penalty": 0.5}, "shaped logits"),
        ({"min_tokens": 9}, "shaped logits"),
        ({"logprobs": 1}, "log-probabilities"),
    ],
)
def test_a_row_that_does_not_qualify_takes_the_batch_with_it(params: dict[str, Any], reason: str) -> None:
    own = target()
    each = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=9, **params)]
    before = run(engine_of(own, None, on=False), PROMPTS[:2], each)
    engine = engine_of(own, dflash(own))
    after = run(engine, PROMPTS[:2], each)
    assert [seq.output_ids for seq in after] == [seq.output_ids for seq in before]
    assert [len(seq.logprobs) for seq in after] == [len(seq.logprobs) for seq in before]
    assert engine.device_rounds and engine.device_rounds.counts.keys() == {ROUNDS, reason}


def test_other_drafters_keep_their_path() -> None:
    own = target()
    params = SamplingParams(max_tokens=8)
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    engine = engine_of(own, NgramDrafter())
    assert texts(engine, PROMPTS, params) == expected and count_of(engine, "kind of drafter") > 0
    several = engine_of(own, {"one": dflash(own), "two": dflash(own, is_causal=True)})
    assert texts(several, PROMPTS, params) == expected and count_of(several, "several drafters") > 0
    for rule in ("rejection", "block"):
        engine = engine_of(own, dflash(own), judge=RuleJudge(RULES[rule]))
        assert texts(engine, PROMPTS, params) == expected and count_of(engine) > 0
        texts(engine, PROMPTS, SamplingParams(max_tokens=5, temperature=1.0, seed=2))
        assert count_of(engine, "rule") > 0


@pytest.mark.parametrize(("first", "second"), [("dflash", "dflash2"), ("dflash2", "dflash")])
def test_drafters_are_swapped_between_rounds_of_both_kinds(first: str, second: str) -> None:
    """Rows keep the drafter that they began with; features wait and are taken in where rounds change."""
    own, params = target(), SamplingParams(max_tokens=30)
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    engine, done = engine_of(own, DRAFTERS[first](own)), dict[int, list[int]]()
    ids = [engine.add(prompt, params) for prompt in PROMPTS]
    shaped = engine.add([1, 1], SamplingParams(max_tokens=7, presence_penalty=0.1))
    for number in range(1000):
        if number == 8:
            engine.swap(DRAFTERS[second](own, is_causal=True))
        if number == 14:
            engine.swap(eagle3_for(own))
        if number == 20:
            engine.swap(NgramDrafter())
        for chunk in engine.step():
            if chunk.finish_reason:
                done[chunk.sequence.request_id] = chunk.sequence.output_ids
        engine.check_integrity()
        if not engine.has_work:
            break
    assert [done[request] for request in ids] == expected and shaped in done
    assert count_of(engine) > 5 and count_of(engine, "several drafters") > 0


def test_a_planner_that_adapts_learns_from_device_rounds() -> None:
    own, params = target(), SamplingParams(max_tokens=60)
    expected = texts(engine_of(own, None, on=False), PROMPTS[:3], params)
    planner = AdaptivePlanner(PassCosts([(1, 1e-3), (8, 1.1e-3), (64, 2e-3)]), adapts_chunks=False)
    engine = engine_of(own, dflash(own), planner=planner)
    assert texts(engine, PROMPTS[:3], params) == expected
    assert engine.device_rounds and set(engine.device_rounds.counts) == {ROUNDS}


def test_what_a_round_tells_of_itself() -> None:
    own, params = target(), SamplingParams(max_tokens=40)
    engine = engine_of(own, dflash(own), planner=FixedPlanner(3, whole_blocks=False))
    for prompt in PROMPTS[:3]:
        engine.add(prompt, params)
    stats = list[Any]()
    while engine.has_work:
        engine.step()
        stats += engine.rounds
    drafted = [each for each in stats if any(each.num_drafted_B)]
    assert drafted and all(each.draft_s > 0 and each.verify_s > 0 and each.host_s > 0 for each in drafted)
    for each in drafted:
        assert (
            each.source_s == {"dflash": each.draft_s}
            and each.lossless
            and len(each.drafter_B) == len(each.num_drafted_B)
        )
        for count, sure, source in zip(each.num_drafted_B, each.confidence_B, each.source_B, strict=True):
            assert len(sure or ()) == count <= 3 and source == ("dflash" if count else "none")


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_logits_that_are_not_finite_end_their_request_alone(name: str) -> None:
    own, params = target(), SamplingParams(max_tokens=30)
    expected = texts(engine_of(own, None, on=False), PROMPTS[:2], params)
    for other in (params, SamplingParams(max_tokens=30, temperature=1.0, seed=1)):
        engine = engine_of(own, DRAFTERS[name](own))
        first, second = (engine.add(prompt, each) for prompt, each in zip(PROMPTS, (params, other), strict=False))
        done: dict[int, Sequence] = {}
        for number in range(200):
            if number == 8:
                (row,) = (seq.row for seq in engine.scheduler.running if seq.request_id == second)
                own.kv.values[:, row] = float("nan")
            for chunk in engine.step():
                if chunk.finish_reason:
                    done[chunk.sequence.request_id] = chunk.sequence
            if not engine.has_work:
                break
        own.kv.values.zero_()
        assert done[first].output_ids == expected[0] and done[first].error is None
        assert done[second].finish_reason == "error" and "not finite" in str(done[second].error)


def test_where_nothing_is_recorded_device_rounds_cannot_be_had() -> None:
    ordinary = tiny_target(2, vocab=VOCAB)
    assert engine_of(ordinary, None, on=None).device_rounds is None  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="device_rounds needs a target on CUDA whose passes are recorded"):
        engine_of(ordinary, None)


@pytest.mark.parametrize(
    "name", ["dflash", "dflash2", "eagle3", "mtp", pytest.param("dspark", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
def test_random_steps(name: str, seed: int) -> None:
    """Requests come, go, are aborted and end early; nothing leaks or mixes, and greedy and seeded texts stay."""
    rng, own = random.Random(seed), target(rows=4)
    engine, alone = engine_of(own, KINDS[name](own)), engine_of(target(rows=1), None, on=False)
    alive, num_finished = set[int](), 0
    for _ in range(100):
        if len(alive) < 7 and rng.random() < 0.4:
            alive.add(engine.add([rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 20]))], random_params(rng)))
        if alive and rng.random() < 0.03:
            gone = rng.choice(sorted(alive))
            assert engine.abort(gone)
            alive.remove(gone)
        for chunk in engine.step():
            if chunk.finish_reason:
                seq = chunk.sequence
                alive.remove(seq.request_id)
                prompt = seq.tokens[: seq.prompt_len]
                assert texts(alone, [prompt], [seq.params])[0] == seq.output_ids
                num_finished += 1
        engine.check_integrity()
    assert num_finished > 5 and count_of(engine) > 40


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.9]),
        top_p=rng.choice([1.0, 0.9]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.0, 0.5]),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, 30),
        stop_token_ids=rng.choice([(), (4,)]),
        max_drafted=rng.choice([None, None, 0, 2]),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", DRAFTERS)
def test_recorded_rounds_give_the_texts_of_ordinary_ones(name: str) -> None:
    shape = target_shape(32, VOCAB)
    own = GraphDecoder(shape, target_weights(shape), num_rows=3, max_len=256, device="cuda")
    params = [SamplingParams(max_tokens=30, temperature=0.8 * (row % 2), seed=row) for row in range(len(PROMPTS))]
    expected = texts(engine_of(own, None, on=False), PROMPTS, params)
    engine = engine_of(own, DRAFTERS[name](own))
    engine.record()
    assert texts(engine, PROMPTS, params) == expected
    recorder = own.recorder
    assert recorder.replayed["round"] == count_of(engine) > 0 and not recorder.failed and not recorder.eager["round"]
