"""The race in tensor operations against the host's: the same numbers, and the same tokens but for last bits."""

from __future__ import annotations

import random

import pytest
import torch

from paceline import rng
from paceline.errors import NumericsError
from paceline.model.sampling import device_race, logits
from paceline.model.sampling.device_race import FAILED, WHOLE, Draws
from paceline.model.sampling.race import race
from paceline.rng import Noise
from paceline.types import SamplingParams

NUM_DRAWS = 5_000


def test_numbers_are_those_of_the_host() -> None:
    draw = random.Random(0)
    seeds = [draw.choice([0, 1, 2**63 - 1, draw.randrange(2**63)]) for _ in range(2000)]
    positions, tokens = (
        [draw.randrange(2**20) for _ in seeds],
        [draw.choice([0, rng.OTHERS, draw.randrange(2**18)]) for _ in seeds],
    )
    ours = device_race.mixed(torch.tensor(seeds))
    assert [each % 2**64 for each in ours.tolist()] == [rng._mix(seed) for seed in seeds]
    numbers = device_race.exponentials(torch.tensor(seeds), torch.tensor(positions), torch.tensor(tokens))
    expected = [Noise(*key).exponentials([token])[0] for *key, token in zip(seeds, positions, tokens, strict=True)]
    torch.testing.assert_close(numbers, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


def drawn_by(params: list[SamplingParams], seeds: list[int]) -> Draws:
    floats = torch.tensor([[1 / each.temperature, each.min_p, each.top_p] for each in params], dtype=torch.float64)
    return Draws(torch.tensor(seeds), torch.tensor([each.top_k for each in params]), *floats.T.unbind())


def shapes(num_vocab: int) -> list[SamplingParams]:
    draw = random.Random(num_vocab)
    return [
        SamplingParams(
            temperature=draw.choice([0.3, 0.7, 1.0, 1.5]),
            top_k=draw.choice([0, 0, 1, 5, 40, num_vocab, 10**6]),
            top_p=draw.choice([1.0, 1.0, 0.9, 0.5, 0.999]),
            min_p=draw.choice([0.0, 0.0, 0.1, 0.9, 1.0]),
        )
        for _ in range(50)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_vocab", [6, 33, 600])
def test_tokens_are_those_of_the_host(num_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings at random: whoever wins, and wherever the host looks at the whole distribution."""
    monkeypatch.setattr(logits.native_lib, "load", lambda: None)  # the same logarithms in both
    generator, every, num_whole = torch.Generator().manual_seed(0), shapes(num_vocab), 0
    for start in range(10):
        logits_BJV = 3 * torch.randn(len(every), 4, num_vocab, generator=generator)
        seeds = [1000 * start + number for number in range(len(every))]
        places = torch.arange(4).expand(len(every), 4) + start
        ours = device_race.race(logits_BJV, drawn_by(every, seeds), places).tolist()
        for row, params in enumerate(every):
            for slot in range(4):
                expected = race(logits_BJV[row, slot], params, Noise(seeds[row], start + slot))
                num_whole += ours[row][slot] == WHOLE
                assert ours[row][slot] in (expected, WHOLE), (params, seeds[row], slot)
    assert (num_whole > 0) == (num_vocab == 600) and num_whole < 0.5 * 10 * 200


@pytest.mark.slow
def test_thousands_of_seeds_draw_the_hosts_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are draws whose two best numbers lie within a few last bits: none here."""
    monkeypatch.setattr(logits.native_lib, "load", lambda: None)
    params, logits_V = SamplingParams(temperature=1.0), torch.randn(20, generator=torch.Generator().manual_seed(3))
    seeds = torch.arange(NUM_DRAWS).view(-1, 1)
    draws = Draws(
        seeds[:, 0],
        torch.zeros(NUM_DRAWS, dtype=torch.int64),
        *torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64).view(3, 1).expand(3, NUM_DRAWS),
    )
    ours = device_race.race(logits_V.expand(NUM_DRAWS, 1, -1), draws, torch.full_like(seeds, 7))[:, 0].tolist()
    differing = [seed for seed in range(NUM_DRAWS) if ours[seed] != race(logits_V, params, Noise(seed, 7))]
    assert differing == []


def test_what_is_no_distribution_is_seen() -> None:
    bad = torch.zeros(3, 1, 40)
    bad[0, 0, 3], bad[1, 0, 5], bad[2] = float("nan"), float("inf"), float("-inf")
    params = [SamplingParams(temperature=1.0)] * 3
    assert (
        device_race.race(bad, drawn_by(params, [1, 2, 3]), torch.zeros(3, 1, dtype=torch.int64)).tolist()
        == [[FAILED]] * 3
    )
    for row in range(3):
        with pytest.raises(NumericsError):
            race(bad[row, 0], params[0], Noise(1, 0))
