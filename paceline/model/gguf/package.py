"""Imports the `gguf` package on first use, for GGUF files and block formats.

Machines that only run safetensors checkpoints, such as rented GPUs, do not need it.
"""

from __future__ import annotations

from types import ModuleType

from paceline.errors import UnsupportedModelError, needing


def gguf_package() -> ModuleType:
    """Return the imported package. Raises UnsupportedModelError if it is not installed."""
    remedy = "pip install gguf, or use a folder of safetensors"
    with needing(UnsupportedModelError, f"GGUF files and weights in their blocks need the gguf package: {remedy}"):
        import gguf
    return gguf
