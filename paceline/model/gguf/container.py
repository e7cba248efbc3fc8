"""Parses the GGUF container (llama.cpp's file format), untrusted: metadata by key, and the location of each tensor.

Arrays such as the vocabulary are only located, and read on access. A split model (x-00001-of-00003.gguf, ...) can be
opened by any of its parts.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from paceline.errors import ModelFileError, reraised
from paceline.model.gguf.package import gguf_package

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType as Quant

MAX_HEADER_BYTES = 64 << 20
"""Limit on metadata and tensor table together. The largest known header has 16 MB."""
MAX_DIMENSIONS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's id of a number type -> its code in Python's `struct` and NumPy."""
STRING, ARRAY = 8, 9
ARRAY_TYPES = {STRING: str, 6: float, 7: bool, 12: float}
"""GGUF's id of an element type -> Python type of the array's values; other ids mean int."""
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
"""File name of one part of a split model, by llama.cpp's gguf-split: name, part number from 1, number of parts,
suffix."""
_length_at = struct.Struct("<Q").unpack_from

Kind = TypeVar("Kind", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type and location of a tensor in a GGUF file."""

    path: Path
    """File (of a split model, the part) that contains the tensor."""
    name: str
    kind: Quant
    shape: tuple[int, ...]
    """Sizes with the outermost dimension first, as in PyTorch; GGUF stores them in reverse."""
    start: int
    """Offset of the tensor's data in the file, in bytes."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Array:
    """A metadata array that was located but not read."""

    kind: int
    length: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    """Metadata by key: numbers, strings, and locations of arrays, which `array` reads."""
    tensors: dict[str, StoredTensor]

    def get(self, key: str, kind: type[Kind]) -> Kind | None:
        """Return the number or string under a metadata key; None if the key is missing. Raises ModelFileError if the
        value is not of type `kind`."""
        value = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        value_text = "an array" if isinstance(value, _Array) else f"{value!r:.80}"
        raise ModelFileError(
            f"{self.path}: GGUF key {key} must be of type {kind.__name__} (got {value_text}): fetch the model again"
        )

    def array(self, key: str, kind: type[Kind]) -> list[Kind]:
        """Read the array under a metadata key; [] if the key is missing. Raises ModelFileError if the array's values
        are not of type `kind`, or if it is damaged."""
        value = self.metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, _Array) or ARRAY_TYPES.get(value.kind, int) is not kind:
            raise ModelFileError(
                f"{self.path}: GGUF key {key} must be an array of {kind.__name__}: fetch the model again"
            )
        with self.path.open("rb") as file:
            file.seek(value.start)
            data = file.read(value.end - value.start)
        with reraised(
            ModelFileError, f"{self.path}: GGUF key {key} is damaged", "fetch the model again", ValueError, struct.error
        ):
            if value.kind == STRING:
                return _strings(data, value.length)  # pyright: ignore[reportReturnType]
            return np.frombuffer(data, dtype="<" + SCALARS[value.kind], count=value.length).tolist()

    def length(self, key: str) -> int:
        """Number of values in the array under a metadata key; 0 if there is no such array."""
        value = self.metadata.get(key)
        return value.length if isinstance(value, _Array) else 0

    def read(self, stored: StoredTensor) -> np.ndarray:
        """Read a tensor's bytes, uint8 [..., bytes per row]. Raises ModelFileError if the file has become shorter since
        it was opened."""
        data = np.fromfile(stored.path, dtype=np.uint8, count=stored.num_bytes, offset=stored.start)
        if len(data) != stored.num_bytes:
            raise ModelFileError(f"{stored.path} became shorter while it was read: fetch it again")
        return data.reshape(*stored.shape[:-1], -1)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file; any part of a split model opens the whole. Raises ModelFileError if the file is
    truncated, damaged or not GGUF, or if a part is missing."""
    file = _open_one(path)
    count = file.get("split.count", int) or 1
    return file if count == 1 else _joined(path, count)


def _joined(path: Path, count: int) -> GGUFFile:
    """All parts as one file: metadata of the first, tensors of each."""
    name_match = PART.fullmatch(path.name)
    if not name_match or int(name_match[3]) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts: name them as gguf-split does, NAME-00001-of-{count:05d}.gguf"
        )
    parts, tensors = list[GGUFFile](), dict[str, StoredTensor]()
    for number in range(1, count + 1):
        part_path = path.with_name(f"{name_match[1]}-{number:05d}-of-{count:05d}{name_match[4]}")
        if not part_path.is_file():
            raise ModelFileError(f"part {number} of {count} is missing: put {part_path.name} beside {path}")
        part = _open_one(part_path)
        if (part.get("split.no", int), part.get("split.count", int)) != (number - 1, count):
            raise ModelFileError(f"{part_path} is not part {number} of {count}: fetch it again")
        if twice := tensors.keys() & part.tensors.keys():
            raise ModelFileError(f"{part_path} holds {min(twice)} a second time: fetch all parts again")
        parts.append(part)
        tensors |= part.tensors
    total = parts[0].get("split.tensors.count", int)
    if total is not None and total != len(tensors):
        raise ModelFileError(f"the {count} parts of {path} hold {len(tensors)} of {total} tensors: fetch them again")
    return GGUFFile(parts[0].path, parts[0].metadata, tensors)


def _open_one(path: Path) -> GGUFFile:
    damaged = (ValueError, OverflowError, OSError, MemoryError, struct.error)
    with reraised(ModelFileError, f"{path} is no whole GGUF file", "delete it and fetch it again", *damaged):
        status = path.stat()
        return _read_header(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=32)  # a split model may have as many parts
def _read_header(path: Path, version: tuple[int, ...]) -> GGUFFile:
    """Parse and cache a header; `version` distinguishes a file from one that replaced it."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data, path).header()


