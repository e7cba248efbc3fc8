"""Lookups beside a drafter: who drafts for whom, and that nothing said depends on it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.draft.base import Observed
from paceline.draft.lookup_first import MOST_FREE, LookupFirst
from paceline.engine.draft_length import DraftLengths, PassCosts
from paceline.engine.engine import Engine
from paceline.engine.llm import LLM
from paceline.testing import ByteTokenizer, FakeTarget, ScriptedDrafter
from paceline.types import Batch, DraftBlock, RoundStats, SamplingParams, Sequence

REPEATING = [5, 6, 7, 8, 9, 20, 21, 22, 5, 6, 7, 8]
FRESH = [1, 2, 3, 4]


class Noting(ScriptedDrafter):
    """Remembers for whom it drafted, and what it observed."""

    def __init__(self, target: FakeTarget, **options: Any) -> None:
        super().__init__(target, **options)
        self.asked: list[list[int]] = []
        self.seen: list[list[int]] = []

    def propose(self, batch: Batch) -> DraftBlock:
        self.asked.append([seq.request_id for seq in batch.sequences])
        return super().propose(batch)

    def observe(self, observed: list[Observed]) -> None:
        self.seen.append([one.sequence.request_id for one in observed])
        super().observe(observed)


def started(drafter: LookupFirst, number: int, prompt: list[int], **params: Any) -> Sequence:
    settings = SamplingParams(max_tokens=50, **params)
    seq = Sequence(number, list(prompt), len(prompt), settings, row=number, cached_len=len(prompt) - 1)
    drafter.start(seq)
    drafter.observe([Observed(seq, 0, seq.cached_len, None)])
    return seq


def with_lookups(**options: Any) -> tuple[FakeTarget, Noting, LookupFirst]:
    target = FakeTarget(**options)
    inner = Noting(target, accuracy=0.5)
    drafter = LookupFirst(inner)
    drafter.bind(target)
    return target, inner, drafter


def test_only_who_takes_them_gets_what_followed() -> None:
    _, inner, drafter = with_lookups()
    rows = [started(drafter, number, prompt) for number, prompt in enumerate((FRESH, REPEATING, FRESH))]
    assert drafter.free_chance(rows[1]) > 0.5 and drafter.free_chance(rows[0]) == 0
    alone = drafter.propose(Batch(rows)).tokens_B
    assert inner.asked == [[0, 1, 2]]
    rows[1].takes_free, rows[1].max_drafted = True, 3
    block = drafter.propose(Batch(rows))
    assert inner.asked[1:] == [[0, 2]] and block.tokens_B == [alone[0], [9, 20, 21], alone[2]]
    assert block.probs_B == [None, None, None]
    for seq in rows[::2]:
        seq.takes_free, seq.max_drafted = True, 0
    assert drafter.free_chance(rows[1]) > 0 and drafter.propose(Batch(rows[1:2])).tokens_B == [[9, 20, 21]]
    assert len(inner.asked) == 2, "nobody is left to ask for"


def test_both_observe_everything_and_forget_what_is_done() -> None:
    _, inner, drafter = with_lookups()
    seq = started(drafter, 0, REPEATING)
    assert inner.seen == [[0]]
    drafter.drop(seq)
    with pytest.raises(KeyError):
        drafter.free_chance(seq)


def test_sampled_requests_and_single_tokens_have_nothing_at_hand() -> None:
    drafter = with_lookups()[2]
    assert drafter.free_chance(started(drafter, 0, REPEATING, temperature=1.0)) == 0
    assert drafter.free_chance(started(drafter, 1, [5, 6, 9, 5])) == 0


FLAT = PassCosts(((1, 1.0), (64, 1.0)))


class TestChoice:
    def test_by_what_they_promise_for_their_time(self) -> None:
        lengths, seq = DraftLengths(FLAT, 3), Sequence(0, [1, 2], 1, SamplingParams(max_tokens=100))
        for chance, takes_free, number in ((0.9, True, MOST_FREE), (0.0, False, 3), (0.1, False, 3)):
            lengths.choose(Batch([seq]), 0, lambda _, chance=chance: chance)
            assert (seq.takes_free, seq.max_drafted) == (takes_free, number)
        lengths.choose(Batch([seq]))
        assert not seq.takes_free

    def test_a_request_s_own_limit_holds(self) -> None:
        lengths = DraftLengths(FLAT, 3)
        for limit in (0, 5):
            seq = Sequence(0, [1, 2], 1, SamplingParams(max_tokens=100, max_drafted=limit))
            lengths.choose(Batch([seq]), 0, lambda _: 0.9)
            assert seq.max_drafted == limit and seq.takes_free == (limit > 0)

    def test_they_say_nothing_of_the_drafter(self) -> None:
        """What became of lookups changes neither the chances of made drafts nor what making them takes."""
        lengths, seq = DraftLengths(FLAT, 3), Sequence(0, [1, 2], 1, SamplingParams(max_tokens=100))
        before = None
        for drafted, accepted, takes_free in ((3, 3, False), (3, 3, False), (12, 0, True), (12, 0, True)):
            seq.takes_free = takes_free
            lengths.record(Batch([seq]), RoundStats([drafted], [accepted], True, draft_s=0.5, verify_s=1.0))
            if not takes_free:
                before = (list(lengths._greedy.chances), lengths._greedy_pace.drafting_s(1))
        assert (list(lengths._greedy.chances), lengths._greedy_pace.drafting_s(1)) == before


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_greedy_answers_are_the_target_s(accuracy: float, num_rows: int) -> None:
    target = FakeTarget(vocab_size=12, order=2, num_rows=num_rows)
    prompts = [[1, 2, 3, 1, 2], [4, 5, 4, 5], [6]]
    drafter = LookupFirst(ScriptedDrafter(target, accuracy=accuracy))
    engine = Engine(target, ByteTokenizer(), drafter, lengths=DraftLengths(FLAT, 4))
    ids = [engine.add(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts]
    done: dict[int, list[int]] = {}
    num_free = 0
    while engine.has_work:
        chunks = engine.step()
        num_free += sum(chunk.sequence.takes_free for chunk in chunks)
        done |= {chunk.sequence.request_id: chunk.sequence.output_ids for chunk in chunks if chunk.finish_reason}
        engine.check_integrity()
    assert [done[number] for number in ids] == [target.greedy(prompt, 60) for prompt in prompts]
    assert num_free, "a text of twelve words repeats itself"


def test_they_stand_beside_a_drafter_only_where_lengths_are_chosen() -> None:
    def made(**settings: Any) -> LLM:
        return LLM("smollm2-135m", drafter="random-dflash", weights="random", max_batch=1, max_len=64, **settings)

    for settings in ({"speculate": "full"}, {"num_drafted": 2}):
        assert not isinstance(made(**settings).engine.drafter, LookupFirst)
    llm = made()
    assert isinstance(llm.engine.drafter, LookupFirst) and not isinstance(llm.drafter, LookupFirst)
    for name in ("none", "ngram"):
        llm.use_drafter(name)
        assert not isinstance(llm.engine.drafter, LookupFirst)
