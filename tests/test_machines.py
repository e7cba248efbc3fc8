"""`make test-machines` tries every setting, and reuses results only where they are certainly of the same tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import machines
import pytest
from machines import Outcome


@pytest.mark.parametrize(("commit", "num_runs"), [("0123456789ab", 1), ("0123456789ab-dirty", 2), ("no-commit", 2)])
def test_results_of_a_tree_with_changes_are_not_reused(
    commit: str, num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def run(name: str, environment: dict[str, str], file: Path, words: list[str]) -> None:
        runs.append(name)
        file.touch()

    monkeypatch.setattr(machines, "settings", lambda: [{"aten-default": {}}])
    monkeypatch.setattr(machines, "folder", lambda: tmp_path / commit)
    monkeypatch.setattr(machines, "run", run)
    monkeypatch.setattr(machines, "outcome_of", lambda file: Outcome(1, 0, [], 1.0))
    monkeypatch.setattr(sys, "argv", ["machines.py"])
    assert [machines.main(), machines.main()] == [0, 0]
    assert len(runs) == num_runs


def test_runs_try_every_setting_and_no_more_often_than_needed() -> None:
    kinds = [{"aten-default": {}, "aten-avx2": {}}, {"native-a": {}, "native-b": {}, "native-c": {}}]
    names = machines.runs(kinds)
    assert names == ["aten-default+native-a+busy", "aten-avx2+native-b", "aten-default+native-c"]


@pytest.mark.parametrize("status", [pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED])
def test_a_path_without_tests_is_told(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, status))
    with pytest.raises(SystemExit, match="found no tests in tests/no_such_file.py"):
        machines.run("aten-default", {}, tmp_path / "out.xml", ["tests/no_such_file.py"])
