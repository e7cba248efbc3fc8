"""`paceline store` and `evals` from the command line: statuses, lines, folders, and a model of two layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_doubles import Says, scores, suite
from small_llm import tiny_model
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config import EngineConfig
from paceline.loop.evals import run
from paceline.loop.evals.scores import read_scores
from paceline.report import pages

pytestmark = pytest.mark.slow


def output_of(*words: object, status: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == status, (done.output, done.exception)
    return json.loads(done.stdout.splitlines()[-1])


def test_from_a_model_to_a_store_to_a_suite_to_a_gate(tmp_path: Path) -> None:
    model, prompts = tiny_model(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{at * 7919:x} is {chr(97 + at)}?"}) + "\n" for at in range(12)))
    options = ["--target", model, "--prompts", prompts, "--max-tokens", 8, "--top-k", 32, "--dtype", "float32"]
    options += ["--max-prompt-tokens", 64]
    output_of("regenerate", *options, "--out", tmp_path / "run")
    store = tmp_path / "store"
    line = output_of("store", "add", store, tmp_path / "run", "--model", model, "--evals-share", 0.5, "--related", 1.0)
    assert sum(line["added"].values()) == 12 and line["added"]["evals"] > 0
    card = output_of("store", "show", store)
    assert card["sides"]["train"]["with_top"] == line["added"]["train"] and card["on_both_sides"] == 0
    file, number = tmp_path / "suite.jsonl", line["added"]["evals"]
    assert output_of("evals", "make", store, "--scorer", "exact", "--out", file)["cases"] == number
    model_words = ["--model", model, "--dtype", "float32", "--max-len", 256, "--max-tokens", 8]
    done = output_of(
        "evals", "run", file, *model_words, "--drafter", "ngram", "--fail-below", 1.0, "--out", tmp_path / "a"
    )
    assert done["score"] == 1.0, "a model repeats itself when it is greedy"
    assert done["drafter_check"]["same_text"] == number and done["passed"]
    texts = {file.name for file in (tmp_path / "a").iterdir()}
    assert {"scores.json", "results.json", "report.md", "report.html", "config.json"} <= texts
    assert output_of("store", "label", store, tmp_path / "a")["labels"] == number
    gate = ["--no-worse-than", tmp_path / "a", "--margin", 0.1]
    worse = output_of("evals", "run", file, *model_words[:-1], 2, *gate, "--out", tmp_path / "b", status=3)
    assert worse["comparison"]["difference"] == -1.0 or worse["score"] < 1.0
    shown = (tmp_path / "b" / "report.html").read_text()
    assert "Answers that score lowest" in shown and "<script" not in shown
    assert output_of("store", "forget", store, "--match", "is a")["rows"] == 1


def test_a_run_with_results_has_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between its files left a run that looked finished, without a report or with nothing to compare with."""
    file, engine = suite().write(tmp_path / "s.jsonl"), EngineConfig(drafter="none")
    monkeypatch.setattr(run, "_answerer", lambda *_: Says(["0", "1", "2", "4"]))
    run.evaluate(file, engine, run.EvalSettings(), out=tmp_path / "a")
    assert (tmp_path / "a" / "results.json").exists() and read_scores(tmp_path / "a").mean == 0.75

    def killed(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pages, "write_report", killed)
    monkeypatch.setattr(run, "_answerer", lambda *_: Says(["0", "1", "3", "4"]))
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(file, engine, run.EvalSettings(), out=tmp_path / "a")
    assert not (tmp_path / "a" / "results.json").exists() and read_scores(tmp_path / "a").mean == 0.5


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    for name, right in (("a", 90), ("b", 60)):
        scores([1.0] * right + [0.0] * (100 - right), name).write(tmp_path / name / "scores.json")
    line = output_of("evals", "compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "c", status=3)
    assert line["verdict"] == "worse" and line["difference"] == pytest.approx(-0.3) and not line["passed"]
    assert output_of("evals", "compare", tmp_path / "b", tmp_path / "a", "--out", tmp_path / "d")["verdict"] == "better"
    assert "REFUSED" in (tmp_path / "c" / "report.md").read_text()


def test_what_does_not_go_together(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"what": "evals"}')
    file.write_text('{"id": "a", "prompt_ids": [1], "text": "x", "scorer": {"kind": "exact", "answer": "y"}}\n')
    for words, message in (
        (("evals", "run", file, "--margin", "0.1"), "no-worse-than"),
        (("evals", "run", file, "--url", "http://x", "--model", "m"), "--model means nothing for the server at --url"),
        (("evals", "run", file, "--url", "http://x", "--max-len", "99"), "--max-len means nothing for the server"),
        (("evals", "run", file, "--timeout", "5"), "--timeout means nothing without --url"),
        (("evals", "run", file, "--api-key-file", "k"), "--api-key-file means nothing without --url"),
        (("evals", "run", file, "--judge-name", "m"), "--judge-name means nothing without --judge"),
        (("evals", "run", tmp_path / "none.jsonl"), "paceline evals make"),
        (("evals", "compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "a"), "folder of another run"),
        (("store", "add", tmp_path / "new", tmp_path), "--model"),
        (("store", "show", tmp_path), "store add"),
    ):
        done = CliRunner().invoke(app, [*map(str, words)])
        assert done.exit_code != 0 and message in str(done.exception), (words, done.exception)
