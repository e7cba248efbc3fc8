"""Reports whose figures are not drawn, for tests of the rest: `pytest_plugins = ("undrawn",)`, fixture `undrawn`.

matplotlib takes a third of a second for each figure. tests/bench/test_html.py looks at drawn ones.
"""

from __future__ import annotations

import html
from typing import Any

import pytest

from paceline.report import pages


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are empty SVG elements with their titles; those without data are left out as ever."""

    def plot(title: str, fill: Any, num_series: int, height: float = 0.0) -> pages.Plot:
        return title, f'<svg role="img" aria-label="{html.escape(title)}"></svg>' if num_series else ""

    monkeypatch.setattr(pages, "_plot", plot)
