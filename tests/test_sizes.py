"""The checkout and the wheel stay light: weights lie in drafters/ alone."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
from package_source import PACKAGE

ROOT = Path(__file__).parents[1]
MOST_CHECKOUT_BYTES = 13_000_000
"""Without drafters/."""
MOST_WHEEL_BYTES = 8_000_000
SOURCES = {".cpp", ".h", ".inl"}
"""Suffixes of the native library's sources, which travel in the source distribution."""


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    done = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_the_checkout_is_light_without_drafters() -> None:
    sizes = {path: path.stat().st_size for path in tracked() if path.relative_to(ROOT).parts[0] != "drafters"}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    names = ", ".join(str(path.relative_to(ROOT)) for path in largest)
    assert sum(sizes.values()) <= MOST_CHECKOUT_BYTES, f"the largest: {names}"
    assert not [path for path in sizes if path.suffix == ".safetensors"], "weights belong in drafters/"


@pytest.mark.slow
def test_the_wheel_is_light() -> None:
    """Compresses the files of the package as a wheel does, with the native library if it is built."""
    library = [*(PACKAGE / "model" / "native").glob("libpaceline_native.*")]
    files = [path for path in tracked() if PACKAGE in path.parents and path.suffix not in SOURCES]
    assert len(files) > 100
    with io.BytesIO() as archive:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
            for path in [*files, *library]:
                wheel.write(path, path.relative_to(ROOT))
        assert len(archive.getvalue()) <= MOST_WHEEL_BYTES
