"""The style sheet shared by all pages. Chat and /docs load it; calculator, compare and reports include its text."""

from __future__ import annotations

from pathlib import Path

LOOK = Path(__file__).with_name("style.css")


def look() -> str:
    """Return the text of style.css."""
    return LOOK.read_text(encoding="utf-8")
