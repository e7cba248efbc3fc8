"""The published landmarks and both tables of the performance model, from the catalogue's own entries."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.simulate.costs import catalogue
from paceline.simulate.costs.roofline import Deployment
from paceline.simulate.costs.rounds import FractionDrafter, RooflineCosts
from paceline.simulate.speedup import Load, Prediction, constant, predict, tokens_per_round

FLASH, PRO, DENSE = "DeepSeek-V4-Flash", "DeepSeek-V4-Pro", "Qwen3.5-27B-FP8"
TABLE = {
    (FLASH, 1): ((1.23, 2), (1.66, 5)),
    (FLASH, 4): ((1.02, 1), (1.25, 7)),
    (FLASH, 8): ((1.00, 0), (1.64, 16)),
    (FLASH, 32): ((1.43, 6), (3.87, 16)),
    (FLASH, 128): ((2.00, 4), (5.13, 16)),
    (FLASH, 256): ((1.93, 4), (4.26, 13)),
    (PRO, 1): ((1.22, None), (1.63, None)),
    (PRO, 4): ((1.00, None), (1.16, None)),
    (PRO, 8): ((1.00, 0), (1.23, None)),
    (PRO, 32): ((1.17, 6), (2.98, 16)),
    (PRO, 128): ((1.90, None), (5.06, None)),
    (PRO, 256): ((1.96, None), (4.69, None)),
    (DENSE, 1): ((2.19, None), (7.12, 16)),
    (DENSE, 4): ((2.19, None), (7.12, None)),
    (DENSE, 8): ((2.19, None), (7.12, None)),
    (DENSE, 32): ((2.19, None), (5.29, 8)),
    (DENSE, 128): ((1.74, None), (2.69, None)),
    (DENSE, 256): ((1.46, None), (2.22, None)),
}
"""(model, batch) -> (speed-up, best length or None where none was published) autoregressive, then block."""


def predicted(model: str, batch: int, chance: float, block: int | None) -> Prediction:
    shape = catalogue.find(model)
    deployment = Deployment(catalogue.machines()["B200"], shape.precisions)
    costs = RooflineCosts(shape, deployment, FractionDrafter(0.10, block))
    return predict(costs, constant(chance), Load(batch, 4096, 16))


@pytest.mark.parametrize(
    ("model", "batch", "chance", "block", "length", "speedup", "published"),
    [
        (FLASH, 8, 0.75, None, 0, 1.00, "0, 1.0x"),
        (FLASH, 8, 0.89, 16, 16, 1.64, "16, 1.6x"),
        (PRO, 32, 0.75, None, 6, 1.17, "20%"),
        (PRO, 32, 0.89, 16, 16, 2.98, "3x"),
    ],
)
def test_the_published_four(
    model: str, batch: int, chance: float, block: int | None, length: int, speedup: float, published: str
) -> None:
    prediction = predicted(model, batch, chance, block)
    assert (prediction.best_draft_length, round(prediction.speedup, 2)) == (length, speedup)
    as_published = {
        "0, 1.0x": f"{prediction.best_draft_length}, {prediction.speedup:.1f}x",
        "16, 1.6x": f"{prediction.best_draft_length}, {prediction.speedup:.1f}x",
        "20%": f"{100 * round(prediction.speedup - 1, 1):.0f}%",
        "3x": f"{prediction.speedup:.0f}x",
    }[published]
    assert as_published == published


@pytest.mark.parametrize(("model", "batch"), list(TABLE))
def test_the_tables(model: str, batch: int) -> None:
    cases = zip(TABLE[model, batch], ((0.75, None), (0.89, 16)), strict=True)
    for (speedup, length), (chance, block) in cases:
        prediction = predicted(model, batch, chance, block)
        assert prediction.speedup == pytest.approx(speedup, rel=0.02)
        assert abs(prediction.speedup - speedup) < 0.0101, "the tables are rounded to two places"
        assert length is None or prediction.best_draft_length == length


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
