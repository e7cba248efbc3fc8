"""The marks of requirements.lock: which of its lines `make demo` and `make own` install."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parents[1] / "requirements.lock"


def needed(requirement: Requirement, seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yields the packages that a requirement needs, its own name first; each as often as an extra of it is met."""
    name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    yield name
    for line in metadata.requires(name) or []:
        other = Requirement(line)
        if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield from needed(other, seen)


def test_what_training_and_transformers_need_is_marked() -> None:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    marked = {canonicalize_name(line.partition("==")[0]) for line in lines if line.endswith("  # run")}
    wanted = {*needed(Requirement("paceline[train,hf]"), set())} - {"paceline"} | {"setuptools"}
    assert marked == wanted and len(marked) < len(lines) / 1.5
