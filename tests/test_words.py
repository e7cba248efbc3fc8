"""Docstrings, help texts and names use plain words: words that had to be read twice do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_source import PACKAGE, nodes_of

pytestmark = pytest.mark.slow
BEGINNINGS = re.compile(
    r"(As|Of|What|Nothing|Nobody|Those|In their|Who|Whoever|Whatever|Which|So|Such|Than|And|But|Whether .*\bwould)\b"
)
"""A docstring's first sentence says what the thing is or does; it does not point at something before it."""
BANNED = re.compile(
    r"\b(stands?|stood|told|tells?|telling|said|nobody|whoever|sureness|foresight|foresees?|likeliest|moods|at hand"
    r"|giving away|gives? way|turn(s|ed)? away|roll call|so (many|much)|(is|are|has|have) (?-i:none)|taught"
    r"|beside|ours|theirs|(what|that|which) (is|are|was|were) no|on (its|their) way|guest|blanks|(came|comes?) of|asked of"  # noqa: E501
    r"|elsewhere|none the worse|(in any|the) company|in its own house)\b",
    re.IGNORECASE,
)
"""Each has a standard word of the field, or a plainer one."""
NOT_NAMES = {"told", "said", "found", "made", "taught", "beside"}
"""Names that do not say what a value is."""
NOT_NAMES_OF_TESTS = {"told", "said", "asked", "found", "made"}
"""Names that tests, experiments and the scripts in docs do not have; in the package `asked` is a field of the
configuration."""
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"|\w+/\S+")
"""Names in a text, which are the code's or a file format's."""


def texts(folder: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """Places and texts of docstrings, also those of fields, and of options' help."""
    for path in sorted(folder.rglob("*.py")):
        for node in nodes_of(path):
            where = f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)}"
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield where, node.value.value.strip()
            elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
                yield where, str(node.value.value)


def test_texts_begin_with_what_a_thing_is_or_does() -> None:
    assert [f"{where}: {text[:60]!r}" for where, text in texts() if BEGINNINGS.match(text)] == []


@pytest.mark.parametrize("folder", ["deploy", "docs", "experiments", "recipes", "tests"])
def test_texts_outside_the_package_name_their_subject(folder: str) -> None:
    wrong = [f"{where}: {text[:60]!r}" for where, text in texts(PACKAGE.parent / folder) if text.startswith("Of ")]
    assert wrong == []


def test_texts_use_standard_words() -> None:
    wrong = [
        f"{where}: {match.group()!r} in {text[:60]!r}"
        for where, text in texts()
        if (match := BANNED.search(QUOTED.sub("", text)))
    ]
    assert wrong == []


def names_in(folder: Path, names: set[str]) -> Iterator[tuple[Path, int, str]]:
    """Files, lines and names of variables, parameters, functions and classes that have one of these names."""
    for path in sorted(folder.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.arg) and node.arg in names:
                yield path, node.lineno, node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.lower() in names:
                yield path, node.lineno, node.id
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.lower() in names:
                yield path, node.lineno, node.name


def test_names_of_data_say_what_they_are() -> None:
    wrong = [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path, line, name in names_in(PACKAGE, NOT_NAMES)]
    assert wrong == []


@pytest.mark.parametrize("folder", ["tests", "experiments", "docs"])
def test_names_in_tests_and_scripts_say_what_they_are(folder: str) -> None:
    root = PACKAGE.parent
    wrong = [
        f"{path.relative_to(root)}:{line}: {name}"
        for path, line, name in names_in(root / folder, NOT_NAMES_OF_TESTS)
        if name.islower()  # handlers of test servers are called Asked
    ]
    assert wrong == []
