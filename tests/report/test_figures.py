"""The guard over measured speed-ups: what speculation cannot have brought, and what is too little to judge by."""

from __future__ import annotations

import pytest

from paceline.report.statistics import BUSY, FEWEST_TOKENS, doubt, possible_speedup


@pytest.mark.parametrize(
    ("speedup", "tokens_per_round", "kept"),
    [(9.37, 3.0, None), (1.27, 1.04, None), (1.17, 1.06, None), (1.9, 2.4, 1.9), (2.004, 2.0, 2.004), (3.0, None, 3.0)],
)
def test_a_speedup_above_the_acceptance_length_cannot_be(
    speedup: float, tokens_per_round: float | None, kept: float | None
) -> None:
    assert possible_speedup(speedup, tokens_per_round) == kept
    assert doubt(speedup, tokens_per_round, 1000) == (BUSY if kept is None else None)


def test_few_tokens_allow_no_verdict() -> None:
    assert "4 tokens are too few" in (doubt(1.8, 3.0, 4) or "")
    assert doubt(1.8, 3.0, FEWEST_TOKENS) is None
    assert doubt(9.0, 3.0, 4) == BUSY, "what cannot be is said first"
    assert doubt(None, 3.0, 1000) is None
