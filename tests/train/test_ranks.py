"""Processes share the work out: nothing twice, nothing left."""

from __future__ import annotations

import pytest

from paceline.runs.ranks import Ranks

pytestmark = pytest.mark.slow


def test_alone_and_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Ranks.here() == Ranks(0, 1, 0)
    assert Ranks.here().is_first
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Ranks.here() == Ranks(5, 8, 1)
    assert not Ranks.here().is_first
