"""Every notebook runs, says what is stored in it, and draws what it stores."""

from __future__ import annotations

import copy
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """For each code cell: printed text, and the types of its pictures (pixels depend on fonts)."""
    return [
        ["".join(one["text"]) if "text" in one else " ".join(sorted(one["data"])) for one in cell["outputs"]]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.name)
def test_it_runs_and_is_current(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    stored = json.loads(file.read_text(encoding="utf-8"))
    executed = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["executed"]
    assert outputs(executed(copy.deepcopy(stored))) == outputs(stored), (
        f"run python notebooks/execute.py notebooks/{file.name}"
    )
    assert stored["nbformat"] == 4
    assert len({cell["id"] for cell in stored["cells"]}) == len(stored["cells"])


def test_every_table_of_the_readme_s_speeds_is_in_it() -> None:
    """A row of *How fast* that no cell computes would be a figure without evidence."""
    (file,) = (each for each in NOTEBOOKS if each.name == "evidence.ipynb")
    printed = "".join(text for cell in outputs(json.loads(file.read_text(encoding="utf-8"))) for text in cell)
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## How fast")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \|(.*)\|$", section, re.MULTILINE)
    measured = [(label, cells) for label, cells in rows if re.search(r"\d", cells) and label.strip()]
    assert len(measured) == 7
    for label, cells in measured:
        assert label.strip() in printed
        numbers = [cell.strip() for cell in cells.split("|") if cell.strip()]
        assert len(numbers) == 5
        assert all(f" {number} tokens/s" in printed or f" {number} times without" in printed for number in numbers)


def test_a_cell_that_fails_is_not_hidden() -> None:
    executed = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["executed"]
    cells = [{"cell_type": "code", "source": ["x = 1\n", "assert x == 2"]}]
    with pytest.raises(AssertionError):
        executed({"cells": cells})
