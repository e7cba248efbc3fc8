"""Files and functions stay small enough to read in one go (docs/structure.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from package_source import PACKAGE, nodes_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_files_fit() -> None:
    sizes = {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert len(sizes) > 300 and {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


@pytest.mark.slow
def test_functions_fit() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {length} lines"
        for path in PACKAGE.rglob("*.py")
        if not path.name.endswith("_triton.py")  # a kernel is one function of Triton's language, as C++ has files
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_the_tree_is_two_levels_deep() -> None:
    """But for code that a compiler of its own reads: C++ and Triton."""
    paths = (path for path in PACKAGE.rglob("*.py") if not {"native", "kernels"} & set(path.parts))
    assert max(len(path.relative_to(PACKAGE).parts) for path in paths) <= 2


def test_files_of_slow_tests_only_are_recognised(request: pytest.FixtureRequest) -> None:
    tests = Path(__file__).parent
    conftest = request.config.pluginmanager.get_plugin(str(tests / "conftest.py"))
    assert conftest is not None
    for path in tests.rglob("test_*.py"):
        text = path.read_text()
        paragraphs = [each.partition("\n\n")[0] for each in text.split("\npytestmark")[1:]]
        marked = any("pytest.mark.slow" in each for each in paragraphs)
        assert marked == (conftest.SLOW_FILE.search(text) is not None), path
