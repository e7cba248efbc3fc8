"""Where no terminal is: a line a minute, with the time left."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.commands import shared


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = iter(range(0, 100000, 20))
    monkeypatch.setattr(shared.time, "monotonic", lambda: next(now))
    with shared.TerminalProgress().bar("answering", 10) as advance:
        for _ in range(7):
            advance("answering")
    assert capsys.readouterr().err.splitlines() == [
        "answering: 3 of 10 (30%), 2 min left",
        "answering: 6 of 10 (60%), 1 min left",
    ]


def test_work_that_minutes_end_tells_its_share(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A run that goes on at 20% and makes 10% a minute: not what is left of its number of steps."""
    now = iter(range(0, 100000, 20))
    monkeypatch.setattr(shared.time, "monotonic", lambda: next(now))
    with shared.TerminalProgress().bar("training", 26800) as advance:
        for step in range(7):
            advance(f"step {step}", 0.2 + step / 30)
    assert capsys.readouterr().err.splitlines() == [
        "training: 27%, 11 min left; step 2",
        "training: 37%, 8 min left; step 5",
    ]
