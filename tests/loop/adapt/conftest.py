"""Fixtures of the daemon's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from fake_servers import FakeServer, Vllm, serving

from paceline.loop.adapt.servers.vllm_sglang import restart


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that only looks like one, and has answered some requests."""
    with serving(FakeServer()) as fake:
        fake.count(rounds=1000, accepted=1000, tokens=2000)
        yield fake


@pytest.fixture
def three() -> Iterator[list[Vllm]]:
    """vLLM servers that have answered as many requests."""
    with contextlib.ExitStack() as stack:
        servers: Any = [stack.enter_context(serving(Vllm())) for _ in range(3)]
        for one in servers:
            one.count(rounds=40_000, accepted=80_000, tokens=120_000, ended=9400)
        yield servers


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts is asked often whether it is ready."""
    monkeypatch.setattr(restart, "POLL_S", 0.02)
