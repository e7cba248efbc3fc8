"""Fixtures of the daemon's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_servers import FakeServer, serving

from paceline.loop.adapt.servers.vllm_sglang import restart


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that only looks like one, and has answered some requests."""
    with serving(FakeServer()) as fake:
        fake.count(rounds=1000, accepted=1000, tokens=2000)
        yield fake


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts is asked often whether it is ready."""
    monkeypatch.setattr(restart, "POLL_S", 0.02)
