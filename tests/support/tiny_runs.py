"""`paceline train` on a tiny target, within the test's own process, and what a run's log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from paceline.cli import app
from paceline.runs.folder import RunFolder

TINY = ("train", "--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--threads", "1")


def paceline(*words: object) -> None:
    """Runs the command in this process, without the curves of report.html, which take seconds. Errors are raised."""
    with mock.patch("paceline.commands.evaluate.report"):
        app([str(word) for word in words], prog_name="paceline", standalone_mode=False)


def figures(run: Path) -> dict[int, dict[str, Any]]:
    """Logged figures by step; of a repeated step the last."""
    return {line["step"]: line for line in RunFolder(run).metrics()}
