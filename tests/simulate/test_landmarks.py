"""The performance model's speed-ups over batches, from the catalogue's own entries; its published figures are in
test_landmarks_page.py."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import FractionDrafter, RooflineCosts
from paceline.simulate.speedup import Load, Prediction, constant, predict, tokens_per_round

FLASH, DENSE = "DeepSeek-V4-Flash", "Qwen3.5-27B-FP8"


def predicted(model: str, batch: int, chance: float, block: int | None) -> Prediction:
    shape = catalogue.find(model)
    deployment = Deployment(catalogue.machines()["B200"], shape.precisions)
    costs = RooflineCosts(shape, deployment, FractionDrafter(0.10, block))
    return predict(costs, constant(chance), Load(batch, 4096, 16))


def test_tokens_per_round() -> None:
    assert tokens_per_round(constant(0.75), 6) == pytest.approx(3.47, abs=0.005)
    assert tokens_per_round(constant(0.89), 16) == pytest.approx(7.84, abs=0.005)


def test_mixtures_of_experts_are_u_shaped_over_the_batch() -> None:
    """At a few sequences each draft brings new experts; at many all are read anyway; then arithmetic is the limit."""
    speedups = [predicted(FLASH, batch, 0.89, 16).speedup for batch in (1, 4, 32, 128, 1024)]
    one, few, many, most, compute_bound = speedups
    assert few < one < many < most
    assert compute_bound < most


def test_dense_models_are_flat_and_then_fall() -> None:
    speedups = [predicted(DENSE, batch, 0.89, 16).speedup for batch in (1, 4, 8, 32, 128, 256)]
    assert speedups[0] == pytest.approx(speedups[2], rel=0.01)
    assert all(later < sooner for sooner, later in pairwise(speedups[2:]))


def test_a_hub_config_of_the_dense_model_predicts_nearly_the_same() -> None:
    """Qwen3.5-27B counts its output gate, the landmark's entry does not: 2% more weights change no speed-up by 2%."""
    shape = catalogue.find("Qwen3.5-27B")
    deployment = Deployment(catalogue.machines()["B200"], catalogue.find(DENSE).precisions)
    costs = RooflineCosts(shape, deployment, FractionDrafter(0.10, 16))
    prediction = predict(costs, constant(0.89), Load(32, 4096, 16))
    assert prediction.speedup == pytest.approx(5.29, rel=0.02)
