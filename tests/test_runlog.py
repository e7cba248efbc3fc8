"""The run folder: whole files, growing metrics, one-line errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.errors import CacheError
from paceline.runlog import RunFolder, plain, write_results


def test_a_run_folder_holds_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/paceline", "train", "--target", "a model"])
    run = RunFolder.create("train", {"target": "a model", "path": tmp_path}, tmp_path / "run")
    config = json.loads((run.path / "config.json").read_text())
    assert config["what"] == "train"
    assert config["path"] == str(tmp_path)
    assert "python" in config["versions"]
    assert (run.path / "command.txt").read_text() == "paceline train --target 'a model'\n"


def test_a_result_file_says_what_made_it(tmp_path: Path) -> None:
    """One writer for run folders and scripts; peers add their versions."""
    run = RunFolder.create("bench", {}, tmp_path / "run")
    files = [run.results({"rate": 2.5}), write_results(tmp_path / "script.json", {"rate": 2.5}, peers={"peer": "1.2"})]
    for file in files:
        record = json.loads(file.read_text())
        assert record["rate"] == 2.5
        assert set(record["processor"]) == {"name", "num_cores"} and record["processor"]["num_cores"] >= 1
        assert {"python", "paceline", "torch"} <= set(record["versions"])
        assert "commit" in record and record["command"] and record["date"]
    assert json.loads(files[1].read_text())["versions"]["peer"] == "1.2"
    assert files[0] == run.path / "results.json"


def test_every_result_that_is_kept_says_what_made_it() -> None:
    files = sorted((Path(__file__).parent.parent / "experiments" / "results").glob("*.json"))
    assert files
    for file in files:
        record = json.loads(file.read_text())
        assert record["versions"].keys() >= {"python", "torch"} and record["commit"] and record["command"], file.name
        assert (record.get("processor") or record["machine"])["name"], file.name


def test_every_script_that_prints_figures_says_what_made_them() -> None:
    scripts = Path(__file__).parent.parent / "experiments"
    for script in scripts.glob("*.py"):
        text = script.read_text()
        assert "versions()" not in text and "commit()" not in text, f"{script.name} has a writer of its own"


def test_default_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunFolder.create("bench", {}) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    assert all(run.path.parent == Path("runs") and run.path.name.startswith("bench-") for run in runs)


def test_metrics_grow_and_survive_a_crash(tmp_path: Path) -> None:
    run = RunFolder.create("train", {}, tmp_path / "run")
    run.log(step=1, loss=2.5)
    RunFolder.open(run.path).log(step=2, loss=math.nan)
    with (run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "lo')
    assert run.metrics() == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    assert RunFolder.create("train", {}, run.path).metrics() == []


def test_a_run_continued_after_a_crash_drops_the_cut_line(tmp_path: Path) -> None:
    run = RunFolder.create("train", {}, tmp_path / "run")
    run.log(step=1)
    for cut in (b'{"step": 2, "lo', '{"text": "né'.encode()[:-1]):
        with (run.path / "metrics.jsonl").open("ab") as metrics:
            metrics.write(cut)
        assert run.metrics()[-1]["step"] in (1, 2)
        RunFolder.open(run.path).log(step=2)
    assert run.metrics() == [{"step": 1}, {"step": 2}, {"step": 2}]
    (run.path / "metrics.jsonl").write_text('{"step"')
    assert RunFolder.open(run.path).metrics() == []
    (run.path / "metrics.jsonl").unlink()
    assert RunFolder.open(run.path).metrics() == []


def test_writes_are_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    run = RunFolder.create("bench", {}, tmp_path / "run")
    run.write("report.md", "# one\n")
    run.write("report.md", "# two\n")
    assert (run.path / "report.md").read_text() == "# two\n"
    assert sorted(file.name for file in run.path.iterdir()) == ["command.txt", "config.json", "report.md"]


def test_unwritable_folders_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="choose another folder with --out"):
        RunFolder.create("bench", {}, tmp_path / "file" / "run")
    with pytest.raises(CacheError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_plain_values() -> None:
    numpy = pytest.importorskip("numpy")
    assert plain({"a": numpy.float32(0.5), 1: (math.inf, True, None), "s": {3}}) == {
        "a": 0.5,
        "1": [None, True, None],
        "s": [3],
    }
