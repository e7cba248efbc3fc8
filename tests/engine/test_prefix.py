"""Prefixes that are shared: computed once, the same text, never what another sequence has overwritten."""

from __future__ import annotations

import random

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from engine_runs import run
from native_models import needs_library
from small_llm import tiny_model

from paceline import LLM, SamplingParams
from paceline.draft.base import Observed
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.engine import Engine
from paceline.engine.scheduler import LEAST
from paceline.model.target import ForwardBatch
from paceline.types import Batch, Sequence

SYSTEM = [(7 * index) % 250 for index in range(60)]


def sequences(engine: Engine, prompts: list[list[int]], max_tokens: int = 12) -> list[Sequence]:
    return run(engine, prompts, SamplingParams(max_tokens=max_tokens))


def engine_of(num_rows: int = 2, *, reuses: bool = True, accuracy: float | None = 0.6) -> tuple[Engine, FakeTarget]:
    target = FakeTarget(vocab_size=258, num_rows=num_rows, is_width_invariant=reuses)
    drafter = None if accuracy is None else ScriptedDrafter(target, accuracy=accuracy)
    return Engine(target, ByteTokenizer(), drafter, prefill_chunk=16), target


def computed(target: FakeTarget) -> int:
    return sum(call.num_tokens for call in target.calls)


@pytest.mark.parametrize("accuracy", [None, 0.6])
def test_a_shared_beginning_is_computed_once(accuracy: float | None) -> None:
    engine, target = engine_of(accuracy=accuracy)
    (first,) = sequences(engine, [[*SYSTEM, 1, 2]])
    before = computed(target)
    (second,) = sequences(engine, [[*SYSTEM, 3, 4, 5]], max_tokens=1)
    assert first.num_reused == 0 and second.num_reused == len(SYSTEM)
    assert computed(target) - before == 3
    assert engine.prefix is not None and engine.prefix.num_reused == len(SYSTEM)


def test_a_conversation_goes_on_where_it_was() -> None:
    engine, _ = engine_of()
    (first,) = sequences(engine, [SYSTEM])
    turn = [*SYSTEM, *first.output_ids, 9, 9]
    (again,) = sequences(engine, [turn])
    assert again.num_reused == len(SYSTEM) + len(first.output_ids) - 1, (
        "all but the last token, which was never a pass's input"
    )


def test_a_running_sequence_lends_what_it_has() -> None:
    engine, target = engine_of()
    engine.add([*SYSTEM, 1], SamplingParams(max_tokens=30))
    for _ in range(6):
        engine.step()
    engine.add([*SYSTEM, 2], SamplingParams(max_tokens=3))
    late = engine.scheduler.prefilling[0]
    assert late.num_reused == len(SYSTEM)
    while engine.has_work:
        engine.step()
    assert target.cache.num_free == 2


@pytest.mark.parametrize("accuracy", [None, 0.6])
def test_prompts_that_arrive_together_wait_for_the_first_ones_beginning(accuracy: float | None) -> None:
    engine, target = engine_of(4, accuracy=accuracy)
    done = sequences(engine, [[*SYSTEM, number, number] for number in range(1, 5)], max_tokens=1)
    assert [seq.num_reused for seq in done] == [0] + 3 * [len(SYSTEM)]
    assert computed(target) == len(SYSTEM) + 4 * 2
    assert [seq.output_ids for seq in done] == [target.greedy([*SYSTEM, number, number], 1) for number in range(1, 5)]


def test_who_waited_for_a_beginning_that_never_came_reads_for_itself() -> None:
    engine, target = engine_of(3)
    first, *others = (engine.add([*SYSTEM, number], SamplingParams(max_tokens=2)) for number in (1, 2, 3))
    engine.step()
    engine.abort(first)
    done = {chunk.sequence.request_id: chunk.sequence for _ in range(20) for chunk in engine.step()}
    assert [done[each].output_ids for each in others] == [target.greedy([*SYSTEM, number], 2) for number in (2, 3)]
    engine.check_integrity()


def test_who_waited_and_left_lends_nothing() -> None:
    engine, target = engine_of(2)
    engine.add([*SYSTEM, 1], SamplingParams(max_tokens=8))
    left = engine.add([*SYSTEM, 2], SamplingParams(max_tokens=8))
    engine.step()
    engine.abort(left)
    engine.check_integrity()
    late = engine.add([*SYSTEM, 3], SamplingParams(max_tokens=2))
    done = {chunk.sequence.request_id: chunk.sequence for _ in range(20) for chunk in engine.step()}
    assert done[late].num_reused == len(SYSTEM) and done[late].output_ids == target.greedy([*SYSTEM, 3], 2)


def test_the_same_prompt_still_computes_its_last_token() -> None:
    engine, _ = engine_of()
    one, two = (sequences(engine, [SYSTEM])[0] for _ in range(2))
    assert two.num_reused == len(SYSTEM) - 1 and one.output_ids == two.output_ids


