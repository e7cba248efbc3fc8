"""`paceline audit`: exit status, its JSON line, and a key that stays out of the run's folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.loop.audit import run
from paceline.loop.audit.checks import Finding
from paceline.loop.audit.report import write_report
from paceline.report.tables import Progress
from paceline.runs.folder import RunFolder

WORDS = ["audit", "http://127.0.0.1:9", "--model", "org/tiny", "--json"]


@pytest.mark.parametrize(("verdict", "status"), [("honest", 0), ("faulty", 1), ("unsure", 3)])
def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: Any, status: int
) -> None:
    arguments: dict[str, Any] = {}

    def audited(url: str, engine: Any, config: Any, **more: Any) -> run.Audited:
        arguments.update(url=url, engine=engine, config=config, **more)
        return run.Audited(verdict, [Finding("greedy", "passed", "as ours")], [], RunFolder(tmp_path))

    monkeypatch.setattr(run, "audit", audited)
    more = ["--api-key", "secret", "--temperature", "1,0.5", "--server-precision", "quantised", "--limit", "3"]
    done = CliRunner().invoke(app, [*WORDS, *more])
    assert done.exit_code == status
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["verdict"] == verdict and line["findings"][0]["check"] == "greedy" and line["run"] == str(tmp_path)
    assert arguments["key"] == "secret" and arguments["limit"] == 3 and arguments["engine"].dtype == "float32"
    assert arguments["config"].temperatures == (1.0, 0.5) and arguments["config"].tolerance.tie == 2.0


def test_the_key_is_in_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It was in config.json for a moment, until that was written again."""
    written, write = list[str](), RunFolder.write

    def noted(self: RunFolder, name: str, text: str) -> Path:
        written.append(text)
        return write(self, name, text)

    monkeypatch.setattr(RunFolder, "write", noted)
    monkeypatch.setattr(sys, "argv", ["paceline", *WORDS, "--api-key", "very-secret"])
    settings = {"url": "http://127.0.0.1:9", "model": "tiny"}
    finding = Finding("usage", "fault", "<b>7</b> tokens where we have 8")
    write_report("faulty", [finding], [], [], settings, tmp_path, Progress())
    assert len(written) >= 2 and not any("very-secret" in text for text in written)
    texts = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert set(texts) == {"config.json", "command.txt", "results.json", "report.md", "report.html"}
    assert not any("very-secret" in text for text in texts.values()) and "***" in texts["command.txt"]
    assert (
        "&lt;b&gt;7" in texts["report.html"]
        and "FAULT: http://127.0.0.1:9 does not answer as tiny would" in texts["report.md"]
    )
