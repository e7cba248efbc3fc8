"""The `gguf` package, imported only when a GGUF file or a block format that only it converts is used.

Machines that run safetensors checkpoints alone, such as borrowed GPUs, need not have it.
"""

from __future__ import annotations

from types import ModuleType

from paceline.errors import UnsupportedModelError, needing


def gguf_package() -> ModuleType:
    """Returns the imported package. Raises UnsupportedModelError where it is not installed."""
    with needing(
        UnsupportedModelError,
        "GGUF files and weights in their blocks need the gguf package: pip install gguf, or use a folder of safetensors",
    ):
        import gguf
    return gguf
