"""Likely wrong words on the command line: each is told at once, before a model is loaded, with what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.errors import CacheError, ConfigError, ModelNotFoundError


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture(autouse=True)
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("paceline.engine.llm.LLM.of", load)
    monkeypatch.setattr("paceline.train.run.run", load)


@pytest.mark.parametrize("word", ["gpu", "GPU", "nvidia", "cuda1"])
@pytest.mark.parametrize("command", [("generate", "hi"), ("bench", "decode")], ids=["generate", "bench"])
def test_a_device_that_is_none(command: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is not known: did you mean cuda"):
        run(*command, "--device", word)


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [("smollm2-135", "smollm2-135m"), ("smolllm2-135m", "smollm2-135m"), ("qwen2.5-coder-0.5B", "qwen2.5-coder-0.5b")],
)
@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",), ("serve",), ("bench", "decode")], ids=str)
def test_a_model_that_is_nearly_one(command: tuple[str, ...], word: str, suggestion: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"did you mean {suggestion}"):
        run(*command, "--model", word)


@pytest.mark.parametrize("command", [("compare", "hi"), ("train",), ("regenerate",), ("bench", "decode")], ids=str)
def test_an_out_that_cannot_be_written_is_told_before_the_work(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CacheError, match="is a file"):
        run(*command, "--out", str(file / "run"))
    with pytest.raises(CacheError, match="cannot write"):
        run(*command, "--out", "/proc/x")


@pytest.mark.slow
def test_the_folder_of_a_run_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (("compare", "hi"), ("train",), ("regenerate",)):
        with pytest.raises(CacheError, match="a run needs a folder"):
            run(*command, "--out", str(tmp_path / "file"))
        with pytest.raises(CacheError, match="named as a file"):
            run(*command, "--out", str(tmp_path / "cmp.html"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("compare", "hi"), "--svg"),
        (("compare", "--simulate", "--model", "Qwen3-8B", "--hardware", "H100"), "--png"),
        (("compare", "--simulate", "--model", "Qwen3-8B", "--hardware", "H100"), "--columns"),
        (("compare", "--simulate", "--model", "Qwen3-8B", "--hardware", "H100"), "--columns-png"),
    ],
    ids=str,
)
def test_a_picture_that_cannot_be_written_is_told_before_the_work(
    command: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(*_: object, **__: object) -> None:
        raise AssertionError("something is predicted")

    monkeypatch.setattr("paceline.bench.pages.predicted.predicted", predict)
    monkeypatch.setattr("paceline.bench.pages.speedup_chart.chart_of", predict)
    file = tmp_path / "file"
    file.write_text("")
    places = {
        str(file / "x"): "is a file",
        "/proc/x": "may not be written to",
        str(tmp_path): "is a folder: name a file in it",
    }
    for place, why in places.items():
        with pytest.raises(CacheError, match=f"{why}.* choose another place with {option}"):
            run(*command, option, place)


def test_the_folder_of_a_chart_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (
        ("compare", "--from", str(tmp_path)),
        ("compare", "--simulate", "--model", "Qwen3-8B", "--hardware", "H100"),
    ):
        with pytest.raises(CacheError, match="a run needs a folder"):
            run(*command, "--out", str(tmp_path / "file"))


def test_a_plan_that_cannot_be_written_is_told_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object, **__: object) -> None:
        raise AssertionError("a plan is made")

    monkeypatch.setattr("paceline.train.plan.training_plan.make_plan", plan)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="a run needs a folder"):
        run("train", "--dry-run", "--out", str(tmp_path / "file"))


class _Began(Exception):
    """The work begins."""


@pytest.mark.parametrize(
    ("command", "work", "option"),
    [
        (("compare", "hi"), "paceline.engine.llm.LLM.of", "--svg"),
        (("calculator",), "paceline.simulate.calculator_page.page", "--out"),
        (("train", "--dry-run"), "paceline.train.plan.training_plan.make_plan", "--out"),
    ],
    ids=str,
)
def test_folders_that_will_be_made_are_told(
    command: tuple[str, ...],
    work: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def begin(*_: object, **__: object) -> None:
        raise _Began

    monkeypatch.setattr(work, begin)
    for place, folders in {
        "x": None,
        "new/x": f"{tmp_path / 'new'}: it will be made, for",
        "new/in/x": f"{tmp_path / 'new'}: it will be made, with those in it, for",
    }.items():
        with pytest.raises(_Began):
            app([*command, option, str(tmp_path / place)], standalone_mode=False)
        shown = capsys.readouterr().err
        assert (f"note: there is no folder {folders} {option} {tmp_path / place}\n" in shown) is (folders is not None)
        assert ("there is no folder" in shown) is (folders is not None) and not (tmp_path / "new").exists()


def test_a_place_that_is_not_asked_for_is_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folder of a training, like runs/train."""

    def begin(*_: object, **__: object) -> None:
        raise _Began

    monkeypatch.setattr("paceline.commands.train.run_train", begin)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(_Began):
        app(["train"], standalone_mode=False)
    assert "there is no folder" not in capsys.readouterr().err


def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.commands.options.processor", lambda: {"name": "x", "num_cores": 2})
    outputs = [CliRunner().invoke(app, ["generate", "hi", "--threads", number]).output for number in ("1000", "2")]
    assert "--threads 1000 is more than the 2 cores here" in outputs[0] and "cores here" not in outputs[1]
