"""Training with weights as blocks of four bits hold them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from small_teacher import untaught

from paceline.loop.distill import rounding


def test_it_rounds_as_the_file_will() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.25
    stored = gguf.dequantize(gguf.quantize(weight.numpy(), Quant.Q4_1), Quant.Q4_1)
    np.testing.assert_array_equal(rounding.q4_1(weight).numpy(), stored)
    np.testing.assert_allclose(rounding.q4_1(rounding.q4_1(weight)), stored, atol=2e-3)


@pytest.mark.slow
def test_a_model_computes_with_rounded_matrices_and_learns_behind_them() -> None:
    """The same outputs as a model whose matrices are rounded; gradients on the exact ones, whose names stay."""
    model, other = untaught(), untaught()
    rounding.compute_rounded(model)
    rounding.round_weights(other)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, other(ids).logits)
    names = set(model.state_dict())
    assert names == set(other.state_dict())
    before = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    first = model(ids, labels=ids).loss
    first.backward()
    optimiser.step()
    assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    assert model(ids, labels=ids).loss < first  # computed with the new values, not with those of the step before
    assert len(rounding.matrices(model)) == 4 * 7
