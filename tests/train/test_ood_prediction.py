"""experiments/ood_prediction.py: what its table says of a training's evaluations."""

from __future__ import annotations

import pytest
from ood_prediction import summary


def test_two_figures_that_part_are_seen() -> None:
    rows = [
        {"step": 20 * number, "epoch": float(number), "production": production, "ood": ood}
        for number, (production, ood) in enumerate([(6.0, 3.2), (7.0, 3.0), (7.5, 2.9), (7.4, 2.8)], 1)
    ]
    table = summary("tickets", rows)
    assert (table["first"], table["last"], table["epochs"]) == ((6.0, 3.2), (7.4, 2.8), 4.0)
    assert table["best_epoch"] == {"production": 3.0, "ood": 1.0} and table["correlation"] < -0.9
    together = summary("maths", [row | {"ood": row["production"] - 1} for row in rows])
    assert together["correlation"] == pytest.approx(1.0)
