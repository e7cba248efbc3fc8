"""Drafting as a share of a pass, and from the drafter's own size."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.hardware import KNOWN_MACHINES
from paceline.simulate.config import CostsConfig
from paceline.simulate.costs import FractionDrafter, ShapeDrafter

B200 = KNOWN_MACHINES["B200"]
RATES = {"flops_per_s": B200.flops_per_s["bfloat16"], "bytes_per_s": B200.bytes_per_s}
DFLASH = ShapeDrafter(0.983e9, **RATES, block=16)
MTP = ShapeDrafter(5.394e8, **RATES, num_experts=256, experts_per_token=8, expert=3145728)
"""Qwen3.6-35B-A3B's: the head of 508.6M, one layer's attention, projections and shared expert, and 256 experts."""


def test_shares() -> None:
    assert FractionDrafter(0.1).draft_s(5, 1, plain_s=2.0) == pytest.approx(1.0)
    assert [FractionDrafter(0.1, 16).draft_s(count, 1, 1.0) for count in (0, 1, 16, 17)] == pytest.approx([0, 0.1, 0.1, 0.2])


def test_a_block_drafter_is_read_once_and_then_bound_by_arithmetic() -> None:
    assert DFLASH.draft_s(15, 1) == pytest.approx(245.6e-6, rel=0.001)
    assert DFLASH.draft_s(15, 17) == pytest.approx(DFLASH.draft_s(15, 1))
    assert DFLASH.draft_s(15, 18) == pytest.approx(2 * 0.983e9 * 18 * 16 / 2.25e15)
    assert DFLASH.draft_s(0, 4) == 0.0


@pytest.mark.parametrize(("length", "batch"), [(2, 40), (3, 67), (4, 94), (8, 193)])
def test_where_token_by_token_drafting_becomes_cheaper(length: int, batch: int) -> None:
    first = next(rows for rows in range(1, 1000) if MTP.draft_s(length, rows) < DFLASH.draft_s(15, rows))
    assert first == pytest.approx(batch, rel=0.03)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: CostsConfig(drafter_cost=-0.1), "--drafter-cost"),
        (lambda: CostsConfig(drafter_cost=float("nan")), "--drafter-cost"),
        (lambda: CostsConfig(block=0), "--block"),
        (lambda: CostsConfig(drafter_params=0.0), "--drafter-params"),
        (lambda: CostsConfig(drafter_params=float("nan")), "--drafter-params"),
    ],
)
def test_impossible_drafters(make: object, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        make()  # pyright: ignore[reportCallIssue]
