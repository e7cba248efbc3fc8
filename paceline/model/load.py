"""Which implementation stands behind a model's name: our decoder where it knows the architecture, else Transformers."""

from __future__ import annotations

import ctypes
import sys
from typing import Literal

import torch

from paceline.errors import UnsupportedModelError
from paceline.hub import resolve
from paceline.model.decoder import Decoder
from paceline.model.loading import check_tensors, load_config, load_tensors, random_tensors
from paceline.model.target import Target


def load_target(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    num_rows: int = 1,
    max_len: int | None = None,
    weights: Literal["checkpoint", "random"] = "checkpoint",
) -> Target:
    """A ready target for a built-in name, a folder, a GGUF file or a hub id.

    `max_len` defaults to the model's own limit or 2048, the smaller. `weights="random"` reads only the config.
    Raises ModelNotFoundError, ModelFileError, UnsupportedModelError, DownloadError or CacheError.
    """
    path = resolve(name)
    try:
        config = load_config(path)
    except UnsupportedModelError:
        if path.is_file():
            raise
        from paceline.model.hf import HFTarget  # only here: importing Transformers takes seconds

        return HFTarget.from_path(path, dtype=dtype, device=device, num_rows=num_rows, max_len=max_len, weights=weights)
    tensors = random_tensors(config) if weights == "random" else check_tensors(config, load_tensors(path), path)
    decoder = Decoder(
        config,
        tensors,
        num_rows=num_rows,
        max_len=max_len or min(config.max_position, DEFAULT_MAX_LEN),
        dtype=dtype,
        device=device,
    )
    _return_freed_memory()
    return decoder


def _return_freed_memory() -> None:
    """Packing leaves holes in the heap, some 60 MB for the built-in model; glibc gives them back when asked."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


DEFAULT_MAX_LEN = 2048
"""Tokens of context a cache row holds when nobody says otherwise."""
