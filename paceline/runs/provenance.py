"""Versions and commit that are recorded with every run and its results."""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("paceline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "llama-cpp-python", "vllm")
"""Packages whose versions are recorded with results: they affect speed or output."""


@functools.cache
def versions() -> Mapping[str, str]:
    """Return name -> version of Python and of installed packages that affect speed or output (PACKAGES)."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def commit() -> str | None:
    """Returns the commit of paceline's git checkout, "+" added if there are uncommitted changes; None outside a
    checkout, or if git fails."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
