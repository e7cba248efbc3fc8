"""Files and functions stay small enough to read in one go (docs/structure.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from package_source import PACKAGE, nodes_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_fit(path: Path) -> None:
    assert path.read_text().count("\n") <= MAX_FILE_LINES
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_the_tree_is_two_levels_deep() -> None:
    depths = {len(path.relative_to(PACKAGE).parts) for path in PACKAGE.rglob("*.py") if "native" not in path.parts}
    assert max(depths) <= 2


def test_the_list_of_slow_tests_names_what_is_there() -> None:
    tests = Path(__file__).parent
    (assigned,) = [
        node.value
        for node in ast.parse((tests / "conftest.py").read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "SLOW"
    ]
    for place in ast.literal_eval(assigned):
        path, *names = place.split("::")
        assert f"def {names[-1] if names else ''}" in (tests / path).read_text(), place
