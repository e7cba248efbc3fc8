"""The command line in the process of the tests: another one would import for seconds."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from paceline.cli import main


class Called(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Called]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `paceline WORDS`."""

    def run(*words: str, stdin: str = "") -> Called:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Called(ended.value.code, *capsys.readouterr())

    return run
