"""Chosen draft lengths: the most tokens per second by what is known, nothing said differently, seeded requests left alone."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest
from scipy.stats import chisquare

from paceline.engine import draft_length
from paceline.engine.draft_length import DraftLengths, PassCosts
from paceline.engine.engine import Engine
from paceline.model.logits import target_probs
from paceline.model.target import ForwardBatch
from paceline.testing import ByteTokenizer, FakeTarget, ScriptedDrafter
from paceline.types import Batch, RoundStats, SamplingParams, Sequence

FLAT = ((1, 1.0), (64, 1.0))
"""A pass costs the same for any number of tokens: all drafts are free."""
STEEP = ((1, 1.0), (64, 64.0))
"""Every token costs as much as a pass of one: no draft pays."""


def sequence(number: int = 0, **params: object) -> Sequence:
    return Sequence(number, [1, 2, 3], 2, SamplingParams(max_tokens=100, **params))  # pyright: ignore[reportArgumentType]


def round_of(num_drafted: int, num_accepted: int, *, verify_s: float = 1.0, draft_s: float = 0.0) -> RoundStats:
    return RoundStats([num_drafted], [num_accepted], True, draft_s=draft_s, verify_s=verify_s)


def chosen(lengths: DraftLengths, *sequences: Sequence) -> list[int | None]:
    lengths.choose(Batch(list(sequences)))
    return [seq.max_drafted for seq in sequences]


class TestPassCosts:
    def test_straight_lines_between_points_and_beyond(self) -> None:
        costs = PassCosts(((1, 2.0), (2, 3.0), (4, 9.0)))
        assert [costs.seconds(count) for count in (1, 2, 3, 4, 6)] == [2.0, 3.0, 6.0, 9.0, 15.0]

    def test_measuring_leaves_the_cache_as_it_was(self) -> None:
        target = FakeTarget(num_rows=2, max_len=16)
        costs = PassCosts.measure(target, 64)
        assert target.cache.num_free == 2 and target.cache.lengths == [0, 0]
        assert 0 < costs.seconds(1) <= costs.seconds(8) <= costs.seconds(64)
        sizes = {call.num_tokens for call in target.calls}
        assert sizes >= {1, 2} and max(sizes) <= 16

    def test_a_slow_target_is_not_measured_to_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(10**6))
        monkeypatch.setattr(draft_length.time, "perf_counter", lambda: float(next(clock)))
        target = FakeTarget(num_rows=1)
        costs = PassCosts.measure(target, 64)
        assert {call.num_tokens for call in target.calls} == {1, 2}
        assert costs.seconds(64) > 0


class TestChoice:
    def test_free_drafts_are_all_taken_and_dear_ones_none(self) -> None:
        assert chosen(DraftLengths(PassCosts(FLAT), 7), sequence()) == [7]
        assert chosen(DraftLengths(PassCosts(STEEP), 7), sequence()) == [0]

    def test_the_best_number_by_the_formula(self) -> None:
        """(1 + sum of survivals) / cost is largest at 3 for a chance of 0.75 and 0.12 of a pass for each further token."""
        costs = [1.0 + 0.12 * (count - 1) for count in range(1, 9)]
        rates = [sum(0.75**place for place in range(count + 1)) / costs[count] for count in range(8)]
        best = max(range(8), key=rates.__getitem__)
        assert 0 < best < 7, "the test needs a best number inside"
        lengths = DraftLengths(PassCosts([(count, cost) for count, cost in enumerate(costs, start=1)]), 7)
        assert chosen(lengths, sequence()) == [best]

    def test_time_spent_drafting_is_learned_and_counted(self) -> None:
        lengths = DraftLengths(PassCosts(((1, 1.0), (8, 1.7))), 7)
        assert chosen(lengths, sequence()) != [0]
        lengths.record(Batch([sequence()]), round_of(7, 3, draft_s=50.0))
        assert chosen(lengths, sequence()) != [0], "the first draft is no measure"
        lengths.record(Batch([sequence()]), round_of(7, 3, draft_s=50.0))
        assert chosen(lengths, sequence()) == [0]

    def test_a_slower_machine_changes_nothing(self) -> None:
        """All times ten times as long: drafting is as dear beside a pass as it was."""
        same, slow = (DraftLengths(PassCosts(((1, 1.0), (8, 2.0))), 7) for _ in range(2))
        for _ in range(60):
            same.record(Batch([sequence()]), round_of(4, 2, verify_s=1.5, draft_s=0.3))
            slow.record(Batch([sequence()]), round_of(4, 2, verify_s=4.5, draft_s=0.9))
        same.record(Batch([sequence()]), round_of(0, 0, verify_s=1.0))
        slow.record(Batch([sequence()]), round_of(0, 0, verify_s=3.0))
        assert chosen(same, sequence()) == chosen(slow, sequence()) != [0]

    def test_a_round_without_drafts_now_and_then_tells_what_one_takes(self) -> None:
        """What passes of one token take is not learned from passes of eight."""
        lengths, plain = DraftLengths(PassCosts(FLAT), 7), []
        for number in range(300):
            (width,) = chosen(lengths, sequence(1))
            assert width is not None
            plain += [number] * (width == 0)
            lengths.record(Batch([sequence(1)]), round_of(width, width))
        gaps = [later - sooner for sooner, later in itertools.pairwise(plain)]
        assert plain[0] <= 8 and max(gaps) <= 65 and len(plain) < 10

    def test_refused_drafts_make_it_stop_and_time_makes_it_try_again(self) -> None:
        lengths = DraftLengths(PassCosts(((1, 1.0), (8, 1.8))), 7)
        seq = sequence()
        rounds = 0
        while chosen(lengths, seq) != [0]:
            lengths.record(Batch([seq]), round_of(seq.max_drafted or 0, 0))
            rounds += 1
            assert rounds < 400
        for _ in range(2000):
            lengths.record(Batch([sequence(1)]), round_of(0, 0))
        assert chosen(lengths, sequence(2)) != [0]

    def test_a_sequence_of_its_own_kind_gets_its_own_number(self) -> None:
        lengths = DraftLengths(PassCosts(((1, 1.0), (16, 2.2))), 7)
        good, bad = sequence(1), sequence(2)
        for _ in range(30):
            lengths.record(Batch([good, bad]), RoundStats([7, 7], [7, 0], True, verify_s=2.2))
        lengths.record(Batch([good, bad]), RoundStats([0, 0], [0, 0], True, verify_s=1.0))
        long, short = chosen(lengths, good, bad)
        assert long is not None and short is not None and long > short

    def test_who_is_about_to_join_counts(self) -> None:
        """Alone it pays to draft; not in a batch of eight, which it will be in a moment."""
        lengths = DraftLengths(PassCosts(((1, 1.0), (8, 1.1), (16, 3.0))), 4)
        seq = sequence()
        assert chosen(lengths, seq) == [4]
        lengths.choose(Batch([seq]), 7)
        assert seq.max_drafted == 0

    def test_no_more_than_the_request_may_still_produce(self) -> None:
        nearly = Sequence(0, [1, 2, 3], 2, SamplingParams(max_tokens=3))
        assert chosen(DraftLengths(PassCosts(FLAT), 7), nearly) == [1]

    def test_no_more_than_the_request_asks_for(self) -> None:
        lengths = DraftLengths(PassCosts(FLAT), 7)
        assert chosen(lengths, sequence(max_drafted=0), sequence(max_drafted=3), sequence()) == [0, 3, 7]
        limits = Batch([sequence(max_drafted=0), sequence(max_drafted=3, seed=1), sequence()]).draft_limits_B(7)
        assert limits == [0, 3, 7]

    def test_a_sampled_request_with_a_seed_is_left_alone(self) -> None:
        lengths = DraftLengths(PassCosts(STEEP), 7)
        assert chosen(lengths, sequence(temperature=1.0, seed=3)) == [None]
        assert chosen(lengths, sequence(temperature=1.0), sequence(seed=3)) == [0, 0]


def test_drafting_is_measured_as_if_the_machine_were_as_fast_as_its_passes_were_then() -> None:
    """Passes that take thrice the time they did when costs were measured: drafting takes thrice the time as well."""
    slow, quick = (DraftLengths(PassCosts(((1, 1.0), (8, 1.8))), 7) for _ in range(2))
    for lengths, factor in ((slow, 3.0), (quick, 1.0)):
        for _ in range(60):
            verify_s = factor * lengths.costs.seconds(8)
            lengths.record(Batch([sequence()]), round_of(7, 2, verify_s=verify_s, draft_s=factor * 0.4))
    assert (
        slow._greedy_pace.drafting_s(1)
        == pytest.approx(quick._greedy_pace.drafting_s(1), rel=0.05)
        == pytest.approx(0.4, rel=0.05)
    )


def played(lengths: DraftLengths, pass_ms: list[float], draft_ms: float, chances: list[float], **params: object) -> list[float]:
    """Rounds of one row after another, 60 to a request: tokens per second of 20 requests, and how many were drafted a round.

    A pass of n tokens takes pass_ms[n], give or take a fifth, and now and then ten times that.
    """
    luck = random.Random(5)
    num_tokens = num_drafted = 0
    seconds = 0.0
    for number in range(20):
        seq = sequence(number, **params)
        for _ in range(60):
            (width,) = chosen(lengths, seq)
            assert width is not None
            accepted = 0
            while accepted < width and luck.random() < chances[accepted]:
                accepted += 1
            noise = luck.uniform(0.9, 1.1) * (10.0 if luck.random() < 0.02 else 1.0)
            verify_s, draft_s = pass_ms[1 + width] * noise / 1e3, (draft_ms if width else 0.01) / 1e3
            lengths.record(Batch([seq]), round_of(width, accepted, verify_s=verify_s, draft_s=draft_s))
            num_tokens, num_drafted = num_tokens + 1 + accepted, num_drafted + width
            seconds += pass_ms[1 + width] / 1e3 + draft_s
    return [num_tokens / seconds, num_drafted / (20 * 60)]


def best_rate(pass_ms: list[float], draft_ms: float, chances: list[float]) -> float:
    """Tokens per second of the best fixed number of drafts."""
    rates, expected, kept = [1e3 / pass_ms[1]], 1.0, 1.0
    for width, chance in enumerate(chances, start=1):
        kept *= chance
        expected += kept
        rates.append(1e3 * expected / (pass_ms[1 + width] + draft_ms))
    return max(rates)


GREEDY_MS = [0.0, 2.8, 3.1, 3.5, 3.9, 4.2, 4.7, 5.1, 5.6]
SAMPLED_MS = [0.0, 8.1, 8.4, 8.9, 9.8, 10.8, 11.6, 12.4, 13.2]
"""A small model on a CPU, by tokens of a pass: greedy, and at temperature 1, where judging takes longer than the pass."""
TABLES = {
    "measured": tuple((count, ms / 1e3) for count, ms in enumerate(GREEDY_MS) if count in (1, 2, 4, 8)),
    "measured while something else ran": ((1, 0.112), (2, 0.112), (4, 0.115), (8, 0.121)),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("chance", [0.05, 0.35, 0.8])
@pytest.mark.parametrize(("pass_ms", "draft_ms", "temperature"), [(GREEDY_MS, 1.0, 0.0), (SAMPLED_MS, 4.3, 1.0)])
def test_what_is_learned_comes_close_to_the_best_number(
    table: tuple[tuple[int, float], ...], chance: float, pass_ms: list[float], draft_ms: float, temperature: float
) -> None:
    chances = [chance] * 7
    rate, _ = played(DraftLengths(PassCosts(table), 7), pass_ms, draft_ms, chances, temperature=temperature)
    assert rate > 0.93 * best_rate(pass_ms, draft_ms, chances)


def test_sampled_requests_of_useless_drafts_soon_draft_next_to_nothing() -> None:
    """Also new ones: what was learned of sampled drafts stays, and greedy requests keep what was learned of theirs."""
    lengths = DraftLengths(PassCosts(TABLES["measured"]), 7)
    greedy = chosen(lengths, sequence(98))
    _, first = played(lengths, SAMPLED_MS, 4.3, [0.1] * 7, temperature=1.0)
    _, then = played(lengths, SAMPLED_MS, 4.3, [0.1] * 7, temperature=1.0)
    assert first < 0.2 and then < 0.08
    assert chosen(lengths, sequence(99)) == greedy
    assert lengths._sampled.chances[0] < 0.4 < draft_length.PRIOR == lengths._greedy.chances[0]


@pytest.mark.parametrize("points", [FLAT, STEEP, ((1, 1.0), (8, 1.8))])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_greedy_text_does_not_depend_on_what_is_chosen(accuracy: float, points: tuple[tuple[int, float], ...]) -> None:
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]

    def answers(with_lengths: bool) -> list[list[int]]:
        target = FakeTarget(vocab_size=258)
        drafter = ScriptedDrafter(target, accuracy=accuracy) if with_lengths else None
        lengths = DraftLengths(PassCosts(points), 4) if with_lengths else None
        engine = Engine(target, ByteTokenizer(), drafter, lengths=lengths)
        ids = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        done = {}
        while engine.has_work:
            done |= {chunk.sequence.request_id: chunk.sequence for chunk in engine.step() if chunk.finish_reason}
            engine.check_integrity()
        return [done[request_id].output_ids for request_id in ids]

    assert answers(True) == answers(False)


@pytest.mark.parametrize("with_probs", [False, True])
def test_the_distribution_is_the_targets_whatever_is_chosen(with_probs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of the second token given the first, lengths changing from round to round; the same draws in every run."""
    monkeypatch.setattr(os, "urandom", random.Random(7).randbytes)
    target = FakeTarget(vocab_size=8, sharpness=1.0, num_rows=4, max_len=64)
    lengths = DraftLengths(PassCosts(((1, 1.0), (8, 1.8))), 4)
    monkeypatch.setattr(draft_length._Pace, "drafting_s", lambda _self, _num_rows: 0.0)  # nor by how long this machine took
    engine = Engine(target, ByteTokenizer(), ScriptedDrafter(target, accuracy=0.5, with_probs=with_probs), lengths=lengths)
    counts: dict[int, Counter[int]] = {}
    params = SamplingParams(temperature=1.0, max_tokens=3)
    for _ in range(1200):
        engine.add([3, 1], params)
    used = Counter[int]()
    while engine.has_work:
        for chunk in engine.step():
            used.update(stats for one in engine.rounds for stats in one.num_drafted_B)
            if chunk.finish_reason == "length":
                first, second, _ = chunk.sequence.output_ids
                counts.setdefault(first, Counter())[second] += 1
    assert len(used) > 1, "the test needs lengths that change"
    for first, seen in counts.items():
        row = target.cache.allocate()
        assert row is not None
        out = target.forward(ForwardBatch([row], [0], [3], [3, 1, first], "last"))
        target.cache.rollback([row], [0])
        target.cache.free(row)
        assert out.logits_TV is not None
        expected = target_probs(out.logits_TV, params)[0].double() * seen.total()
        keep = [token for token in range(8) if expected[token] >= 5]
        if len(keep) < 2:
            continue
        observed = [seen[token] for token in keep]
        wanted = expected[keep] * (sum(observed) / expected[keep].sum())
        assert chisquare(observed, wanted.tolist()).pvalue > 1e-4
