"""Runs in this folder do not measure the machine, and draw nothing in their reports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from known_machine import known_machine

__all__ = ["known_machine"]


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    """Drawing takes as long as all else in a report (evals/test_evals_command.py has it)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.evals.report.ranges", lambda title, *_, **__: (title, ""))
        yield
