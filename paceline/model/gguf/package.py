"""Imports the `gguf` package on first use, for GGUF files and block formats; helpers for its writer.

Machines that only run safetensors checkpoints, such as rented GPUs, do not need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedModelError, needing

if TYPE_CHECKING:
    import gguf


def gguf_package() -> ModuleType:
    """Return the imported package. Raises UnsupportedModelError if it is not installed."""
    remedy = "pip install gguf, or use a folder of safetensors"
    with needing(UnsupportedModelError, f"GGUF files and weights in their blocks need the gguf package: {remedy}"):
        import gguf
    return gguf


def copy_keys(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, keys: Iterable[str], changed: Mapping[str, int] | None = None
) -> None:
    """Copy metadata keys from one file to another, with other values for those in `changed`."""
    for key in keys:
        entry = reader.fields[key]
        kind, *inner = entry.types
        writer.add_key_value(
            key, (changed or {}).get(key, entry.contents()), kind, sub_type=inner[-1] if inner else None
        )


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
