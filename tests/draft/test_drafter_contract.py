"""Every method of drafting keeps the same contract: rows are independent, broken weights draft nothing, memory is
counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from round_loop import LogitsJudge, admit, generate, ready
from tiny_dflash import KINDS, PROMPT, VARIANTS, VOCAB, network, raw_config, tiny_target
from tiny_dflash2 import network_2, raw_2
from tiny_drafters import DRAFTERS

from paceline.draft.base import Drafter
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash2.drafter import DFlash2Drafter
from paceline.draft.registry import make_drafter
from paceline.draft.tapped import TappedDrafter
from paceline.engine.round import decode_round
from paceline.types import Batch, SamplingParams

SLIDING = {"dflash-sliding": lambda: DFlashDrafter(network(raw_config(**VARIANTS["sliding-both-ways"])))}
WITH_WEIGHTS = [name for name in DRAFTERS if name != "small_model"]


class Drafts(NamedTuple):
    """One row's drafts of one round."""

    text: list[int]
    """The row's tokens before the drafts."""
    tokens: list[int]
    logprobs: torch.Tensor
    """Log-probabilities of the most probable tokens at each draft position; empty for a small model."""


def recorded(drafter: Drafter) -> list[Drafts]:
    """A list that the drafter's rounds are appended to."""
    rounds, propose = list[Drafts](), drafter.propose

    def recording(batch: Batch) -> Any:
        block = propose(batch)
        named = propose(replace(batch, num_candidates=VOCAB)) if isinstance(drafter, TappedDrafter) else None
        for index, (seq, tokens) in enumerate(zip(batch.sequences, block.tokens_B, strict=True)):
            candidates = named.candidates_B[index] if named and named.candidates_B else None
            logprobs = torch.tensor(candidates.logprobs_KM if candidates else [])
            if tokens:
                rounds.append(Drafts(list(seq.tokens), tokens, logprobs))
        return block

    drafter.propose = recording
    return rounds


def assert_same_drafts(actual: list[Drafts], expected: list[Drafts]) -> None:
    for one, other in zip(sorted(actual, key=lambda each: each.text), expected, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS | SLIDING)
def test_batched_rows_of_different_lengths_draft_what_they_draft_alone(name: str) -> None:
    target, drafter, prompts = tiny_target(), (DRAFTERS | SLIDING)[name](), [PROMPT, PROMPT[:3], PROMPT[4:11]]
    rounds = recorded(drafter)
    alone = [generate(target, drafter, [prompt], 16)[0][0] for prompt in prompts]
    apart = sorted(rounds, key=lambda each: each.text)
    rounds.clear()
    together, stats = generate(target, drafter, prompts, 16, chunk=4)
    assert together == alone
    has_uneven_rounds = any(len(set(each.num_drafted_B)) > 1 for each in stats)
    assert has_uneven_rounds or name not in ("dflash", "eagle3"), "the test needs rows that end at different places"
    assert_same_drafts(rounds, apart)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_is_clean_after_reuse(name: str) -> None:
    target, drafter = tiny_target(num_rows=1), DRAFTERS[name]()
    rounds = recorded(drafter)
    answer = generate(target, drafter, [PROMPT], 20)[0]
    first = sorted(rounds, key=lambda each: each.text)
    generate(target, drafter, [PROMPT[::-1]], 30)
    rounds.clear()
    assert generate(target, drafter, [PROMPT], 20)[0] == answer
    assert_same_drafts(rounds, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_nothing_is_drafted_from_numbers_that_are_not_finite(name: str, kind: Any) -> None:
    target, drafter = tiny_target(kind=kind), DRAFTERS[name]()
    with torch.no_grad():
        drafter.network.norm.weight[0] = float("nan")
    ready(target, drafter)
    greedy, drawn, seeded = (
        admit(target, drafter, PROMPT, SamplingParams(max_tokens=40, temperature=temperature, seed=seed))
        for temperature, seed in ((0.0, None), (0.8, None), (0.8, 5))
    )
    for other in (drawn, seeded):
        block = drafter.propose(Batch([greedy, other]))
        assert block.tokens_B == [[], []] and block.probs_B == [None, None]


SIZED = {
    **{name: lambda _, of=of: of() for name, of in DRAFTERS.items()},
    "small_model": lambda _: DRAFTERS["small_model"](num_rows=1),
    "dflash2-never-native": lambda _: DFlash2Drafter(network_2(raw_2(group=4))),
    "random-dflash": lambda target: make_drafter("random-dflash", target, head_dim=8, block_size=6),
    "random-eagle3": lambda target: make_drafter("random-eagle3", target, num_drafted=2, head_dim=8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZED)
def test_cache_bytes_are_those_allocated(name: str, kind: Any) -> None:
    target = tiny_target(kind=kind)
    drafter = SIZED[name](target)
    expected = drafter.cache_bytes(target)
    ready(target, drafter)
    cache = drafter._path.cache if isinstance(drafter, TappedDrafter) else drafter.model.cache
    assert drafter.cache_bytes(target) == cache.num_bytes == expected
    decode_round(Batch([admit(target, drafter, PROMPT, SamplingParams(max_tokens=9))]), target, drafter, LogitsJudge())
