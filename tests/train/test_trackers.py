"""Curves elsewhere: off by default, fakes of the three packages, and a clear refusal without one."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.runs.trackers import PACKAGES, check_tracker, tracker


class Fake(types.ModuleType):
    """All three packages in one; `seen` is what arrived."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen: list[tuple[Any, ...]] = []
        self.ended = False

    @contextlib.contextmanager
    def _session(self) -> Iterator[Fake]:
        yield self
        self.ended = True

    def SummaryWriter(self, folder: str) -> Any:
        return self._session()

    def init(self, **options: Any) -> Any:
        return self._session()

    def start_run(self, run_name: str) -> Any:
        return self._session()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.seen += [(name, value, step) for name, value in scalars.items()]

    log_metrics = log


@pytest.mark.parametrize("name", PACKAGES)
def test_each_gets_every_scalar_of_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(PACKAGES[name])
    monkeypatch.setitem(sys.modules, PACKAGES[name], fake)
    with tracker(name, tmp_path) as add:
        add({"train/loss": 2.5, "train/lr": float("nan")}, 3)
    assert fake.seen == [("train/loss", 2.5, 3)] and fake.ended


def test_by_default_nothing_is_imported(tmp_path: Path) -> None:
    with tracker("none", tmp_path) as add:
        add({"train/loss": 2.5}, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="log_to wandb needs its package: pip install wandb, or leave it out"):
        check_tracker("wandb")
