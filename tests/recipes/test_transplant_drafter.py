"""A drafter that moves to another target: the fitted matrix, and what cannot move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import module_at
from tiny_dflash import tiny_target

from paceline.errors import ConfigError

recipe = module_at(Path(__file__).parents[2] / "recipes" / "transplant_drafter.py")


def test_a_drafter_moves_with_a_matrix_that_finds_its_states_in_another_targets() -> None:
    """The new target's states hold the donor's in turned axes, beside others, and first positions that no line fits."""
    generator = torch.Generator().manual_seed(0)
    fc_DF, turn_FG = torch.randn(8, 12, generator=generator), torch.randn(12, 20, generator=generator)
    donor = [torch.randn(40, 12, generator=generator) for _ in range(4)]
    target = [states @ turn_FG for states in donor]
    for states in target:
        states[0] = 1000.0
    fitted = recipe.fitted(donor, target, fc_DF, 1e-6)
    torch.testing.assert_close(target[0][1:] @ fitted.T, donor[0][1:] @ fc_DF.T, rtol=0.02, atol=0.05)


def test_a_donor_with_two_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="one matrix for both"):
        recipe.rows_of(tiny_target(), torch.arange(5))
