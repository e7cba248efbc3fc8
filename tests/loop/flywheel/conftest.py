"""Runs in this folder do not measure the machine, draw nothing in their reports and do not collect garbage between
stages."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from known_machine import known_machine

__all__ = ["known_machine"]


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    """Drawing takes as long as all else in a report (evals/test_evals_command.py has it)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.report.pages.ranges", lambda title, *_, **__: (title, ""))
        yield


@pytest.fixture(scope="module", autouse=True)
def uncollected() -> Iterator[None]:
    """With all that a run of every test has loaded, each collection takes longer than a tiny stage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield
