"""experiments/mock_serving.py: one table of two, the curve that a number is, the verdict, and the whole on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checked_rows import judged

from paceline.verify.rules import Uniforms, mocked

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHAPE = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "model_type": "llama"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("mock_serving")


@pytest.mark.parametrize("kept", [1.0, 2.0, 3.25, 4.0])
def test_a_number_is_simulated_by_the_curve_of_its_rounds(script: ModuleType, kept: float) -> None:
    """Of the very rule that the engine has."""
    position, counts = 0, [0] * 9
    rows_JV = torch.eye(6)[[2] * 8]
    for _ in range(400):
        accepted = judged(mocked(kept).verify, [4] * 7, None, rows_JV, Uniforms(0, position))[0]
        counts[accepted] += 1
        position += accepted + 1
    curve = script.curve_of(kept)
    shares = [sum(counts[slot + 1 :]) / 400 for slot in range(len(curve))]
    assert shares == pytest.approx(curve, abs=0.01) and sum(counts[len(curve) + 1 :]) == 0
    assert script.curve_of((0.5, 0.25)) == (0.5, 0.25)


def test_one_table_of_two(script: ModuleType) -> None:
    runs = [
        {"verify": [[1, 1, s], [1, 8, 2 * s]], "draft": [[1, 7, s]], "prefill": [[16, s]], "host_s": s, "model": "m"}
        for s in (0.01, 0.03)
    ]
    merged = script.mean_steps(runs)
    assert merged["verify"] == [[1, 1, pytest.approx(0.02)], [1, 8, pytest.approx(0.04)]] and merged["model"] == "m"
    assert merged["draft"] == [[1, 7, pytest.approx(0.02)]] and merged["prefill"] == [[16, pytest.approx(0.02)]]
    assert merged["host_s"] == pytest.approx(0.02) and script.pace(*runs) == pytest.approx(3.0)


@pytest.mark.parametrize(("error", "is_within"), [(0.14, True), (-0.14, True), (0.16, False), (-0.16, False)])
def test_the_verdict(script: ModuleType, capsys: pytest.CaptureFixture[str], error: float, is_within: bool) -> None:
    rows = [
        script.Row(each, 100.0, (90.0, 110.0), 100.0 * (1 + off), off, 100.0, 4.0, 4.0, False)
        for each, off in ((1, 0.0), (8, error))
    ]
    assert script.show(rows, 1.4, 0.15) is is_within
    said = capsys.readouterr().out
    assert f"{1 + is_within} of 2 loads within 15%" in said and "the machine's pace changed" in said


def test_help(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    assert "--step-repeat" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.nightly
def test_the_whole_of_it(script: ModuleType, tmp_path: Path) -> None:
    """Real steps, a real server, a real load; on a machine with others at work only the arithmetic is sure."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = [
        "--model",
        str(tmp_path / "config.json"),
        "--mock",
        "3",
        "--concurrency",
        "1,2",
        "--requests",
        "4",
        "--max-tokens",
        "25",
    ]
    words += [
        "--prompt-tokens",
        "16",
        "--repeat",
        "1",
        "--step-repeat",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--within",
        "1000",
    ]
    assert script.main(words) == 0
    told = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [row["concurrency"] for row in told["rows"]] == [1, 2] and told["within"] is True
    for row in told["rows"]:
        assert row["lossless"] is False and row["measured"] > 0 and row["simulated"] > 0 and row["replayed"] > 0
        assert row["tokens_per_round"] == pytest.approx(3.0) and row["simulated_tokens_per_round"] == pytest.approx(3.0)
        assert row["error"] == pytest.approx(row["simulated"] / row["measured"] - 1)
