"""Imports the `gguf` package on first use: machines that only run safetensors checkpoints do not need it. Also helpers
for writing GGUF files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from paceline.errors import UnsupportedModelError, needing

if TYPE_CHECKING:
    import gguf


def gguf_package() -> ModuleType:
    """Import and return the `gguf` package. Raises UnsupportedModelError if it is not installed."""
    remedy = "pip install gguf, or use a folder of safetensors"
    with needing(UnsupportedModelError, f"GGUF files and weights in their blocks need the gguf package: {remedy}"):
        import gguf
    return gguf


def copy_keys(
    reader: gguf.GGUFReader, writer: gguf.GGUFWriter, keys: Iterable[str], changed: Mapping[str, int] | None = None
) -> None:
    """Copy these metadata keys from one GGUF file to another. `changed`: key -> value to write instead."""
    for key in keys:
        entry = reader.fields[key]
        kind, *inner = entry.types
        writer.add_key_value(
            key, (changed or {}).get(key, entry.contents()), kind, sub_type=inner[-1] if inner else None
        )


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file with everything that was added to the writer, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
