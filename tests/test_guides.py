"""docs/guides.md and pages like it: every command line of ours in them is one that the commands take, and guides stay short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_lines import in_blocks, parse, words_of

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = DOCS / "guides.md"
MOST_LINES = 24


def guides() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", GUIDES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def lines() -> list[str]:
    """Of the guides, in blocks and, with options, within sentences; of other pages those that are indented."""
    sentences = re.findall(r"`(paceline \w[^`]* -[^`]*)`", GUIDES.read_text(encoding="utf-8"))
    indented = re.findall(r"^    (paceline .+)$", (DOCS / "engines.md").read_text(encoding="utf-8"), re.MULTILINE)
    indented += re.findall(r"^    (paceline .+--ray.*)$", (DOCS / "elsewhere.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [*in_blocks(GUIDES), *sentences, *indented]


def test_there_are_four_of_twenty_lines() -> None:
    found = guides()
    assert [name.split()[-1] for name in found] == ["GPUs", "GGUF", "EAGLE-3", "MacBook"]
    for name, text in found.items():
        assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES, name
    assert len(lines()) >= 24


@pytest.mark.parametrize("line", lines())
def test_a_command_line_is_taken(line: str) -> None:
    parse(words_of(" ".join(line.split())))


def test_a_wrong_one_would_be_seen() -> None:
    wrong = {
        "paceline serve --no-such-option": "no-such-option",
        "paceline fly": "fly",
        "paceline generate --max-tokens many": "many|valid integer",
    }
    for line, told in wrong.items():
        with pytest.raises(Exception, match=told):
            parse(words_of(line))
