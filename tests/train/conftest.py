"""Runs in this folder do not measure the machine, and are not part of a group of processes."""

from __future__ import annotations

import pytest
from known_machine import known_machine

__all__ = ["known_machine"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
