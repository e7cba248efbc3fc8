"""The page of a run: every plot from lines made by hand, nothing of a model's text let through, nothing fetched."""

from __future__ import annotations

import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.pages.run_page import numbers, page, read_run, thinned, training_verdict
from paceline.cli import app
from paceline.commands.evaluate import report
from paceline.errors import ConfigError
from paceline.report.pages import Series, curves
from paceline.train.run import TrainResult

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
pytest_plugins = ("undrawn",)
EVIL = "</pre><script>alert('x')</script> & \x00 \u0007"
Line = dict[str, Any]
VOID = {"meta", "br", "path", "use", "rect"}


class Checker(HTMLParser):
    """Every element closes, no id stands twice, nothing is loaded; collects elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.referred: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name != "src"
            if name in ("href", "xlink:href"):
                assert value and value.startswith("#")
                self.referred.add(value[1:])
            if name == "id":
                self.ids.append(value or "")
            if name != "content" and not name.startswith("xmlns"):
                assert "http" not in (value or "")
                self.referred.update(re.findall(r"url\(#([^)]*)\)", value or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def step(number: int, loss: float | None = 2.0, seconds: float = 60.0) -> dict[str, Any]:
    recall = [0.5, 0.4, 0.3]
    figures = {"loss": loss, "eal": 1.5, "accuracy": 0.3, "recall1": recall, "recall16": recall}
    return {"step": number, "blocks": 100 * number, **figures, "blocks_per_s": 12.0, "seconds": seconds}


def check(number: int, eal: float = 1.7, ood: bool = True) -> dict[str, Any]:
    figures = {"loss": 1.9, "eal": eal, "accuracy": 0.4, "recall1": [0.6, 0.5, 0.4], "recall16": [0.9, 0.8, 0.7]}
    return {"step": number, "blocks": 100 * number, "heldout": figures, "ood": {**figures, "eal": 1.2} if ood else None}


def row(drafter: str, batch: int, temperature: float, **values: Any) -> dict[str, Any]:
    return {
        "drafter": drafter,
        "drafter_name": drafter,
        "batch": batch,
        "temperature": temperature,
        "tokens_per_s": 20.0,
        "tokens_per_s_range": [19.0, 21.0],
        "decode_tokens_per_s": None,
        "tokens_per_round": 1.0 if drafter == "none" else 2.5,
        "tokens_per_round_interval": [None, None] if drafter == "none" else [2.25, 2.75],
        "survival": [] if drafter == "none" else [0.7, 0.5, 0.3],
        "accepted_histogram": [10] if drafter == "none" else [3, 2, 2, 3],
        "speedup": 1.0 if drafter == "none" else 1.85,
        "speedup_interval": [1.6, 2.05],
        "speedup_vs": {},
        "identical": 1.0 if temperature == 0 else None,
        "lossless": True,
        "seconds": {"prefill": 1.0, "draft": 1.0, "verify": 1.0, "host": 1.0, "wall": 4.0},
        "bytes_per_s": 1e9,
        "repetition": 0.1,
        "num_answers": 3,
        "num_output_tokens": 240,
        "differences": [],
        **values,
    }


def evaluation(name: str = "gsm8k", **values: Any) -> dict[str, Any]:
    rows = [row(drafter, batch, t, **values) for t in (0.0, 1.0) for batch in (1, 8) for drafter in ("none", "d")]
    looping = {
        "temperature": 0.0,
        "num_answers": 4,
        "looping_share": 0.25,
        "tokens_per_round": 2.5,
        "tokens_per_round_interval": [2.25, 2.75],
        "without_loops": None,
        "without_loops_interval": [None, None],
    }
    text = {"request": EVIL, "temperature": 0.0, "prompt": EVIL, "text": EVIL, "num_tokens": 8, "tokens_per_round": 2.0}
    figures = {"results": rows, "looping": [looping], "looping_share": 0.25, "texts": [{**text, "is_loop": True}]}
    return {
        "drafter": "d",
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "machine": {"name": "test"},
        "ceiling_tokens_per_s": 100.0,
        "sets": {name: figures},
        "heldout": {name: 2.5},
        "settings": {"bench": {"seed": 0}},
    }


def folder(path: Path, lines: list[dict[str, Any]] | None = None, evaluated: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"what": "train", "target": "m", "versions": {"torch": "2"}}))
    (path / "command.txt").write_text("paceline train --target m\n")
    if lines is not None:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluated is not None:
        (path / "evaluation.json").write_text(json.dumps(evaluated))
    return path


def titles(text: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", text)


def captions(text: str) -> list[str]:
    return re.findall("<figcaption>(.*?)</figcaption>", text)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [step(1), step(2), check(2), step(3), check(3)]
    return folder(tmp_path_factory.mktemp("html") / "run", lines, evaluation())


@pytest.fixture(scope="module")
def whole(whole_run: Path) -> str:
    """The page of a run that has everything, its figures drawn."""
    return page(read_run(whole_run))


def test_a_whole_run(whole: str) -> None:
    text, checker = whole, Checker(whole)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.referred <= set(checker.ids)
    assert "script" not in checker.tags and "link" not in checker.tags and "img" not in checker.tags
    assert captions(text) == [
        "Loss",
        "Expected tokens per round",
        "Recall@1 by slot, last check",
        "Recall@16 by slot, last check",
        "Pace",
        "Survival, T=0",
        "Accepted drafts a round, T=0",
        "Survival, T=1",
        "Accepted drafts a round, T=1",
        "Speed-up, with 95% intervals over prompts",
    ]
    assert checker.tags.count("svg") == 1 + 10, "the mark in the header, and the plots"
    for shown in ("1.85x [1.60, 2.05]", "2.50 [2.25, 2.75]", "25% of 4", "paceline train --target m", "versions.torch"):
        assert shown in text
    assert "held out" in text and "out of domain" in text
    assert "NOT LOSSLESS" not in text


def test_the_page_fits_a_phone_and_both_schemes(whole: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in whole
    assert "color-scheme: light dark" in whole
    assert "default-src 'none'" in whole
    assert "currentColor" in whole
    assert "#010203" not in whole and "#000000" not in whole
    assert not re.search(r'<svg[^>]* (width|height)="', whole)


def last_setting(name: str) -> dict[str, Any]:
    """An evaluation on the prompts `name` at one temperature and batch: three figures to draw."""
    figures = evaluation(name)
    del figures["sets"][name]["results"][:-2]
    return figures


def test_what_a_model_wrote_is_escaped(tmp_path: Path) -> None:
    text = page(read_run(folder(tmp_path / "run", None, last_setting("$x$ <b> \ud800" + EVIL))))
    assert Checker(text).open == []
    assert "<script" not in text and "\x00" not in text and "\x07" not in text
    assert text.count("&lt;/pre&gt;&lt;script&gt;") >= 3
    assert "alert" in text and text.encode("utf-8")


def test_the_last_value_of_a_step_wins(tmp_path: Path) -> None:
    lines = [step(1), step(2, 9.0), check(2, 9.0), step(3, 9.0), step(2, 1.5), check(2, 1.5), step(3, None)]
    path = folder(tmp_path / "run", lines)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    run = read_run(path)
    assert [line["step"] for line in run.steps] == [1, 2, 3]
    assert numbers(run.steps, "loss") == ([100.0, 200.0], [2.0, 1.5])
    assert numbers(run.checks, "eal", "heldout") == ([200.0], [1.5])


def test_a_step_and_its_check_may_share_a_line(tmp_path: Path) -> None:
    run = read_run(folder(tmp_path / "run", [step(1), check(2) | step(2), step(3), check(3)]))
    assert [line["step"] for line in run.steps] == [1, 2, 3]
    assert [line["step"] for line in run.checks] == [2, 3]
    only_ood = {"step": 1, "ood": check(1)["ood"], "blocks": 100}
    assert numbers(read_run(folder(tmp_path / "ood", [only_ood])).checks, "eal", "ood") == ([100.0], [1.2])


@pytest.mark.usefixtures("undrawn")
def test_prompts_served_after_training_are_shown(tmp_path: Path) -> None:
    path = folder(tmp_path / "run", [step(1)])
    served = {
        "tokens_per_round": 2.125,
        "num_prompts": 8,
        "num_rounds": 16,
        "accepted_histogram": [4, 6, 6],
        "texts": [EVIL],
    }
    (path / "heldout.json").write_text(json.dumps(served))
    text = page(read_run(path))
    assert "2.12 (batched, greedy, 8 held-out prompts)" in text
    assert captions(text)[-1] == "Accepted drafts a round"
    assert "&lt;script&gt;alert" in text and Checker(text).open == []


def test_a_long_run_is_thinned_by_means() -> None:
    x, y = thinned([float(n) for n in range(1000)], [float(n % 2) for n in range(1000)], most=250)
    assert (len(x), x[0], set(y)) == (250, 1.5, {0.5})
    assert thinned([1.0], [2.0]) == ([1.0], [2.0])
    assert thinned([], []) == ([], [])


@pytest.mark.usefixtures("undrawn")
def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    trained = page(read_run(folder(tmp_path / "trained", [step(1)])))
    assert titles(trained) == ["At a glance", "Training"]
    assert captions(trained) == ["Loss", "Expected tokens per round", "Pace"]
    assert titles(page(read_run(folder(tmp_path / "evaluated", None, evaluation())))) == [
        "At a glance",
        "In the real engine",
        "Figures",
        "Texts",
    ]
    no_ood = re.sub(
        "<dl>.*?</dl>", "", page(read_run(folder(tmp_path / "no-ood", [check(1, ood=False)]))), flags=re.DOTALL
    )
    assert "held out" in no_ood and "out of domain" not in no_ood


def test_a_series_without_a_point_is_not_in_the_legend() -> None:
    series = [Series("training", [1.0], [2.0]), Series("held out", [1.0], [3.0]), Series("out of domain", [], [])]
    _, text = curves("Loss", series, xlabel="blocks", ylabel="loss")
    assert "training" in text and "held out" in text and "out of domain" not in text


def test_a_long_name_is_shortened_in_the_plots_only(tmp_path: Path) -> None:
    name = "a/very/long/way/to/the/prompts/of/a/data/" * 3 + "gsm8k_test.jsonl"
    text = page(read_run(folder(tmp_path / "run", None, last_setting(name))))
    assert "…ta/gsm8k_test.jsonl, b8, T=1<" in text
    assert f"<td>{name}</td>" in text


@pytest.mark.usefixtures("undrawn")
def test_figures_that_are_not_lossless_say_so(tmp_path: Path) -> None:
    assert "NOT LOSSLESS" in page(read_run(folder(tmp_path / "run", None, evaluation(lossless=False))))


def verdict_of(run: Path) -> str:
    """The sentence at the top of the page."""
    return html.unescape(re.findall('<p class="verdict[a-z ]*">(.*?)</p>', page(read_run(run)), re.DOTALL)[0])


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_judges_by_the_settings_that_can_be(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"].append(row("busy", 1, 0.0, speedup=4.0))
    verdict = verdict_of(folder(tmp_path / "run", None, figures))
    assert "d makes answers 1.85x as fast" in verdict
    assert "No verdict on busy (one request at a time, greedy): the machine was busy: repeat." in verdict


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_names_the_worst_setting(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"][3]["speedup"] = 0.9
    assert "The worst setting is 0.90x (d, 8 requests together, greedy)." in verdict_of(
        folder(tmp_path / "run", None, figures)
    )


@pytest.mark.usefixtures("undrawn")
def test_a_verdict_on_plain_decoding_alone(tmp_path: Path) -> None:
    figures = evaluation()
    figures["sets"]["gsm8k"]["results"] = [row("none", 1, 0.0)]
    assert "Only plain decoding was measured" in verdict_of(folder(tmp_path / "run", None, figures))


@pytest.mark.usefixtures("undrawn")
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


def trained(path: Path, default: float | None, **served: Any) -> Path:
    """A run whose plan expected 1.10 tokens a round from 44 answers where 3,000 are advised."""
    run = folder(path, [{**step(1), "unigram_entropy": 5.55}, check(1)])
    heldout = {"tokens_per_round": 1.06, "num_rounds": 300, "num_prompts": 16, "speedup": 1.17, **served}
    heldout |= {"plain_tokens_per_s": 10.0, "drafted_tokens_per_s": 11.7}
    heldout |= {"default_drafter": {"tokens_per_round": default}} if default else {}
    (run / "heldout.json").write_text(json.dumps(heldout))
    expected = {"tokens_per_round": 1.1, "is_beyond_the_curve": False, "answers": 44, "advised": 3000}
    (run / "plan.json").write_text(json.dumps({"expected": expected}))
    (run / "config.json").write_text(json.dumps({"what": "train", "shape": {"start": "copied"}}))
    return run


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


@pytest.mark.usefixtures("undrawn")
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


@pytest.mark.usefixtures("undrawn")
def test_words_are_explained_and_settings_are_folded_away(tmp_path: Path) -> None:
    text = page(read_run(folder(tmp_path / "run", [step(1)], evaluation())))
    folded = re.findall(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", text, re.DOTALL)
    inside = dict(folded)
    assert (
        "<dt>tokens per round</dt>" in inside["What the words mean"]
        and "<dt>held out</dt>" in inside["What the words mean"]
    )
    assert "paceline train --target m" in inside["Settings"] and "versions.torch" in inside["Settings"]
    evaluated = page(read_run(folder(tmp_path / "evaluated", None, evaluation())))
    assert "<dt>held out</dt>" not in evaluated


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run folder"):
        read_run(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"neither training metrics .* nor figures of decoding"):
        read_run(folder(tmp_path / "bench", [{"drafter": "none", "wall_s": 1.0}]))
    path = folder(tmp_path / "damaged", [step(1)])
    for text in ("{", "[]"):
        (path / "evaluation.json").write_text(text)
        with pytest.raises(ConfigError, match="evaluation.json"):
            read_run(path)


def test_the_command_writes_the_page(whole_run: Path, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn a second time: the same run gives the same bytes."""
    report(whole_run, as_json=True)
    line = {"report": str(whole_run / "report.html"), "steps": 3, "checks": 2, "sets": ["gsm8k"]}
    assert json.loads(capsys.readouterr().out) == line
    assert (whole_run / "report.html").read_text(encoding="utf-8") == whole


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "run", [step(1)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[plots\]'"):
        report(path)
    assert not (path / "report.html").exists()
