"""The package's modules as syntax trees, each read and walked once for all tests of a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "paceline"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of the module."""
    return list(ast.walk(tree_of(path)))
