"""N-gram lookup: finds what a plain scan finds, adapts to what is accepted, costs little where nothing repeats."""

from __future__ import annotations

import random

import pytest
from doubles import FakeTarget
from hypothesis import given
from hypothesis import strategies as st
from round_loop import generate

from paceline.draft.base import Observed
from paceline.draft.ngram import NgramDrafter, _continuation
from paceline.errors import ConfigError
from paceline.plan.costs import PassCosts
from paceline.plan.planner import AdaptivePlanner, Offer, Row
from paceline.types import Batch, RoundStats, SamplingParams, Sequence

PASS_COSTS = PassCosts(((1, 1.0), (4, 1.08), (8, 1.22), (16, 1.5)))
"""Cost of a pass over this many positions, relative to one: a small model on two cores."""


def started(drafter: NgramDrafter, prompt: list[int], max_tokens: int = 100, row: int = 0) -> Sequence:
    """Prefilled; the prompt's last token is taken as the anchor."""
    seq = Sequence(
        row, list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens), row=row, cached_len=len(prompt) - 1
    )
    drafter.start(seq)
    drafter.observe([Observed(seq, 0, seq.cached_len, None)])
    return seq


def drafts(drafter: NgramDrafter, *sequences: Sequence) -> list[list[int]]:
    return drafter.propose(Batch(list(sequences))).tokens_B


def replay(drafter: NgramDrafter, prompt: list[int], answer: list[int]) -> tuple[float, list[int]]:
    """Tokens per unit of pass cost when the target answers `answer` and a planner chooses; drafts of each round."""
    seq = started(drafter, prompt, len(answer))
    planner = AdaptivePlanner(PASS_COSTS)
    cost, lengths = 0.0, []
    while seq.num_output < len(answer):
        rest, most = answer[seq.num_output :], seq.most_drafted(drafter.num_drafted)
        chance = drafter.chance(seq)
        plan = planner.next([Row(0, "greedy", [Offer("ngram", (chance,) * most)] if chance and most else [])])
        tokens = drafter.propose(Batch([seq], plan.drafts)).tokens_B[0]
        same = next((index for index, token in enumerate(tokens) if token != rest[index]), len(tokens))
        begin = seq.cached_len
        seq.accept(rest[: same + 1])
        drafter.observe([Observed(seq, begin, seq.cached_len - begin, None)])
        spent = PASS_COSTS.seconds(1 + len(tokens))
        planner.learn(plan, RoundStats([len(tokens)], [same], True, verify_s=spent, num_checked_B=[len(tokens)]))
        cost += spent
        lengths.append(len(tokens))
    return len(answer) / cost, lengths


def test_longest_match_wins_over_the_latest() -> None:
    prompt = [1, 2, 3, 4, 50, 51, 9, 3, 4, 60, 61, 1, 2, 3, 4]
    drafter = NgramDrafter()
    assert drafts(drafter, started(drafter, prompt))[0][:2] == [50, 51]


def test_latest_of_equal_matches_wins() -> None:
    prompt = [1, 2, 50, 7, 1, 2, 60, 8, 1, 2]
    drafter = NgramDrafter()
    assert drafts(drafter, started(drafter, prompt))[0][0] == 60


def test_nothing_without_a_match() -> None:
    drafter = NgramDrafter()
    assert drafts(drafter, started(drafter, [1, 2, 3, 4])) == [[]]
    drafter = NgramDrafter(min_match=3)
    assert drafts(drafter, started(drafter, [1, 2, 3, 9, 2, 3])) == [[]]
    drafter = NgramDrafter()
    assert drafts(drafter, started(drafter, [7])) == [[]]


def test_a_loop_goes_on_through_its_own_drafts() -> None:
    drafter = NgramDrafter()
    assert drafts(drafter, started(drafter, [5, 6, 7] * 8))[0] == ([5, 6, 7] * 6)[:16]
    assert _continuation([1, 1], 1, 3) == [1, 1, 1]


def test_limits() -> None:
    loop = [5, 6, 7] * 8
    drafter = NgramDrafter(num_drafted=4)
    sequences = [started(drafter, loop, max_tokens, row) for row, max_tokens in enumerate((1, 3, 40))]
    assert [len(tokens) for tokens in drafts(drafter, *sequences)] == [0, 2, 4]
    with pytest.raises(ConfigError, match="min_match"):
        NgramDrafter(min_match=0)


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 7)
)
def test_index_agrees_with_a_scan(tokens: list[int], more: list[int], chunk: int) -> None:
    drafter = NgramDrafter(min_match=2)
    seq = Sequence(0, tokens, len(tokens), SamplingParams(max_tokens=99), row=0, cached_len=len(tokens) - 1)
    drafter.start(seq)
    for begin in range(0, seq.cached_len, chunk):
        drafter.observe([Observed(seq, begin, min(chunk, seq.cached_len - begin), None)])
    drafter.chance(seq)
    seq.tokens = tokens + more  # what was entered before is kept
    match = drafter._find(drafter._rows[0], seq.tokens)
    scan = [
        (size, end)
        for size in range(16, 1, -1)
        for end in range(len(seq.tokens) - 1, size - 1, -1)
        if seq.tokens[end - size : end] == seq.tokens[-size:]
    ]
    assert match == (scan[0] if scan else (0, 0))


def test_copying_reaches_full_drafts() -> None:
    source = random.Random(0).sample(range(1000), 200)
    per_cost, lengths = replay(NgramDrafter(), source + source[:2], source[2:])
    assert max(lengths) == 16 and per_cost > 8


@pytest.mark.parametrize("vocab", [40, 500, 5000])
def test_text_that_does_not_repeat_costs_little(vocab: int) -> None:
    generator = random.Random(1)
    prompt, answer = (generator.choices(range(vocab), k=300) for _ in range(2))
    per_cost, lengths = replay(NgramDrafter(), prompt, answer)
    assert per_cost > 0.96
    assert sum(lengths[-100:]) <= 200


def test_recovers_when_the_text_starts_copying() -> None:
    generator = random.Random(2)
    source = generator.sample(range(1000, 2000), 150)
    noise = generator.choices(range(40), k=200)
    _, lengths = replay(NgramDrafter(), source + noise[:100], noise[100:] + source)
    assert max(lengths[-12:]) == 16


def test_rows_do_not_influence_each_other() -> None:
    drafter = NgramDrafter()
    source = random.Random(3).sample(range(1000), 60)
    alone = replay(drafter, source, source)[1]
    other = started(drafter, [1, 1, 1, 1], row=1)
    drafts(drafter, other)
    assert replay(drafter, source, source)[1] == alone
    drafter.drop(other)


def test_generated_text_is_the_target_s_own() -> None:
    target = FakeTarget(vocab_size=6, order=2, num_rows=3)
    prompts = [[1, 2, 3], [4, 5], [0, 1, 0, 1]]
    answers, rounds = generate(target, NgramDrafter(), prompts, 60, chunk=2)
    assert answers == [target.greedy(prompt, 60) for prompt in prompts]
    assert len(rounds) < 40, "so small a model loops, and loops are found"