def test_short_beginnings_and_targets_that_depend_on_company_are_left_alone() -> None:
    engine, _ = engine_of()
    (_, short) = sequences(engine, [[*SYSTEM[: LEAST - 1], 1], [*SYSTEM[: LEAST - 1], 2]])
    assert short.num_reused == 0
    engine, _ = engine_of(reuses=False)
    assert engine.prefix is None


def test_a_row_that_others_used_meanwhile_lends_nothing() -> None:
    engine, target = engine_of(num_rows=1)
    sequences(engine, [[*SYSTEM, 1]])
    row = target.cache.allocate()
    assert row == 0
    target.fake_cache.write(0, 0, [5] * 40)
    target.cache.free(0)
    (seq,) = sequences(engine, [[*SYSTEM, 2]])
    assert seq.num_reused == 0


@pytest.mark.slow
@pytest.mark.parametrize("accuracy", [None, 0.0, 0.6, 1.0])
def test_any_order_of_events_gives_the_text_without_reuse(accuracy: float | None) -> None:
    """Random conversations over few rows: chat turns, shared systems, aborts; FakeTarget answers from what its rows
    hold."""
    draw = random.Random(3)
    prompts = []
    for _ in range(60):
        base = draw.choice([SYSTEM, SYSTEM[:30], [8] * 40, *prompts[-3:]])
        prompts.append(
            [*base[: draw.randrange(1, len(base) + 1)], *(draw.randrange(250) for _ in range(draw.randrange(1, 9)))]
        )

    def answers(reuses: bool) -> list[list[int]]:
        engine, target = engine_of(3, reuses=reuses, accuracy=accuracy)
        texts: dict[int, list[int]] = {}
        request_ids, order = list[int](), random.Random(5)

        def step() -> None:
            for chunk in engine.step():
                texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
            engine.check_integrity()

        for prompt in prompts:
            request_ids.append(engine.add(prompt, SamplingParams(max_tokens=7)))
            if order.random() < 0.15:
                unwanted = engine.add([*prompt, 1], SamplingParams(max_tokens=50))
                step()
                engine.abort(unwanted)
            for _ in range(order.randrange(6)):
                step()
        while engine.has_work:
            step()
        assert not reuses or (engine.prefix is not None and engine.prefix.num_reused > 300)
        assert target.cache.num_free == 3
        return [texts[request_id] for request_id in request_ids]

    assert answers(True) == answers(False)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_pass_with_a_drafter_that_reads_features(
    dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Text and drafts to the bit: what a sequence adopts is what it would have computed."""
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    llm = LLM(str(folder), drafter="none", dtype=dtype, backend="native", max_batch=3, max_len=256, speculate="full")
    drafter = DFlashDrafter.random(llm.target, head_dim=8, block_size=5)
    system = "You are a patient teacher who explains everything with apples. "
    prompts = [
        llm.tokenizer.encode(system + end)
        for end in ("Why is the sky blue?", "What is a tide?", "Why?", "Why is it so?")
    ]
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def run(reuses: bool) -> list[tuple[list[int], tuple[int, ...]]]:
        llm.use_drafter(drafter)
        if not reuses:
            llm.engine.prefix = None
        out = [llm.generate_ids([prompt], params)[0] for prompt in prompts] + llm.generate_ids(prompts, params)
        assert not reuses or (llm.engine.prefix is not None and llm.engine.prefix.num_reused > 300)
        return [(one.token_ids, one.stats.accepted_histogram) for one in out]

    assert run(True) == run(False)


@needs_library
def test_what_a_row_adopts_is_what_it_would_have_computed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every length, whole groups of positions or not, and features that still wait to become keys and values."""
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    llm = LLM(str(folder), drafter="none", backend="native", max_batch=2, max_len=128)
    target, tokens = llm.target, [(5 * index) % 97 for index in range(40)]
    drafter = DFlashDrafter.random(target, head_dim=8, block_size=5)
    target.set_taps(drafter.tap_layers)
    for length in (17, 31, 32, 33):
        drafter.bind(target)
        lender, taker = (
            Sequence(index, [*tokens[: length + 1]], length + 1, SamplingParams(max_tokens=20)) for index in (0, 1)
        )
        logits, drafts = [], []
        for seq in (lender, taker):
            row = target.cache.allocate()
            assert row is not None
            seq.row = row
            drafter.start(seq)
            begin = 0 if seq is lender else drafter.adopt(seq, lender.row, length)
            if seq is taker:
                assert begin == length
                target.cache.adopt(lender.row, row, begin)
            out = target.forward(ForwardBatch([row], [begin], [length + 1 - begin], tokens[begin : length + 1], "last"))
            drafter.observe([Observed(seq, begin, length + 1 - begin, out.taps_TF)])
            assert out.logits_TV is not None
            logits.append(out.logits_TV[0].clone())
            seq.cached_len = length + 1
            seq.tokens.append(7)
        for seq in (taker, lender):  # the lender has never drafted: its features waited when they were taken over
            drafts.append(drafter.propose(Batch([seq])).tokens_B[0])
            target.cache.rollback([seq.row], [0])
            target.cache.free(seq.row)
            drafter.drop(seq)
        assert torch.equal(*logits) and drafts[0] == drafts[1] and len(drafts[0]) == 4
