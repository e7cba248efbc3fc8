"""The page of a run: every plot from lines made by hand, nothing of a model's text let through, nothing fetched."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from run_folders import EVIL, check, evaluation, folder, step

from paceline.bench.pages.run_page import numbers, page, read_run, thinned
from paceline.commands.evaluate import report
from paceline.errors import ConfigError
from paceline.report.pages import Series, curves

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
pytest_plugins = ("undrawn",)
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
