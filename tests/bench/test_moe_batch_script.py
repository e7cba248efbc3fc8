"""experiments/moe_batch.py on a tiny mixture of experts: what is counted, what is held beside it, and the verdict."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = "--hidden-size 32 --num-hidden-layers 2 --num-attention-heads 2 --num-key-value-heads 1 --head-dim 16 --vocab-size 256"
TINY += " --num-experts 16 --num-experts-per-tok 2 --moe-intermediate-size 16 --intermediate-size 16 --dtype float32"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    module = importlib.import_module("moe_batch")
    monkeypatch.setattr(module, "FIT_BATCHES", (1, 3))
    monkeypatch.setattr(module, "FIT_POSITIONS", (1, 2, 3, 6))
    return module


def test_the_whole_on_a_tiny_model(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY.split(), "--batch", "1,2", "--repeat", "2", "--step-repeat", "1", "--within", "100", "--out", str(tmp_path)]
    assert script.main(words) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["lossless"] is False and [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert row["tokens_per_round"] == 3
        assert row["error"] == pytest.approx(row["predicted"] / row["speedup"] - 1)
        rate = row["tokens_per_round"] * row["plain_ms"] / row["speculative_ms"]
        assert row["speedup"] == pytest.approx(rate), "tokens per second over plain decoding's"
        assert len(row["plain_runs_ms"]) == len(row["speculative_runs_ms"]) == 2
    one, two = found["rows"]
    assert one["plain_experts"] == 2 < one["speculative_experts"] <= 8 and two["speculative_experts"] > two["plain_experts"]
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert {width for _, width, _ in steps["verify"]} == {1, 2, 3, 6}, "the compared size was not fitted"
    assert steps["experts"][0] == [1, 1, 2.0]
    assert "largest error" in capsys.readouterr().out
    assert not script.show([script.Row(**row) for row in found["rows"]], 0.0)
