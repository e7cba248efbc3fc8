"""Files and functions stay small enough to read in one go (docs/project/structure.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from package_source import PACKAGE, nodes_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
"""Without the signature in commands/, where it is the table of the options."""
MAX_MODULES = 12
"""In one folder."""
MIN_PREFIXED = 3
"""From this number on, modules whose names begin with the same word belong in a folder of that name."""
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})


def test_files_fit() -> None:
    sizes = {str(path.relative_to(PACKAGE)): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert len(sizes) > 300 and {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_files_of_tests_and_experiments_fit() -> None:
    root = PACKAGE.parent
    paths = [path for folder in ("tests", "experiments") for path in (root / folder).rglob("*.py")]
    sizes = {str(path.relative_to(root)): path.read_text().count("\n") for path in paths}
    assert len(sizes) > 300 and {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def first_line(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.body[0].lineno if path.parent.name == "commands" else function.lineno


@pytest.mark.slow
def test_functions_fit() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {length} lines"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "triton"  # a kernel is one function of Triton's language, as C++ has files
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or node.lineno) - first_line(path, node) + 1) > MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE.parent)))
def test_a_folder_can_be_looked_over(folder: Path) -> None:
    """But `commands/`, whose modules are named as the commands are."""
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert len(names) <= MAX_MODULES or folder.name == "commands"
    first_words = [name.split("_")[0] for name in names if "_" in name]
    assert {word for word in first_words if first_words.count(word) >= MIN_PREFIXED} == set(), "that is a folder"


def test_files_of_slow_tests_only_are_recognised(request: pytest.FixtureRequest) -> None:
    tests = Path(__file__).parent
    conftest = request.config.pluginmanager.get_plugin(str(tests / "conftest.py"))
    assert conftest is not None
    for path in tests.rglob("test_*.py"):
        text = path.read_text()
        paragraphs = [each.partition("\n\n")[0] for each in text.split("\npytestmark")[1:]]
        marked = any("pytest.mark.slow" in each for each in paragraphs)
        assert marked == (conftest.SLOW_FILE.search(text) is not None), path
