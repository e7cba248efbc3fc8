"""`paceline compare --simulate`: curve, points, slopes, and the same picture for the same figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulate_steps import steps_file
from typer.testing import CliRunner

from paceline.bench.pages.speedup_chart import Point, chart_of, draw, read_points, slope
from paceline.cli import app
from paceline.errors import ConfigError
from paceline.simulate.config import ChartConfig, CostsConfig

ON = CostsConfig(model="Qwen3.5-27B", hardware="B200", plain_rate=75.0)
MOCK = {
    "model": "qwen",
    "lossless": False,
    "results": [
        {"batch": 1, "tokens_per_round": kept, "num_drafted": kept - 1, "speedup": speedup, "lossless": False}
        for kept, speedup in ((1, 1.0), (2, 1.86), (4, 3.57), (8, 5.62))
    ],
}
REAL = {
    "model": "qwen",
    "results": [
        {"drafter": "none", "batch": 1, "temperature": 0.0, "tokens_per_round": 1.0, "speedup": 1.0},
        {"drafter": "default", "batch": 1, "temperature": 0.0, "tokens_per_round": 3.0, "speedup": 2.0},
        {"drafter": "default", "batch": 8, "temperature": 0.0, "tokens_per_round": 3.0, "speedup": 1.2},
        {"drafter": "ngram", "batch": 1, "temperature": 1.0, "tokens_per_round": 1.5, "speedup": None},
    ],
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "mock", tmp_path / "real"]
    for folder, results in zip(folders, (MOCK, REAL), strict=True):
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(results))
    return folders


def test_slopes_are_those_of_least_squares_through_one_and_one() -> None:
    assert slope([(1, 1), (2, 2), (5, 5)]) == pytest.approx(1.0)
    assert slope([(1, 5.0)]) is None and slope([]) is None
    assert slope([(2, 1.5), (3, 2.5)]) == pytest.approx((0.5 + 2 * 1.5) / (1 + 4))


def test_curve_points_and_slopes(runs: list[Path]) -> None:
    chart = chart_of(ON, ChartConfig(tuple(runs), context=6144))
    assert chart.curve[0] == (1.0, 1.0) and len(chart.curve) == 8
    assert dict(chart.curve)[4] == pytest.approx(3.49, abs=0.01), "as docs/explanation/landmarks.md has it"
    assert [point.is_mocked for point in chart.points] == [True] * 4 + [False]
    assert chart.points[-1] == Point("default (qwen)", 3.0, 2.0, False)
    assert chart.slopes["toy"] == 1.0 and chart.slopes["drafters"] == pytest.approx(0.5)
    assert chart.slopes["mocked"] == pytest.approx((0.86 + 3 * 2.57 + 7 * 4.62) / (1 + 9 + 49))
    assert chart.slopes["roofline"] < 1
    assert "mocked 0.69" in chart.text


def test_a_calibration_is_the_curve(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text(json.dumps(steps_file()))
    chart = chart_of(CostsConfig(table=tmp_path), ChartConfig(context=256))
    assert chart.kind == "measured steps" and set(chart.slopes) == {"toy", "measured steps"}


def test_runs_without_points_are_refused(runs: list[Path], tmp_path: Path) -> None:
    assert [point.speedup for point in read_points(runs[1], 8)] == [1.2]
    with pytest.raises(ConfigError, match="at batch 16"):
        read_points(runs[1], 16)
    with pytest.raises(ConfigError, match="--results takes"):
        read_points(tmp_path / "nowhere", 1)


@pytest.mark.slow
def test_the_same_picture_twice(runs: list[Path], tmp_path: Path) -> None:
    chart = chart_of(ON, ChartConfig(tuple(runs), context=6144))
    for name in ("a", "b"):
        draw(chart, tmp_path / f"{name}.svg", tmp_path / f"{name}.png")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text()
    for expected in ("<svg", "y = x", "tokens a round", "default (qwen) (slope 0.50)", "stroke-dasharray"):
        assert expected in text


@pytest.mark.slow
def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    words = ["compare", "--simulate", "--model", "Qwen3.5-27B", "--hardware", "B200", "--plain-rate", "75", "--json"]
    words += [
        "--out",
        str(tmp_path / "out"),
        "--context",
        "6144",
        *(word for run in runs for word in ("--results", str(run))),
    ]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["slopes"]["drafters"] == pytest.approx(0.5)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "speedup.svg",
        "speedup.png",
        "speedup.json",
        "command.txt",
    }
    assert "slope through 1, 1" in result.stderr


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["--simulate", "a prompt"], "leave the prompt"),
        (["--simulate", "--raw"], "leave --raw out"),
        (["--simulate", "--system", "Be brief.", "--repeat", "2"], "leave --system, --repeat out"),
        (["--simulate", "--max-tokens", "9", "--temperature", "1"], "leave --temperature, --max-tokens out"),
        (["--simulate", "--model", "Qwen3-8B", "--drafter", "ngram", "--mock", "2"], "leave --drafter, --mock out"),
        (["--simulate", "--from", "runs/x"], "leave --from out"),
        (["--simulate", "--acceptance", "0.9"], "--acceptance: only with --columns or --columns-png"),
        (["--simulate", "--max-draft", "4", "--png", "x.png"], "--max-draft: only with --columns or --columns-png"),
        (["a prompt", "--png", "x.png"], "go with --simulate"),
        (["a prompt", "--hardware", "B200"], "go with --simulate"),
    ],
)
def test_options_that_have_no_effect_are_refused(words: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["compare", *words])
    assert remedy in str(result.exception)
