"""The `gguf` package, imported only when a GGUF file or a block format that only it converts is used.

Machines that run safetensors checkpoints alone, such as borrowed GPUs, need not have it.
"""

from __future__ import annotations

from types import ModuleType

from paceline.errors import UnsupportedModelError, needing


def gguf_package() -> ModuleType:
    """Returns the imported package. Raises UnsupportedModelError where it is not installed."""
    remedy = "pip install gguf, or use a folder of safetensors"
    with needing(UnsupportedModelError, f"GGUF files and weights in their blocks need the gguf package: {remedy}"):
        import gguf
    return gguf
