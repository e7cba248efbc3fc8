"""Stores a drafter's weights in 8 bits (Q8_0, as the native pass uses them): half the bytes to package or download.

    model-q8_0.safetensors:
        NAME of a matrix                     uint8 [rows, 34 bytes for each 32 columns], ggml's Q8_0
        NAME of another tensor               unchanged
        candidate_selector.*_codebook        only the rows of tokens in codebook_ids, if that tensor exists
        candidate_selector.codebook_ids      int32, ascending
        lm_head.weight                       head of a drafter of another width than its target: one row per draft token

Codebooks of a DFlash 2 selector have a row per target token. Candidates come from the draft vocabulary and only a
round's last verified token can be outside it, so the file stores the rows of the draft vocabulary alone. When read,
other tokens get zero rows: after such a token the selector does not change the first draft's scores.

Other programs cannot read this file: `read_drafter(FOLDER).save(OTHER)` writes a readable one with full codebooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.draft.vocabulary import check_ids
from paceline.errors import ModelFileError, reraised
from paceline.model.checkpoint import read_tensors
from paceline.model.gguf.blocks import BLOCK_SIZES, Blocks, quantise

PACKED = "model-q8_0.safetensors"
BOOK_IDS = "candidate_selector.codebook_ids"
COLUMNS, BYTES = BLOCK_SIZES["Q8_0"]
"""Number of columns in one block of Q8_0, and its bytes."""
AGAIN = "fetch the drafter again"


def packed(tensors: Mapping[str, Tensor], draft_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Converts a network's tensors to those of the file `model-q8_0.safetensors`. Matrices become Q8_0 blocks of 32
    columns; a matrix whose columns are not a multiple of 32 stays unchanged. `draft_ids`: keep only these tokens' rows
    of the DFlash 2 selector's codebooks, int64, ascending; None: all rows."""
    trimmed = tensors if draft_ids is None else without_rows(tensors, draft_ids)
    rounded = {name: quantise(tensor, "Q8_0") for name, tensor in trimmed.items()}
    return {name: each.data if isinstance(each, Blocks) else each for name, each in rounded.items()}


def without_rows(tensors: Mapping[str, Tensor], draft_ids: Tensor) -> dict[str, Tensor]:
    """Returns a drafter's tensors with smaller codebooks: a DFlash 2 selector's codebooks keep only the rows for the
    tokens `draft_ids`. Returns the tensors unchanged if they have no codebooks, or if rows were removed before.
    Matrices may be packed (Q8_0)."""
    if BOOK_IDS in tensors or not any(map(_is_book, tensors)):
        return dict(tensors)
    ids = draft_ids.cpu()
    trimmed = {name: tensor[ids].contiguous() if _is_book(name) else tensor for name, tensor in tensors.items()}
    return trimmed | {BOOK_IDS: ids.to(torch.int32)}


def read_packed(file: Path, vocab_size: int | None = None) -> dict[str, Tensor]:
    """Reads all tensors of a drafter's packed file. Q8_0 matrices are converted to bfloat16, which rounds them again.

    If the file has codebook rows for some tokens only, other tokens get rows of zeros; this needs the size of the
    target's vocabulary, `vocab_size`. Raises ModelFileError if the file is damaged, or if a needed `vocab_size` is
    missing or too small.
    """
    with reraised(ModelFileError, f"{file} is damaged", AGAIN, SafetensorError, OSError):
        stored = read_tensors(file)
    tensors = {name: _unpacked(tensor, f"{file}: tensor {name!r}") for name, tensor in stored.items()}
    ids = tensors.pop(BOOK_IDS, None)
    if ids is None:
        return tensors
    check_ids(ids, f"{file}: {BOOK_IDS}", AGAIN)
    if vocab_size is None or int(ids[-1]) >= vocab_size:
        raise ModelFileError(f"{file}: {BOOK_IDS} names token {int(ids[-1])} of {vocab_size or 0}: {AGAIN}")
    books = {name: _with_rows(tensor, ids, vocab_size, file) for name, tensor in tensors.items() if _is_book(name)}
    return tensors | books


def _with_rows(book_VR: Tensor, ids: Tensor, vocab_size: int, file: Path) -> Tensor:
    """Expand a codebook to [vocab_size, rank], with zeros for the dropped rows."""
    if book_VR.ndim != 2 or len(book_VR) != len(ids):
        raise ModelFileError(f"{file}: a codebook has shape {list(book_VR.shape)} for {len(ids)} tokens: {AGAIN}")
    full_VR = book_VR.new_zeros(vocab_size, book_VR.shape[1])
    full_VR[ids.long()] = book_VR
    return full_VR


def _is_book(name: str) -> bool:
    """True for a codebook's tensor, under either of its names (`draft/dflash2/drafter.py`)."""
    return name.removesuffix(".weight").endswith("_codebook")


def _unpacked(tensor: Tensor, what: str) -> Tensor:
    if tensor.dtype != torch.uint8:
        return tensor
    if tensor.dim() != 2 or tensor.shape[1] % BYTES:
        raise ModelFileError(f"{what} of shape {list(tensor.shape)} holds no whole blocks of Q8_0: {AGAIN}")
    shape = tensor.shape[0], tensor.shape[1] // BYTES * COLUMNS
    return Blocks(tensor.contiguous(), shape, "Q8_0").dense().bfloat16()
