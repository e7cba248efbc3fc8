"""Drafting as a share of a pass, and from the drafter's own size."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.simulate.config import CostsConfig
from paceline.simulate.costs import catalogue
from paceline.simulate.costs.rounds import FractionDrafter, ShapeDrafter

B200 = catalogue.machines()["B200"]
RATES = {"flops_per_s": B200.flops_per_s["bfloat16"], "bytes_per_s": B200.bytes_per_s}
DFLASH = ShapeDrafter(0.983e9, **RATES, block=16)
MTP = ShapeDrafter(5.394e8, **RATES)


def test_shares() -> None:
    assert FractionDrafter(0.1).draft_s(5, 1, plain_s=2.0) == pytest.approx(1.0)
    assert [FractionDrafter(0.1, 16).draft_s(count, 1, 1.0) for count in (0, 1, 16, 17)] == pytest.approx(
        [0, 0.1, 0.1, 0.2]
    )


def test_a_block_drafter_is_read_once_and_then_bound_by_arithmetic() -> None:
    assert DFLASH.draft_s(15, 1) == pytest.approx(245.6e-6, rel=0.001)
    assert DFLASH.draft_s(15, 17) == pytest.approx(DFLASH.draft_s(15, 1))
    assert DFLASH.draft_s(15, 18) == pytest.approx(2 * 0.983e9 * 18 * 16 / 2.25e15)
    assert DFLASH.draft_s(0, 4) == 0.0


def test_a_drafter_that_goes_token_by_token_is_read_for_each() -> None:
    assert MTP.draft_s(3, 1) == pytest.approx(3 * 2 * 5.394e8 / B200.bytes_per_s)
    assert MTP.draft_s(3, 1000) == pytest.approx(3 * 2 * 5.394e8 * 1000 / 2.25e15)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: CostsConfig(drafter_cost=-0.1), "drafter_cost must be"),
        (lambda: CostsConfig(drafter_cost=float("nan")), "drafter_cost must be"),
        (lambda: CostsConfig(block=0), "block must be"),
        (lambda: CostsConfig(drafter_params=0.0), "drafter_params must be"),
        (lambda: CostsConfig(drafter_params=float("nan")), "drafter_params must be"),
    ],
)
def test_impossible_drafters(make: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make()  # pyright: ignore[reportCallIssue]