class _Reader:
    """Parses a header from front to back. Raises ValueError or struct.error if it is not GGUF or exceeds its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def header(self) -> GGUFFile:
        magic, version, num_tensors, num_keys = self.take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(
                f"it begins with {magic!r} and version {version}; GGUF versions 2 and 3 in little-endian are known"
            )
        metadata = {self.text(): self.value() for _ in range(num_keys)}
        infos = {self.text(): self.tensor_info() for _ in range(num_tensors)}
        if len(metadata) < num_keys or len(infos) < num_tensors:
            raise ValueError("a key or a tensor comes twice")
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"its alignment {alignment!r} is no power of two")
        first = -(-self.at // alignment) * alignment
        return GGUFFile(
            self.path, metadata, {name: self.stored(name, info, first, alignment) for name, info in infos.items()}
        )

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.move(struct.calcsize("<" + form))
        return values

    def move(self, num_bytes: int) -> int:
        """Advance by `num_bytes`; returns the offset before."""
        start, self.at = self.at, self.at + num_bytes
        if self.at > self.end:
            raise ValueError(f"its header does not end within its {self.end} bytes")
        return start

    def text(self) -> str:
        (length,) = self.take("Q")
        start = self.move(length)
        return self.data[start : self.at].decode("utf-8")

    def value(self) -> Any:
        (kind,) = self.take("I")
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.take(SCALARS[kind])[0]

    def array(self) -> _Array:
        kind, length = self.take("IQ")
        start = self.at
        if kind == STRING:
            self.move(8 * length)  # the minimum size: rejects absurd lengths early
            at = start
            for _ in range(length):
                at += 8 + _length_at(self.data, at)[0]
            self.at = start
            self.move(at - start)
        elif kind in SCALARS:
            self.move(struct.calcsize(SCALARS[kind]) * length)
        else:
            raise ValueError(f"an array has the unknown type {kind}")
        return _Array(kind, length, start, self.at)

    def tensor_info(self) -> tuple[tuple[int, ...], int, int]:
        """(shape, type, offset)."""
        (num_dimensions,) = self.take("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions")
        *sizes, kind, offset = self.take(f"{num_dimensions}QIQ")
        return tuple(reversed(sizes)), kind, offset

    def stored(self, name: str, info: tuple[tuple[int, ...], int, int], first: int, alignment: int) -> StoredTensor:
        shape, kind, offset = info
        ggml = gguf_package()
        quant = ggml.GGMLQuantizationType(kind)
        block_size, block_bytes = ggml.GGML_QUANT_SIZES[quant]
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset % alignment or shape[-1] % block_size or not num_bytes or first + offset + num_bytes > len(self.data):
            raise ValueError(f"tensor {name!r} of shape {shape} at {offset} lies across its blocks or its end")
        return StoredTensor(self.path, name, quant, shape, first + offset, num_bytes)


def _strings(data: bytes, length: int) -> list[str]:
    strings, at = [], 0
    for _ in range(length):
        start = at + 8
        at = start + _length_at(data, at)[0]
        strings.append(data[start:at].decode("utf-8"))
    return strings
