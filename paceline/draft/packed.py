"""A drafter's weights in 8 bits, as the native pass multiplies them: half the bytes of a package or a download.

    model-q8_0.safetensors: NAME of a matrix -> uint8 [rows, 34 bytes for each 32 columns], ggml's Q8_0; other tensors stay

Other readers of the DFlash format do not know this file: `DFlashDrafter.from_folder(FOLDER).save(OTHER)` writes one that they
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ModelFileError, reraised
from paceline.model.blocks import BLOCK_SIZES, Blocks, quantise

PACKED = "model-q8_0.safetensors"
COLUMNS, BYTES = BLOCK_SIZES["Q8_0"]


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors as the file holds them; matrices whose rows are no whole blocks stay as they are."""
    rounded = {name: quantise(tensor, "Q8_0") for name, tensor in tensors.items()}
    return {name: each.data if isinstance(each, Blocks) else each for name, each in rounded.items()}


def read_packed(file: Path) -> dict[str, Tensor]:
    """All tensors of such a file, matrices as bfloat16, which rounds once more. Raises ModelFileError when it is damaged."""
    remedy = "fetch the drafter again"
    with reraised(ModelFileError, f"{file} is damaged", remedy, SafetensorError, OSError):
        stored = load_file(file)
    return {name: _unpacked(tensor, f"{file}: tensor {name!r}") for name, tensor in stored.items()}


def _unpacked(tensor: Tensor, what: str) -> Tensor:
    if tensor.dtype != torch.uint8:
        return tensor
    if tensor.dim() != 2 or tensor.shape[1] % BYTES:
        raise ModelFileError(f"{what} of shape {list(tensor.shape)} holds no whole blocks of Q8_0: fetch the drafter again")
    shape = tensor.shape[0], tensor.shape[1] // BYTES * COLUMNS
    return Blocks(tensor.contiguous(), shape, "Q8_0").dense().bfloat16()
