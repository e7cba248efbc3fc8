"""docs/reference/families.md lists the rows that are tested, and says of each what is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_models import FAMILIES

from paceline.model.config import decoder as model_config

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def rows() -> dict[str, list[str]]:
    """The table's cells, by its first column."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {own[0]: own[1:] for own in cells if own[1].endswith("ForCausalLM")}


def test_every_family_is_in_the_table_and_tested() -> None:
    assert rows().keys() == FAMILIES.keys()
    assert {cells[0] for cells in rows().values()} == model_config.FAMILIES.keys()


def test_a_row_says_what_is_so(name: str, family_model: tuple[Path, Any]) -> None:
    architecture, _ = rows()[name]
    assert architecture == type(family_model[1]).__name__
