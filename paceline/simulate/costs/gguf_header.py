"""Reads a model's sizes from the header of a GGUF file: the keys of a config.json, and the mean bytes per weight.

Needs neither NumPy nor the `gguf` package, unlike `model/gguf/container.py`, which reads such files to run them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UnsupportedModelError, reraised

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110),
    12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18), 23: (256, 136), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
"""GGUF tensor type -> (values, bytes) of a block: F32, F16, Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, BF16, MXFP4."""
SIZES = {
    "num_hidden_layers": "block_count", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
FAMILIES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""llama.cpp's name of a model family -> its name in Transformers, where they differ."""
PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)


def read_header(file: Path) -> tuple[dict[str, Any], float]:
    """Returns (keys of the model's config.json, mean bytes per weight), from all parts of a split file. Raises
    UnsupportedModelError if the file is not a complete GGUF file of a known model."""
    damaged = (OSError, ValueError, KeyError, TypeError, struct.error)
    with reraised(UnsupportedModelError, f"{file} is no GGUF file that can be read", "fetch it again", *damaged):
        named = PART.fullmatch(file.name)
        count = int(named[2]) if named else 1
        paths = (
            [file.with_name(f"{named[1]}-{each:05d}-of-{count:05d}.gguf") for each in range(1, count + 1)]
            if named
            else [file]
        )
        metadata, tensors = dict[str, Any](), dict[str, tuple[tuple[int, ...], int]]()
        for path in paths:
            with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                own, infos = _Header(data).read()
                metadata, tensors = own | metadata, tensors | infos
        return _config(metadata, tensors), _mean_bytes(tensors)


def _config(metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    if arch == "gemma4":
        raise UnsupportedModelError(
            "GGUF headers of Gemma 4, whose layers differ, are not read: give the model's config.json"
        )
    sizes = {name: metadata.get(f"{arch}.{key}") for name, key in SIZES.items()}
    config = {name: value for name, value in sizes.items() if isinstance(value, int) and value}
    config |= {"vocab_size": tensors["token_embd.weight"][0][1], "tie_word_embeddings": "output.weight" not in tensors}
    return {"model_type": FAMILIES.get(arch, arch), **config}


def _mean_bytes(tensors: dict[str, tuple[tuple[int, ...], int]]) -> float:
    values = sum(math.prod(sizes) for sizes, _ in tensors.values())
    return sum(math.prod(sizes) / BLOCKS[kind][0] * BLOCKS[kind][1] for sizes, kind in tensors.values()) / values


class _Header:
    """Reads a header sequentially. Raises ValueError or struct.error for invalid data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int]]]:
        """Returns (metadata by key, without arrays; (sizes, type) by tensor, innermost size first)."""
        magic, version, num_tensors, num_keys = self._take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin as one")
        return dict(self._pairs(num_keys)), dict(self._infos(num_tensors))

    def _pairs(self, number: int) -> Iterator[tuple[str, Any]]:
        for _ in range(number):
            yield self._text(), self._value(self._take("I")[0])

    def _infos(self, number: int) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
        for _ in range(number):
            name, (rank,) = self._text(), self._take("I")
            *sizes, kind, _ = self._take(f"{rank}QIQ")
            yield name, (tuple(sizes), kind)

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def _text(self) -> str:
        (length,) = self._take("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._take(NUMBERS[kind])[0]
        kind, length = self._take("IQ")
        if kind == STRING:
            for _ in range(length):
                self._text()
        else:
            self.at += length * struct.calcsize(NUMBERS[kind])
        return None  # no size is an array
