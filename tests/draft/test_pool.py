"""Several drafters in one engine: a row keeps its own, lookups stand beside it, and what one computed is not another's."""

from __future__ import annotations

import pytest
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter

from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.pool import LOOKUP_MATCH, Pool
from paceline.engine.engine import Engine
from paceline.errors import DrafterMismatchError
from paceline.learned import PassCosts
from paceline.model.target import Target
from paceline.plan import AdaptivePlanner, FixedPlanner
from paceline.types import SamplingParams

FLAT = PassCosts(((1, 1.0), (64, 1.0)))
"""A pass costs the same for any number of positions: all drafts are free."""
REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
LAYERS = [(), (0,), (1, 3), (3, 0, 1), (0, 1)]


def engine_with(target: FakeTarget, drafter: Drafter, **options: object) -> Engine:
    return Engine(target, ByteTokenizer(), drafter, **options)  # pyright: ignore[reportArgumentType]


def finished(engine: Engine) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
        engine.check_integrity()
    return texts


@pytest.mark.parametrize("after", LAYERS)
@pytest.mark.parametrize("before", LAYERS)
def test_rows_keep_the_drafter_they_began_with(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Each is handed the features of its own layers, in its own order (ScriptedDrafter compares them); every text is plain
    decoding's; the old drafter is let go with its last row."""
    target = FakeTarget(num_rows=4, is_width_invariant=True)
    old, new = (ScriptedDrafter(target, accuracy=0.7, tap_layers=layers) for layers in (before, after))
    engine = engine_with(target, old, prefill_chunk=8)
    prompts = [[number, 3, 5, 7] * 6 for number in range(1, 7)]
    ids = [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in prompts[:3]]
    texts: dict[int, list[int]] = {}
    for step in range(400):
        if step == 5:
            engine.swap(new)
            assert engine.drafter is new and engine.pool.drafters == [new, old]
            ids += [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in prompts[3:]]
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
        if step > 5 and not engine.has_work:
            break
    assert [texts[request_id] for request_id in ids] == [target.greedy(prompt, 30) for prompt in prompts]
    assert engine.pool.drafters == [new] and target.tap_layers == after
    assert not old.num_observed


def test_a_drafter_that_does_not_fit_changes_nothing() -> None:
    class Misfit(ScriptedDrafter):
        def bind(self, target: Target) -> None:
            raise DrafterMismatchError("made for another model")

    target = FakeTarget()
    old = ScriptedDrafter(target, tap_layers=(1, 2))
    engine = engine_with(target, old)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    with pytest.raises(DrafterMismatchError):
        engine.swap(Misfit(target, tap_layers=(0,)))
    assert engine.drafter is old and target.tap_layers == (1, 2) and engine.pool.drafters == [old]
    assert finished(engine)


def test_keys_of_one_drafter_are_not_reused_by_another() -> None:
    """A prompt that the old drafter has observed is computed again for the new one, which must see its features."""
    target = FakeTarget(num_rows=2, is_width_invariant=True)
    first, second = (ScriptedDrafter(target, tap_layers=(1,)) for _ in range(2))
    engine = engine_with(target, first)
    prompt = [number % 30 for number in range(40)]
    for drafter, num_reused in ((first, 0), (first, 39), (second, 0), (second, 39)):
        engine.swap(drafter)
        engine.add(prompt, SamplingParams(max_tokens=2))
        (sequence,) = engine.scheduler.prefilling
        assert sequence.num_reused == num_reused
        assert list(finished(engine).values()) == [target.greedy(prompt, 2)]


def test_swapping_back_while_old_rows_run_does_not_bind_again() -> None:
    class Counting(ScriptedDrafter):
        num_bound = 0

        def bind(self, target: Target) -> None:
            self.num_bound += 1

    target = FakeTarget()
    first, second = Counting(target), Counting(target)
    engine = engine_with(target, first)
    engine.add([1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()
    for drafter in (second, first, first):
        engine.swap(drafter)
    assert (first.num_bound, second.num_bound) == (1, 1) and engine.pool.drafters == [first]


def test_a_row_that_its_drafter_does_not_know_is_decoded_plainly() -> None:
    class Ignorant(ScriptedDrafter):
        def can_draft(self, seq: object) -> bool:
            return False

    target = FakeTarget()
    engine = engine_with(target, Ignorant(target))
    engine.add([1, 2, 3], SamplingParams(max_tokens=5))
    assert list(finished(engine).values()) == [target.greedy([1, 2, 3], 5)]
    assert max(call.num_tokens for call in target.calls[1:]) == 1


class TestLookups:
    """N-gram lookups beside a drafter that has to compute its drafts."""

    def test_only_beside_a_drafter_that_computes(self) -> None:
        for kind, has in ((ScriptedDrafter, True), (NgramDrafter, False), (NoDrafter, False)):
            target = FakeTarget()
            engine = engine_with(target, kind(target) if kind is ScriptedDrafter else kind(), lookups=True)
            engine.add(REPEATING, SamplingParams(max_tokens=20))
            engine.step()
            (seq,) = engine.scheduler.running
            seq.tokens[-1] = REPEATING[len(REPEATING) % 5]  # the text goes on as before
            offers = engine.pool.offers(seq, FixedPlanner())
            assert ([offer.source for offer in offers] == ["scripted", "ngram"]) is has

    def test_repeating_text_is_looked_up_and_other_text_drafted(self) -> None:
        target = FakeTarget(order=1, vocab_size=12)
        engine = engine_with(target, ScriptedDrafter(target, accuracy=0.6), planner=AdaptivePlanner(FLAT), lookups=True)
        sequences = []
        for prompt in (REPEATING, [1, 2, 3]):
            engine.add(prompt, SamplingParams(max_tokens=80, ignore_eos=True))
            sequences.append((engine.scheduler.prefilling or engine.scheduler.running)[-1])
        texts = finished(engine)
        assert list(texts.values()) == [target.greedy(prompt, 80) for prompt in (REPEATING, [1, 2, 3])]
        sources = {one.source for seq in sequences for one in seq.rounds}
        assert {"scripted", "ngram"} <= sources
        assert all(one.num_drafted > 0 for seq in sequences for one in seq.rounds if one.source != "none")

    def test_one_token_that_stood_before_is_no_lookup(self) -> None:
        target = FakeTarget()
        pool = Pool(target, ScriptedDrafter(target), NgramDrafter(min_match=LOOKUP_MATCH))
        engine = engine_with(target, NoDrafter())
        engine.pool = pool
        engine.add([5, 6, 9, 5], SamplingParams(max_tokens=9))
        (seq,) = engine.scheduler.prefilling
        engine.step()
        seq.tokens[-1] = 5  # as if the answer began like this: "5" was seen, "5 5" was not
        offers = pool.offers(seq, FixedPlanner())
        assert [offer.source for offer in offers] == ["scripted"]
        assert pool.offers(seq, FixedPlanner(), {"scripted"}) == []
