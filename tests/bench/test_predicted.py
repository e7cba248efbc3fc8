"""Two columns of text at predicted rates: `paceline compare --simulate --columns`, and the calculator's third tab
beside it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from xml.etree import ElementTree

import pytest
from javascript import run_js
from typer.testing import CliRunner

from paceline.bench.pages.predicted import kept_drafts, predicted, token_times
from paceline.bench.pages.speedup_chart import chart_of, read_points
from paceline.bench.pages.timing import svg
from paceline.cli import app
from paceline.errors import CacheError, ConfigError
from paceline.simulate.answer import predict_all
from paceline.simulate.assumed import CONTEXT
from paceline.simulate.calculator_page import passage
from paceline.simulate.config import ChartConfig, CostsConfig, PredictConfig

COSTS = CostsConfig(model="Qwen3.5-122B-A10B", hardware="B200", precision="fp8", plain_rate=250.0, block=16)
ASKED = ChartConfig(acceptance="0.89", context=2048)


def test_so_many_drafts_stand_as_the_curve_says() -> None:
    survival = [0.8, 0.6, 0.5, 0.1]
    counts = [kept_drafts(survival, number) for number in range(1, 2001)]
    for place, share in enumerate(survival, start=1):
        assert sum(count >= place for count in counts) / len(counts) == pytest.approx(share, abs=0.005)
    assert {kept_drafts([1.0, 1.0], number) for number in range(1, 50)} == {2} and kept_drafts([], 7) == 0


def test_both_sides_have_the_predicted_rates() -> None:
    timing, _ = predicted(COSTS, ASKED)
    (prediction,) = predict_all(COSTS, PredictConfig(context=2048, acceptance="0.89")).predictions
    assert timing.off.tokens_per_s == pytest.approx(250.0) and prediction.plain_tokens_per_s == pytest.approx(250.0)
    assert timing.on.tokens_per_s == pytest.approx(prediction.tokens_per_s, rel=0.05)
    assert timing.on.text == timing.off.text == "".join(passage())
    assert (
        timing.verdict
        == f"Predicted: {prediction.speedup:.2f}x, 250 to {prediction.tokens_per_s:.0f} tokens/s; no model ran"
    )
    assert timing.off.lossless and not timing.on.lossless, "what stands was assumed"


def test_a_batch_is_watched_one_sequence_at_a_time() -> None:
    timing, _ = predicted(
        CostsConfig(model="DeepSeek-V4-Pro", hardware="B200", block=16),
        ChartConfig(batch=32, context=4096, acceptance="0.89"),
    )
    assert timing.verdict.startswith("Predicted: 2.98x, 23 to 68 tokens/s for each of 32 sequences")


def test_where_drafts_do_not_pay_both_sides_are_the_same() -> None:
    timing, _ = predicted(
        CostsConfig(model="DeepSeek-V4-Flash", hardware="B200"), ChartConfig(batch=8, context=4096, acceptance="0.75")
    )
    assert timing.off.total_s == timing.on.total_s and "1.00x" in timing.verdict and timing.on.lossless


@pytest.mark.slow
def test_the_page_fills_its_columns_with_the_same_numbers() -> None:
    rng, cases = random.Random(3), []
    for _ in range(1000):
        survival = sorted((rng.random() for _ in range(rng.randrange(0, 17))), reverse=True)
        cases.append([survival, rng.random() * 0.1, rng.random() * 0.1, rng.randrange(1, 60)])
    main = """(cases) => cases.map(([survival, first_s, round_s, count]) =>
      tokenTimes(survival, { first_s, round_s }, count).map(({ at_s, round, is_drafted }) => [at_s, round, is_drafted]))"""
    for ours, case in zip(run_js(main, cases), cases, strict=True):
        assert ours == [list(each) for each in token_times(*case)], case


@pytest.mark.slow
def test_the_page_reads_runs_and_draws_curves_as_the_chart_does(tmp_path: Path) -> None:
    results = {
        "model": "qwen",
        "results": [
            {"drafter": "none", "batch": 1, "tokens_per_round": 1.0, "speedup": 1.0},
            {"batch": 1, "tokens_per_round": 4, "speedup": 3.57},
            {"drafter": "default", "batch": 1, "temperature": 0.7, "tokens_per_round": 3.0, "speedup": 2.0},
            {"drafter": "ngram", "batch": 1, "tokens_per_round": 1.5, "speedup": None},
            {"drafter": "x", "batch": 1, "tokens_per_round": 0.5, "speedup": 2.0},
        ],
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    expected = [(each.label, each.tokens_per_round, each.speedup, each.is_mocked) for each in read_points(tmp_path, 1)]
    points = run_js("(text) => readPoints(text)", json.dumps(results))
    assert [
        (each["label"], each["tokens_per_round"], each["speedup"], each["is_mocked"]) for each in points
    ] == expected
    slopes = run_js("(pairs) => [slope(pairs), slope([[1, 5]])]", [[2, 1.5], [3, 2.5]])
    assert slopes == [pytest.approx((0.5 + 2 * 1.5) / 5), None]
    between = run_js("(curve) => [1, 1.5, 3, 4, 0.5].map((x) => between(curve, x))", [[1, 1], [2, 3], [3, 4]])
    assert between == [1, 2, 4, 5, 0]
    assert chart_of(COSTS, ASKED).curve[0] == (1.0, 1.0)


@pytest.mark.slow
def test_the_command_writes_the_pictures(tmp_path: Path) -> None:
    files = [tmp_path / "a" / "columns.svg", tmp_path / "a" / "columns.png"]
    words = [
        "--simulate",
        "--model",
        "Qwen3.5-122B-A10B",
        "--hardware",
        "B200",
        "--precision",
        "fp8",
        "--plain-rate",
        "250",
    ]
    words += [
        "--block",
        "16",
        "--acceptance",
        "0.89",
        "--context",
        "2048",
        "--columns",
        str(files[0]),
        "--columns-png",
        str(files[1]),
    ]
    result = CliRunner().invoke(app, ["compare", *words, "--json"], catch_exceptions=False)
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["lossless"] is False and line["off"]["tokens_per_s"] == pytest.approx(250.0) and "curve" not in line
    drawn = files[0].read_text(encoding="utf-8")
    assert ElementTree.fromstring(drawn).tag.endswith("svg") and "no model ran" in drawn and "@keyframes" in drawn
    assert drawn == svg(predicted(COSTS, ASKED)[0])
    assert files[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_chart_comes_beside_the_columns_when_it_is_asked_for(tmp_path: Path) -> None:
    words = [
        "--simulate",
        "--model",
        "Qwen3-8B",
        "--hardware",
        "H100",
        "--columns",
        str(tmp_path / "c.svg"),
        "--svg",
        str(tmp_path / "s.svg"),
    ]
    result = CliRunner().invoke(app, ["compare", *words, "--json"], catch_exceptions=False)
    line = json.loads(result.stdout.splitlines()[-1])
    assert {"slopes", "predicted"} <= set(line) and (tmp_path / "c.svg").is_file() and (tmp_path / "s.svg").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("picture", ["--columns", "--svg"])
def test_a_load_that_does_not_fit_is_warned_of_with_every_picture(picture: str, tmp_path: Path) -> None:
    words = ["--model", "Qwen3-8B", "--hardware", "H100", "--batch", "900", picture, str(tmp_path / "x.svg")]
    result = CliRunner().invoke(app, ["compare", "--simulate", *words, "--json"], catch_exceptions=False)
    (warning,) = json.loads(result.stdout.splitlines()[-1])["warnings"]
    assert "900" in warning and result.stderr.count(f"warning: {warning}") == 1


@pytest.mark.slow
def test_a_picture_needs_no_place_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without a place for runs/, compare --svg and simulate-serving were refused, which write none."""
    (tmp_path / "runs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    machine = ["--model", "Qwen3-8B", "--hardware", "H100"]
    for words in (["compare", "--simulate", "--svg", "x.svg"], ["simulate-serving", "--rate", "1", "--requests", "2"]):
        CliRunner().invoke(app, [*words, *machine], catch_exceptions=False)
    assert (tmp_path / "x.svg").is_file()
    with pytest.raises(CacheError, match="runs is a file, and a run needs a folder"):
        CliRunner().invoke(app, ["compare", "--simulate", *machine], catch_exceptions=False)


def test_a_chart_assumes_the_context_of_the_other_predictions() -> None:
    assert ChartConfig().context == PredictConfig().context == CONTEXT


@pytest.mark.parametrize("words", [["a prompt", "--columns", "x.svg"], ["a prompt", "--acceptance", "0.5"]])
def test_columns_need_a_prediction(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="go with --simulate"):
        CliRunner().invoke(app, ["compare", *words], catch_exceptions=False)
