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
    if path.name.endswith("_triton.py"):
        return  # a kernel is one function of Triton's language, as C++ has files
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_the_tree_is_two_levels_deep() -> None:
    """But for code that a compiler of its own reads: C++ and Triton."""
    paths = (path for path in PACKAGE.rglob("*.py") if not {"native", "kernels"} & set(path.parts))
    assert max(len(path.relative_to(PACKAGE).parts) for path in paths) <= 2


def test_files_of_slow_tests_only_are_recognised(request: pytest.FixtureRequest) -> None:
    tests = Path(__file__).parent
    conftest = request.config.pluginmanager.get_plugin(str(tests / "conftest.py"))
    assert conftest is not None
    for path in tests.rglob("test_*.py"):
        marked = any(
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "pytestmark"
            and "pytest.mark.slow" in ast.unparse(node.value)
            for node in ast.parse(path.read_text()).body
        )
        assert marked == (conftest.SLOW_FILE.search(path.read_text()) is not None), path
