"""Arrows point one way: who may import whom, read from the source."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from package_source import PACKAGE, nodes_of, tree_of

GROUND_FLOOR = {"plan", "data", "runs", "report", "net"}
"""Folders that everything may use."""
NOUNS = {"types", "errors", "bounds", "config", "hardware", "hub", "lossy", "rng", "sampling", "turnaround"}
LAYERS = [
    NOUNS | GROUND_FLOOR,
    {"model", "simulate", "interop"},
    {"draft", "verify"},
    {"engine"},
    {"bench", "train", "serve"},
    {
        "loop.adapt",
        "loop.audit",
        "loop.distill",
        "loop.evals",
        "loop.record",
        "loop.rl",
        "loop.search",
        "loop.store",
        "loop.synthesize",
    },
    {"loop.flywheel", "loop.mcp"},
    {"commands", "cli", "__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
SIDEWAYS = {
    ("verify", "draft"),
    ("draft", "verify"),
    ("train", "serve"),
    ("serve", "train"),
    ("bench", "train"),
    ("bench", "serve"),
}
FOR_PREDICTIONS = NOUNS - {"hub", "rng"} | {"plan", "report", "net", "simulate"}
"""Packages of paceline that `simulate` may import; PyTorch is not allowed."""
GGUF_PARSER = PACKAGE / "model" / "gguf" / "container.py"
"""The only other module that `simulate` may import, within a function: it needs NumPy and `gguf`, not PyTorch."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(name: str) -> str:
    """`paceline.model.torch.decoder` -> `model`, `paceline.loop.adapt.run` -> `loop.adapt`."""
    pieces = name.split(".")
    if len(pieces) == 1:
        return "__init__"
    return ".".join(pieces[1:3]) if pieces[1] == "loop" and len(pieces) > 2 else pieces[1]


def name_of(path: Path) -> str:
    return ".".join(("paceline", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    nodes = tree_of(path).body if top_level_only else nodes_of(path)
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
            if node.module == "paceline":
                imported.update(f"paceline.{alias.name}" for alias in node.names if alias.name in RANK)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    return imported


@pytest.mark.slow
def test_imports_point_left() -> None:
    for path in modules():
        own = part(name_of(path))
        if own in ("__init__", "loop"):
            continue
        assert own in RANK, f"{own}: give it a place in LAYERS and in docs/project/structure.md"
        for name in imports_of(path):
            if not name.startswith("paceline."):
                continue
            other = part(name)
            assert RANK[other] <= RANK[own], f"{path.relative_to(PACKAGE)} imports {name}, which stands to its right"
            assert (own, other) not in SIDEWAYS, f"{path.relative_to(PACKAGE)} imports {name}, its neighbour"


LIGHT = [path for path in modules() if part(name_of(path)) in NOUNS | GROUND_FLOOR | {"__init__", "cli"}]
LIGHT += [GGUF_PARSER, GGUF_PARSER.with_name("package.py")]


@pytest.mark.parametrize("path", LIGHT, ids=name_of)
def test_the_ground_floor_is_imported_without_torch(path: Path) -> None:
    heavy = {"torch", "transformers", "safetensors", "tokenizers", "matplotlib", "pyarrow"}
    assert not heavy & {module.split(".")[0] for module in imports_of(path, top_level_only=True)}


def test_only_what_shards_a_network_imports_torchs_sharded_tensors() -> None:
    """They take a second to import, with SymPy and the compiler's symbolic shapes."""
    slow = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.device_mesh")
    for path in modules():
        assert not {name for name in imports_of(path, top_level_only=True) if name.startswith(slow)}, path.name


DECISIONS = [
    *(PACKAGE / "loop" / "adapt" / f"{name}.py" for name in ("config", "log")),
    *sorted((PACKAGE / "loop" / "adapt" / "traffic").glob("*.py")),
    *(PACKAGE / "loop" / "adapt" / "decide" / f"{name}.py" for name in ("decide", "policy")),
    PACKAGE / "loop" / "adapt" / "gate" / "lineage.py",
]


@pytest.mark.parametrize("path", DECISIONS, ids=name_of)
def test_decisions_need_no_torch(path: Path) -> None:
    """Nor anything of ours that does, but what is asked for within a function."""
    imported = imports_of(path, top_level_only=True)
    light = {name_of(each) for each in DECISIONS}
    assert "torch" not in imported
    assert {part(each) for each in imported if each.startswith("paceline.") and each not in light} <= LAYERS[0]


@pytest.mark.parametrize("path", sorted((PACKAGE / "simulate").rglob("*.py")), ids=name_of)
def test_predictions_need_no_engine(path: Path) -> None:
    imported = imports_of(path) - {name_of(GGUF_PARSER)}
    assert "torch" not in {name.split(".")[0] for name in imported}
    assert {part(name) for name in imported if name.startswith("paceline.")} <= FOR_PREDICTIONS
    assert name_of(GGUF_PARSER) not in imports_of(path, top_level_only=True)


FOR_ENGINES = {"paceline.errors", "paceline.interop", "paceline.net.loopback"}


@pytest.mark.parametrize(
    "path", [*sorted((PACKAGE / "interop").glob("*.py")), PACKAGE / "net" / "loopback.py"], ids=name_of
)
def test_classes_for_other_engines_need_little(path: Path) -> None:
    """They run in the engine's environment, where our dependencies may be missing."""
    imported = imports_of(path)
    assert {name for name in imported if name.startswith("paceline")} <= FOR_ENGINES
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names | {
        "torch",
        "safetensors",
        "vllm",
        "paceline",
    }


def test_a_wrong_arrow_would_be_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from paceline.engine.engine import Engine\n    return Engine\n")
    assert any(RANK[part(name)] > RANK["model"] for name in imports_of(wrong))


def imports_by_module(package: Path) -> dict[str, set[str]]:
    """Every module with the modules of the package that it imports anywhere: in functions and for type checking too."""
    modules = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for name, path in modules.items():
        nodes = nodes_of(path)
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= members & set(modules) or {node.module}
        imports[name] = names & set(modules) - {name}
    return imports


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module: each reaches all others of its component."""
    reached = {name: {name, *others} for name, others in imports.items()}
    for middle in imports:
        for seen in reached.values():
            if middle in seen:
                seen |= reached[middle]
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return sorted(sorted(circle) for circle in groups if len(circle) > 1)


@pytest.mark.slow
def test_there_is_no_import_circle() -> None:
    assert circles(imports_by_module(PACKAGE)) == []


def test_a_circle_would_be_seen(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.py").write_text("from package import two\n")
    (package / "two.py").write_text("def f():\n    from package.three import g\n    return g\n")
    three = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.one import two\n"
    (package / "three.py").write_text(three)
    assert circles(imports_by_module(package)) == [["package.one", "package.three", "package.two"]]
