"""Style sheet of all pages. The chat page and /docs load it; calculator, compare and report pages include its text."""

from __future__ import annotations

from pathlib import Path

LOOK = Path(__file__).with_name("style.css")


def look() -> str:
    """Return the CSS text that all HTML pages use (style.css)."""
    return LOOK.read_text(encoding="utf-8")
