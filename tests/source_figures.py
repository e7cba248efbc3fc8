"""Prints how large the source is: lines by kind, modules a folder, long or branched functions, lines over 120 columns.

    python tests/source_figures.py                # the last commit
    python tests/source_figures.py 857c882 HEAD   # one column for each commit

Files are those of `git ls-tree`. The package is counted in all its languages, since a JSON table or a template has to
be read as well; generated pages and notebooks are left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

MAX_COLUMNS, MAX_LINES, MAX_BRANCHES = 120, 40, 12
CODE = {".py", ".cpp", ".h", ".inl", ".js", ".css", ".html", ".jinja", ".j2", ".json", ".sh"}
GENERATED = {"docs/reference/cli.md", "docs/reference/python.md"}
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.match_case,
    ast.comprehension,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def files_of(commit: str) -> Iterator[tuple[PurePosixPath, str]]:
    """Every text file of a commit with its contents."""
    names = subprocess.run(["git", "ls-tree", "-rz", "--name-only", commit], check=True, capture_output=True).stdout
    paths = [name for name in names.decode().split("\0") if PurePosixPath(name).suffix in CODE | {".md"}]
    requests = "".join(f"{commit}:{path}\n" for path in paths).encode()
    batch = subprocess.run(["git", "cat-file", "--batch"], check=True, capture_output=True, input=requests).stdout
    at = 0
    for path in paths:
        end = batch.index(b"\n", at)
        size = int(batch[at:end].split()[2])
        yield PurePosixPath(path), batch[end + 1 : end + 1 + size].decode(errors="replace")
        at = end + 1 + size + 1


def branches(function: ast.AST) -> int:
    """Decisions in a function, each operator of an `and` or `or` one of them; those of functions inside it count
    there."""
    total, waiting = 0, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, FUNCTIONS):
            continue
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else isinstance(node, BRANCHES)
        waiting.extend(ast.iter_child_nodes(node))
    return total


def figures(commit: str) -> Counter[str]:
    """The table's column of one commit."""
    count: Counter[str] = Counter()
    folders: Counter[PurePosixPath] = Counter()
    for path, text in files_of(commit):
        lines = text.splitlines()
        top, suffix = path.parts[0], path.suffix
        if top == "docs" and suffix == ".md" and str(path) not in GENERATED:
            count["docs, pages"] += 1
            count["docs, words"] += len(text.split())
        if suffix not in CODE or top not in ("paceline", "tests", "experiments", "recipes"):
            continue
        if top == "experiments" and suffix not in (".py", ".sh"):
            continue
        count[f"{top}, lines {suffix}"] += len(lines)
        if top == "paceline":
            count["paceline, lines of everything"] += len(lines)
        if suffix != ".py":
            continue
        count[f"{top}, lines over {MAX_COLUMNS} columns"] += sum(len(line) > MAX_COLUMNS for line in lines)
        if top == "paceline":
            folders[path.parent] += path.stem != "__init__"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, FUNCTIONS):
                    count[f"functions over {MAX_LINES} lines"] += (node.end_lineno or 0) - node.lineno >= MAX_LINES
                    count[f"functions over {MAX_BRANCHES} branches"] += branches(node) > MAX_BRANCHES
    count["paceline, folders"] = len(folders)
    count["paceline, most modules in a folder but commands/"] = max(
        n for folder, n in folders.items() if folder.name != "commands"
    )
    return count


def main(commits: list[str]) -> None:
    columns = [figures(commit) for commit in commits]
    rows = sorted(set().union(*columns))
    width = max(map(len, rows))
    print(" " * width, *(f"{commit[:10]:>10}" for commit in commits))
    for row in rows:
        print(f"{row:{width}}", *(f"{column[row]:>10,}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1:] or ["HEAD"])
