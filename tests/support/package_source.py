"""The package's modules as syntax trees, each read and walked once for all tests of a process."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "paceline"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    was_enabled = gc.isenabled()
    gc.disable()  # trees are kept to the end: collections would walk millions of nodes, now and later
    tree = ast.parse(path.read_text())
    gc.freeze()
    if was_enabled:
        gc.enable()
    return tree


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of the module."""
    return list(ast.walk(tree_of(path)))
