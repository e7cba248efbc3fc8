"""Guessing the target's draws: right positions, better than the likeliest token, and only where the rule draws."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from round_loop import admit, ready
from tiny_dflash import PROMPT, network, raw_config, tiny_target

from paceline.draft.dflash.config import DFlashConfig
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash.reading import Reading
from paceline.draft.dflash2.selector import Picks, WalkedReading, choose
from paceline.draft.foresight import Foresight
from paceline.errors import ModelFileError
from paceline.model.sampling.device_race import Draws
from paceline.model.sampling.race import race
from paceline.plan.trees import Candidates
from paceline.rng import Noise
from paceline.types import Batch, SamplingParams, Sequence, Take

SIZE, SLOTS, SURE = 20, 5, Foresight(1.0, 0.01)


def a_request(seed: int) -> Sequence:
    return Sequence(0, [3, 1, 4, 1, 5], 5, SamplingParams(temperature=1.0, seed=seed))


def logits_of(seed: int) -> torch.Tensor:
    return 2.0 * torch.randn(1, SLOTS, SIZE, generator=torch.Generator().manual_seed(seed))


def guessed(logits_BKV: torch.Tensor, seq: Sequence, kind: str, foresight: Foresight | None) -> Candidates:
    """Candidates of a drafter with these logits, whatever was drafted before."""
    if kind == "dflash":
        config = DFlashConfig.from_json(raw_config())
        reading = Reading(logits_BKV.argmax(-1).tolist(), logits_BKV, config, None, SIZE)
    else:
        scores_BKPM, chosen_BKM = logits_BKV.sort(dim=-1, descending=True)
        reading = WalkedReading(Picks(chosen_BKM, chosen_BKM, scores_BKPM[:, :, None].expand(-1, -1, SIZE, -1)), SIZE)
    return reading.candidates(0, SLOTS, seq, 4, 64, foresight)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_drafter_that_knows_the_distribution_knows_the_token(kind: str) -> None:
    """At each slot, with the numbers of its own position."""
    for seed in range(12):
        seq, logits_BKV = a_request(seed), logits_of(seed)
        drawn = [race(logits_V, seq.params, Noise(seed, 5 + slot)) for slot, logits_V in enumerate(logits_BKV[0])]
        guesses = guessed(logits_BKV, seq, kind, SURE)
        assert [tokens[0] for tokens in guesses.tokens_KM] == drawn
        seq.tokens += drawn  # what is told later is told of the same positions
        assert [guesses.at(drawn[:slot])[0][0] for slot in range(SLOTS)] == drawn


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_what_a_drafter_knows_roughly_it_guesses_better_than_by_its_likeliest(kind: str) -> None:
    hits = {"likeliest": 0, "guess": 0, "four": 0, "four guesses": 0}
    for seed in range(60):
        seq, logits_BKV = a_request(seed), logits_of(seed)
        rough = logits_BKV + 0.7 * torch.randn(logits_BKV.shape, generator=torch.Generator().manual_seed(1000 + seed))
        drawn = [race(logits_V, seq.params, Noise(seed, 5 + slot)) for slot, logits_V in enumerate(logits_BKV[0])]
        for names, foresight in ((("likeliest", "four"), None), (("guess", "four guesses"), Foresight())):
            guesses = guessed(rough, seq, kind, foresight)
            for tokens, logprobs, token in zip(guesses.tokens_KM, guesses.logprobs_KM, drawn, strict=True):
                assert logprobs == sorted(logprobs, reverse=True) and sum(map(math.exp, logprobs)) <= 1 + 1e-6
                hits[names[0]] += tokens[0] == token
                hits[names[1]] += token in tokens
    total = 60 * SLOTS
    assert hits["guess"] > hits["likeliest"] + 0.1 * total and hits["four guesses"] > hits["four"] + 0.1 * total


def test_chances_are_those_that_the_spread_says() -> None:
    """The target's scores are the drafter's and Gumbel noise of this spread: then each wins as often as it was told."""
    foresight, generator = Foresight(0.8, 0.6), torch.Generator().manual_seed(0)
    logprobs, times = [-0.5, -1.5, -2.0], [0.7, 0.2, 1.5]
    scores = torch.tensor([0.8 * log - math.log(time) for log, time in zip(logprobs, times, strict=True)])
    unknown = -torch.rand(100_000, 3, generator=generator).log().neg().log() * 0.6
    shares = torch.bincount((scores + unknown).argmax(-1), minlength=3) / 100_000
    assert torch.tensor(foresight.chances(logprobs, times)).exp().tolist() == pytest.approx(shares.tolist(), abs=0.01)


def test_its_numbers_stand_in_config_json() -> None:
    raw: dict[str, Any] = {**raw_config(), "paceline": {"foresight": {"scale": 0.6, "spread": 0.3}}}
    assert DFlashConfig.from_json(raw).foresight == Foresight(0.6, 0.3)
    assert DFlashConfig.from_json(raw_config()).foresight == Foresight()


@pytest.mark.parametrize(
    "wrong", [3, {"scale": 0}, {"scale": "1"}, {"spread": True}, {"spread": math.inf}, {"size": 1.0}]
)
def test_wrong_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(ModelFileError, match="paceline.foresight"):
        Foresight.of({"paceline": {"foresight": wrong}}, Path("config.json"))


def test_only_drafts_that_are_held_against_the_targets_draws_are_guessed() -> None:
    """A lossy rule takes a draft by its probability, whatever the numbers say: guesses would be no better there."""
    target = tiny_target()
    drafter = DFlashDrafter(network(raw_config(), 3))
    ready(target, drafter)
    sampled = SamplingParams(temperature=1.0, seed=4, max_tokens=30)
    seeded, lossy = (
        admit(target, drafter, list(PROMPT), params) for params in (sampled, replace(sampled, lossy="lenience:0.5"))
    )

    def drafts(noise_aware: bool) -> list[list[int]]:
        rows = [seeded, lossy]
        return drafter.propose(Batch(rows, [Take("dflash", 7)] * 2, noise_aware=noise_aware)).tokens_B

    unaware, foreseen = drafts(False), drafts(True)
    assert foreseen[0] != unaware[0] and foreseen[1] == unaware[1] == unaware[0]


@pytest.mark.parametrize("has_sure", [False, True])
def test_drafts_that_the_device_chooses_are_those_of_the_host(has_sure: bool) -> None:
    """Compares greedy rows, rows sampled at several temperatures, and rows with a score that is not finite."""
    generator, count, foresight = torch.Generator().manual_seed(0), 30, Foresight(0.7, 0.9)
    scores_BKPM = torch.randint(-9, 9, (count, SLOTS, 4, 4), generator=generator) / 4
    scores_BKPM += (torch.arange(count) % 2 * 0.1)[:, None, None, None] * torch.randn(4, generator=generator)
    for row, wrong in enumerate((math.nan, math.inf, -math.inf)):
        scores_BKPM[row :: count // 3, 2 + row // 2, 1:] = wrong
    scores_BKPM[:, 0] = scores_BKPM[:, 0, :1]
    tokens_BKM = torch.rand(count, SLOTS, SIZE, generator=generator).argsort(-1)[..., :4]
    sure_BK = torch.randn(count, SLOTS, generator=generator) if has_sure else None
    picks = Picks(tokens_BKM, tokens_BKM, scores_BKPM, sure_BK)
    temperatures, seeds = [(0.0, 0.3, 1.0, 1.7)[row % 4] for row in range(count)], torch.arange(count)
    inverse_B = torch.tensor([1 / each if each else 0.0 for each in temperatures], dtype=torch.float64)
    draws = Draws(seeds, torch.zeros(count, dtype=torch.int64), inverse_B, *torch.ones(2, count, dtype=torch.float64))
    position_BK = 5 + torch.arange(SLOTS).expand(count, -1)
    mixed, greedy = choose(picks, (draws, position_BK), foresight), choose(picks, None, foresight)
    reading, lengths = WalkedReading(picks, SIZE), list[int]()
    for row, temperature in enumerate(temperatures):
        expected = reading.certain(row, SLOTS, True)
        cases = [(greedy, *expected)]
        if temperature:
            seq = Sequence(0, [3, 1, 4, 1, 5], 5, SamplingParams(temperature=temperature, seed=row))
            foreseen = reading.candidates(row, SLOTS, seq, 1, 64, foresight)
            expected = [each for (each,) in foreseen.tokens_KM], [each for (each,) in foreseen.logprobs_KM]
        for (drafts_BK, confidence_BK), tokens, sure in [*cases, (mixed, *expected)]:
            length = len(tokens)
            lengths.append(length)
            assert drafts_BK[row].tolist()[: length + 1] == tokens + [-1] * (length < SLOTS)
            assert confidence_BK[row].tolist()[:length] == pytest.approx(sure, rel=1e-6)
    assert {2, SLOTS} <= set(lengths)
