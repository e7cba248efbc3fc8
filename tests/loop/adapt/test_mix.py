"""A mix of two clusters that moves after one of them got a drafter of its own."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.traffic.hours import DAY, Sums
from paceline.loop.adapt.traffic.world import EPOCH

pytestmark = pytest.mark.slow
SERVED, DAYS = 10 * DAY, 18
"""Hour from which on the member serves west, and days of traffic."""
EAST, WEST = 3.0, 1.5
"""Tokens a round with the first drafter."""


def traffic(at: int, west: float, moves_at: int, draw: np.random.Generator) -> dict[str, Sums]:
    """East by day and west by night; from `moves_at` on nearly all is west's."""
    shares = (0.1, 0.9) if at >= moves_at else (0.75, 0.25) if at % DAY < 12 else (0.25, 0.75)
    sums = {}
    for name, share, per_round in (("east", shares[0], EAST), ("west", shares[1], west)):
        lengths = draw.normal(120, 12, round(240 * share))
        per_rounds = per_round * np.exp(draw.normal(0, 0.1, len(lengths)))
        sums[name] = Sums.of(list(zip(lengths.tolist(), (lengths / per_rounds).tolist(), strict=True)))
    return sums


def alarms(west: float, moves_at: int) -> list[tuple[str, int]]:
    """(series, hour raised) of the alarms that held, once a member serves west with `west` tokens a round."""
    policy, draw, raised = SeasonalPolicy(), np.random.default_rng(0), list[tuple[str, int]]()
    for at in range(DAYS * DAY):
        if at == SERVED:
            policy.trained(EPOCH + at - 1, ("west",), 2.0)
        line = policy.hour(EPOCH + at, traffic(at, west if at >= SERVED else WEST, moves_at, draw))
        raised += [(name, hour - EPOCH) for name, hour in line.raised]
    return raised


@pytest.mark.parametrize("hours", [12, 3 * DAY])
def test_a_mix_that_moves_afterwards_is_noticed(hours: int) -> None:
    """Three days after the change of drafters, and in the day in which the new level is still being learned."""
    raised = alarms(2.0, SERVED + hours)
    assert [name for name, _ in raised] == ["mix"]
    assert raised[0][1] <= SERVED + max(hours, DAY) + DAY
