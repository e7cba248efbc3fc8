"""Where kernels are used: a card that cannot run them, or a Triton that cannot start one, is no error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.model.torch.kernels import available


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    available._starts_kernels.cache_clear()
    yield
    available._starts_kernels.cache_clear()


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], starts: Any) -> None:
    monkeypatch.setattr(available, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setitem(sys.modules, "paceline.model.torch.kernels.triton.probe", SimpleNamespace(starts=starts))


def test_kernels_are_used_where_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (9, 0), lambda index: True)
    assert available.can_use("cuda") and available.can_use("cuda:1")
    assert not available.can_use("cpu") and not available.can_use("meta")
    monkeypatch.setattr(available, "find_spec", lambda name: None)
    assert not available.can_use("cuda")


def test_a_triton_that_starts_no_kernel_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def starts(index: int) -> bool:
        raise FileNotFoundError("gcc")

    card(monkeypatch, (9, 0), starts)
    with caplog.at_level(logging.WARNING, "paceline.model"):
        assert not available.can_use("cuda:0") and not available.can_use("cuda:0")
    (record,) = caplog.records
    assert "starts no kernel on cuda:0 (FileNotFoundError: gcc)" in record.getMessage()


def test_an_old_card_runs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, (7, 5), lambda index: True)
    assert not available.can_use("cuda:0")
