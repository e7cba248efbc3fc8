"""Write docs/reference/python.md from the docstrings of `paceline.__all__`: `python docs/make_python.py`. A test checks
that it is current. Sources are read, not imported, so that strings under fields are found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "reference" / "python.md"
INTRODUCTION = """# The Python API

Every name that `import paceline` offers, with its docstrings; made by `python docs/make_python.py`, do not edit.

```python
from paceline import LLM, SamplingParams

out = LLM("smollm2-135m").chat([[{"role": "user", "content": "Why is the sky blue?"}]], SamplingParams(max_tokens=64))
print(out[0].text, out[0].stats.tokens_per_round, out[0].stats.lossless)
```

`tokens_per_round` is the acceptance length: accepted drafts and the target's own token, by round."""


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8"))


def _public() -> Iterator[tuple[str, str]]:
    """Each class of `__all__` with its module, as paceline/__init__.py imports them for type checkers."""
    tree = ast.parse((ROOT / "paceline" / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {name.name: node.module or "" for node in imports for name in node.names}
    names = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for name in ast.literal_eval(names):
        if name in modules:
            yield name, "paceline.sampling" if name == "SamplingParams" else modules[name]


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for field, behind in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            kind = ast.unparse(field.annotation)
            while "Annotated[" in kind:  # its first part alone
                kind = re.sub(r"Annotated\[((?:[^\[\],]|\[[^\[\]]*\])+),(?:[^\[\]]|\[[^\[\]]*\])*\]", r"\1", kind)
            value = f" = {ast.unparse(field.value)}" if field.value and "field(" not in ast.unparse(field.value) else ""
            words = ast.literal_eval(behind.value) if isinstance(behind, ast.Expr) else ""
            yield f"- `{ast.unparse(field.target)}: {kind}{value}`" + (f": {' '.join(words.split())}" if words else "")


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or not method.name.startswith("_")):
            words = ast.get_docstring(method) or ""
            name = node.name if method.name == "__init__" else method.name
            marks = {ast.unparse(each) for each in method.decorator_list}
            signature = (
                name
                if "property" in marks
                else f"{name}({ast.unparse(method.args).removeprefix('self').removeprefix(', ')})"
            )
            if words or method.name == "__init__":
                yield f"- `{signature}`" + (f": {' '.join(words.split())}" if words else "")


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, module in _public():
        tree = _tree(module)
        node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
        parts += [f"## {name}", f"`{module}.{name}`", ast.get_docstring(node) or "", "\n".join(_fields(node))]
        parts += ["\n".join(_methods(node)), (ast.get_docstring(tree) or "") if name == "PacelineError" else ""]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
