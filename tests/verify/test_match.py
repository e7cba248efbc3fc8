"""Sample and match: the text of plain decoding at the same seed, for any drafter."""

from __future__ import annotations

import pytest
import torch
from checked_rows import judged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.model.sampling.logits import sample
from paceline.rng import Noise
from paceline.verify import rules
from paceline.verify.rules import RowVerdict, Uniforms

VOCAB = 5


def table(context: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(context) % 2**32)
    return torch.softmax(torch.randn(VOCAB, generator=generator) * 2, -1)


def plain(seed: int, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sample(table(tuple(tokens)), Noise(seed, len(tokens)).uniform))
    return tokens


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), data=st.data())
def test_equals_plain_decoding_token_for_token(seed: int, data: st.DataObject) -> None:
    prompt = (1, 3)
    expected = plain(seed, prompt, 12)
    tokens = list(prompt)
    while len(tokens) < len(expected):
        right = expected[len(tokens) :]
        drafts = data.draw(st.one_of(st.lists(st.integers(0, VOCAB - 1), max_size=4), st.just(right[:4])))
        rows = [table((*tokens, *drafts[:i])) for i in range(len(drafts) + 1)]
        verdict = judged(rules.match, drafts, None, torch.stack(rows), Uniforms(seed, len(tokens) - 1))
        tokens += [*drafts[: verdict.num_accepted], verdict.next_token]
        if drafts == right[:4]:
            assert verdict.num_accepted == len(drafts)
    assert tokens[: len(expected)] == expected


def test_stops_drawing_at_the_first_mismatch() -> None:
    drawn = []

    class Counting(Uniforms):
        def noise(self, slot: int) -> Noise:
            drawn.append(slot)
            return super().noise(slot)

    certain_JV = torch.eye(4)
    assert judged(rules.match, [0, 3, 2], None, certain_JV, Counting(0, 0)) == RowVerdict(1, 1)
    assert drawn == [0, 1]


@pytest.mark.slow
def test_a_draft_stands_with_its_probability_under_the_target() -> None:
    target_JV = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]])
    stood = sum(judged(rules.match, [2], None, target_JV, Uniforms(seed, 7)).num_accepted for seed in range(4000))
    assert abs(stood / 4000 - 0.3) < 0.03
