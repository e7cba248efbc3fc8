"""The verdict that opens a run's page, and what it advises."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_folders import Line, check, evaluation, folder, row, step, trained

from paceline.bench.pages.run_page import page, read_run, training_verdict
from paceline.cli import app
from paceline.train.run import TrainResult

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]

pytest.importorskip("matplotlib")
pytest_plugins = ("undrawn",)


def verdict_of(run: Path) -> str:
    """The sentence at the top of the page."""
    return html.unescape(re.findall('<p class="verdict[a-z ]*">(.*?)</p>', page(read_run(run)), re.DOTALL)[0])


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {},
            "d makes answers 1.85x as fast as plain decoding (one request at a time, greedy), 2.50 tokens a round: a "
            "good",
        ),
        ({}, "Next: use it, paceline serve --drafter d."),
        ({}, "25% of the answers end in a loop"),
        ({"speedup": 1.2, "speedup_interval": [0.9, 1.5]}, "a small gain. Its interval holds 1, so this may be chance"),
        ({"speedup": 1.0}, "no gain."),
        ({"speedup": 0.8}, "drafting costs time here."),
        ({"speedup": 0.8}, "drafts are accepted, but to check them takes too long here"),
        ({"speedup": 0.8, "tokens_per_round": 1.3}, "few drafts are accepted; train a drafter on prompts like these"),
        ({"identical": 0.9}, "(90% are): in 16 bits a near-tie may fall the other way"),
        ({"lossless": False}, "NOT LOSSLESS: acceptance was mocked"),
    ],
)
def test_a_report_opens_with_a_verdict(tmp_path: Path, values: dict[str, Any], sentence: str) -> None:
    figures = evaluation(**values)
    for each in figures["sets"]["gsm8k"]["results"]:
        each["identical"] = each["identical"] if each["temperature"] == 0 else None
    verdict = verdict_of(folder(tmp_path / "run", None, figures))
    assert sentence in verdict and "\n" not in verdict
    assert ("Its interval" in verdict) == ("speedup_interval" in values)


@pytest.mark.parametrize(
    ("values", "sentence", "tone"),
    [
        ({"speedup": 9.37, "tokens_per_round": 3.0}, "the machine was busy: repeat", ""),
        ({"speedup": 2.0, "num_output_tokens": 4}, "4 tokens are too few for a verdict", ""),
        ({"speedup": 0.8}, "drafting costs time here.", " cost"),
        ({}, "1.85x as fast", " good"),
    ],
)
def test_a_page_shows_no_speedup_that_cannot_be(
    tmp_path: Path, values: dict[str, Any], sentence: str, tone: str
) -> None:
    figures = evaluation()
    for each in figures["sets"]["gsm8k"]["results"]:
        each.update(values if each["drafter"] == "d" else {})
    run = folder(tmp_path / "run", None, figures)
    assert sentence in verdict_of(run)
    text = page(read_run(run))
    assert f'<p class="verdict{tone}">' in text and "9.37x" not in text


def test_a_verdict_judges_by_the_settings_that_can_be(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"].append(row("busy", 1, 0.0, speedup=4.0))
    verdict = verdict_of(folder(tmp_path / "run", None, figures))
    assert "d makes answers 1.85x as fast" in verdict
    assert "No verdict on busy (one request at a time, greedy): the machine was busy: repeat." in verdict


def test_a_verdict_names_the_worst_setting(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"][3]["speedup"] = 0.9
    assert "The worst setting is 0.90x (d, 8 requests together, greedy)." in verdict_of(
        folder(tmp_path / "run", None, figures)
    )


def test_a_verdict_on_plain_decoding_alone(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"] = [row("none", 1, 0.0)]
    assert "Only plain decoding was measured" in verdict_of(folder(tmp_path / "run", None, figures))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([step(1)], "Nothing was held out"),
        ([step(1), check(1)], "is expected to bring 1.70 tokens a round; only served figures count."),
        ([step(1), check(1), check(2, 1.9)], "It was still getting better: train longer"),
        ([step(1), check(1), check(2, 1.5)], "It was getting worse on held-out answers"),
        ([step(1), check(1), check(2)], "It has stopped getting better"),
    ],
)
def test_a_verdict_on_training(tmp_path: Path, lines: list[Line], sentence: str) -> None:
    run = folder(tmp_path / "run", lines)
    verdict = verdict_of(run)
    assert sentence in verdict and f"Next: paceline evaluate {run}/drafter" in verdict
    (run / "heldout.json").write_text(json.dumps({"tokens_per_round": 2.6, "num_rounds": 3, "num_prompts": 1}))
    assert "brings 2.60 tokens a round on prompts that it was not trained on: good." in verdict_of(run)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "--first-layers copied, another --lr."),
        ({"shape": {"start": "copied"}}, "more blocks (--minutes), another --lr."),
        ({"init": "runs/first/drafter"}, "more blocks (--minutes), another --lr."),
        ({"shape": {"kind": "eagle3", "start": "random"}}, "more blocks (--minutes), another --lr."),
    ],
)
def test_a_training_that_learned_nothing_gets_advice_that_its_command_takes(
    tmp_path: Path, settings: dict[str, Any], advice: str
) -> None:
    """--first-layers was advised next to --init, and for a target whose layers cannot be copied: both are refused."""
    run = folder(tmp_path / "run", [{**step(1), "unigram_entropy": 1.9}, check(1)])
    (run / "config.json").write_text(json.dumps({"what": "train", "target": "m", "versions": {}, **settings}))
    (run / "plan.json").write_text(json.dumps({"is_copyable": True}))
    assert advice in verdict_of(run)
    (run / "plan.json").write_text(json.dumps({"is_copyable": False}))
    assert "more blocks (--minutes), another --lr." in verdict_of(run)


def test_a_training_ends_with_expected_and_got_and_keeps_the_better_drafter(tmp_path: Path) -> None:
    worse = training_verdict(read_run(trained(tmp_path / "worse", 2.38)))
    assert "brings 1.06 tokens a round" in worse and "(expected: about 1.10): little." in worse
    assert "brings 2.38 on the same prompts: yours is worse, keep that." in worse
    assert worse.endswith(
        "Next: keep the shipped drafter (--drafter default), or collect 3,000 answers and train again."
    )
    assert "1.17" not in worse and "No verdict on its speed: the machine was busy: repeat." in worse
    better = training_verdict(read_run(trained(tmp_path / "better", 1.02, speedup=1.04)))
    assert "keep that" not in better and "One stream on this machine: 1.04 times" in better
    assert "Next: paceline evaluate " in better


def test_the_command_ends_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "run", 2.38)
    result = TrainResult(run / "drafter", run, 1, 100, 1.06, 6.24)
    monkeypatch.setattr("paceline.commands.train.run_train", lambda config, progress: result)
    for more in ([], ["--json"]):
        app(["train", "--prompts", "none.jsonl", "--out", str(run), *more], prog_name="paceline", standalone_mode=False)
        output = capsys.readouterr()
        verdict = training_verdict(read_run(run))
        assert output.err.rstrip().endswith(verdict) and "keep that" in verdict
    assert json.loads(output.out)["verdict"] == verdict


def test_the_advice_of_a_training_is_not_what_the_run_had(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", None)
    lines = [{**step(1), "unigram_entropy": 5.55}, {"step": 1, "blocks": 100, "heldout": {"loss": 6.24, "eal": 1.06}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = training_verdict(read_run(run))
    assert "6.24, is worse than guessing by word frequency alone (5.55)" in verdict
    assert "more prompts" in verdict and "--first-layers copied" not in verdict
