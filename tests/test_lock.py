"""The marks of requirements.lock: which of its lines `make demo` and `make own` install."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"


def needed(requirement: Requirement, locked: set[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yields the `locked` packages that a requirement needs, its own name first; each as often as an extra of it is
    met. Others come with another build of PyTorch only."""
    name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
    if (name, extras) in seen or name not in locked:
        return
    seen.add((name, extras))
    yield name
    for line in metadata.requires(name) or []:
        other = Requirement(line)
        if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield from needed(other, locked, seen)


def test_what_training_transformers_and_serving_need_is_marked() -> None:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    names = {canonicalize_name(line.partition("==")[0]): line.endswith("  # run") for line in lines}
    marked, wanted = {name for name, is_marked in names.items() if is_marked}, Requirement("paceline[train,hf,serve]")
    assert marked == {*needed(wanted, {*names, "paceline"}, set())} - {"paceline"} | {"setuptools"}
    assert len(marked) < len(lines) / 1.5
