"""A drafter's reduced draft vocabulary (the tokens that it can draft), and its own LM head.

    draft_ids.safetensors            next to z-lab's weights: ids int64 [Vd] ascending; head [Vd, D], if it has its own
    d2t int64 [Vd], t2d bool [V],    within the weights, in `speculators` and vLLM: target id = i + d2t[i]
    lm_head.weight [Vd, D]           there, and in a folder of 8 bits whose drafter has another width than its target

All ids are the target's token ids. Vd is the size of the draft vocabulary, V that of the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.errors import ModelFileError, reraised
from paceline.model.checkpoint import check_finite, read_tensors

log = logging.getLogger("paceline.draft")
DRAFT_IDS = "draft_ids.safetensors"
HEAD, OFFSETS, IS_DRAFTED = "lm_head.weight", "d2t", "t2d"
TARGETS_OWN = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Names of the target's tensors that some drafter files also contain; paceline does not read them."""


class Vocabulary(NamedTuple):
    """A drafter's draft vocabulary and LM head; by default all tokens, with the target's head."""

    ids: Tensor | None = None
    """Token ids that may be drafted, int64 [Vd], ascending; None: all tokens."""
    head_VD: Tensor | None = None
    """The drafter's own LM head [Vd, D], one row per id; None: the target's rows for these ids."""


ALL_TOKENS = Vocabulary()


def split(
    tensors: Mapping[str, Tensor], path: Path, vocab_size: int | None = None
) -> tuple[dict[str, Tensor], Vocabulary, dict[str, Tensor]]:
    """Splits the tensors of a drafter's file into (network tensors, draft vocabulary with LM head, unused tensors). The
    draft vocabulary, if any, is read from tensors `d2t` and `t2d` (see `as_tensors`). `vocab_size`: greatest length
    of `t2d`; None: any. Raises ModelFileError, which names `path`, if they and the LM head contradict each other."""
    special = (HEAD, OFFSETS, IS_DRAFTED, *TARGETS_OWN)
    network = {name: tensor for name, tensor in tensors.items() if name not in special}
    others = {name: tensors[name] for name in TARGETS_OWN if name in tensors}
    ids, head_VD = _ids(tensors.get(OFFSETS), tensors.get(IS_DRAFTED), path), tensors.get(HEAD)
    if IS_DRAFTED in tensors and vocab_size is not None and len(tensors[IS_DRAFTED]) > vocab_size:
        _check_shape(IS_DRAFTED, tensors[IS_DRAFTED], (vocab_size,), path)
    if head_VD is not None and ids is not None and head_VD.ndim and len(head_VD) > max(int(ids[-1]), len(ids)):
        head_VD = head_VD[ids]
    return network, with_head(Vocabulary(ids), head_VD, path), others


def _ids(offsets: Tensor | None, is_drafted: Tensor | None, path: Path) -> Tensor | None:
    for name, tensor in ((OFFSETS, offsets), (IS_DRAFTED, is_drafted)):
        if tensor is not None and (tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex()):
            raise ModelFileError(f"{path}: {name} must be a list of whole numbers: fetch the drafter again")
    by_mask = None if is_drafted is None else is_drafted.bool().nonzero().flatten()
    if offsets is None:
        return None if by_mask is None else check_ids(by_mask, f"{path}: {IS_DRAFTED}", "fetch the drafter again")
    ids = torch.arange(len(offsets)) + offsets.long()
    if by_mask is not None and torch.equal(by_mask, offsets.long()) and not torch.equal(by_mask, ids):
        log.warning("%s: %s holds token ids in place of offsets, as %s tells: read as ids", path, OFFSETS, IS_DRAFTED)
        ids = by_mask
    if by_mask is not None and not torch.equal(by_mask, ids):
        raise ModelFileError(f"{path}: {OFFSETS} and {IS_DRAFTED} name other tokens: fetch the drafter again")
    return check_ids(ids, f"{path}: {OFFSETS}", "fetch the drafter again")


def as_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Returns a draft vocabulary (ascending token ids) as the tensors `d2t` and `t2d` of a drafter's file: row i of the
    drafter's head is token i + d2t[i]; t2d[token] is True if the token can be drafted."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    return {OFFSETS: ids - torch.arange(len(ids)), IS_DRAFTED: is_drafted}


def read_draft_ids(folder: Path) -> Vocabulary | None:
    """Returns the draft vocabulary, and LM head if there is one, in the folder's file `draft_ids.safetensors`; None
    without that file. Raises ModelFileError if it is damaged."""
    file = folder / DRAFT_IDS
    if not file.is_file():
        return None
    remedy = "delete it to draft over the whole vocabulary"
    with reraised(ModelFileError, f"{file} is damaged", remedy, SafetensorError, KeyError, OSError):
        stored = read_tensors(file)
        ids = check_ids(stored["ids"], str(file), remedy).long()
    return with_head(Vocabulary(ids), stored.get("head"), file, remedy)


def with_head(
    own: Vocabulary, head_VD: Tensor | None, file: Path, remedy: str = "fetch the drafter again"
) -> Vocabulary:
    """Returns the draft vocabulary `own` with the drafter's own LM head `head_VD` added; None: the drafter uses the
    target's. Raises ModelFileError unless the head is a finite matrix with one row per token of the draft vocabulary.
    For the error message: `file` is the file at fault, `remedy` states what the user can do."""
    if head_VD is None:
        return own
    if head_VD.ndim != 2:
        raise ModelFileError(f"{file}: the head of shape {list(head_VD.shape)} is no matrix: {remedy}")
    if own.ids is not None and len(head_VD) != len(own.ids):
        raise ModelFileError(f"{file}: the head has {len(head_VD)} rows for {len(own.ids)} tokens: {remedy}")
    check_finite(HEAD, head_VD, file)
    return own._replace(head_VD=head_VD)


def check_sizes(own: Vocabulary, vocab_size: int | None, hidden_size: int, path: Path) -> None:
    """Raises ModelFileError, naming `path`, if the draft vocabulary has a token beyond the target's vocabulary of
    `vocab_size` tokens (None: unknown size), or if the LM head is not [Vd, `hidden_size`]."""
    if own.ids is not None and vocab_size is not None and int(own.ids[-1]) >= vocab_size:
        raise ModelFileError(
            f"{path}: the draft vocabulary names token {int(own.ids[-1])} of {vocab_size}: fetch the drafter again"
        )
    if own.head_VD is not None:
        num_rows = len(own.head_VD) if own.ids is not None or vocab_size is None else vocab_size
        _check_shape(f"{HEAD} (in {DRAFT_IDS}: head)", own.head_VD, (num_rows, hidden_size), path)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], path: Path) -> None:
    if tuple(tensor.shape) != expected:
        raise ModelFileError(
            f"{path}: tensor {name} has shape {tuple(tensor.shape)}, the config asks for {expected}: config and "
            "weights are of different drafters"
        )


def rows_of_tokens(ids: Tensor | None, mask_token_id: int, vocab_size: int) -> Tensor:
    """Returns the row of each token of the target's vocabulary in the drafter's own LM head, [V]; for a token without a
    row, that of the mask token. Used by drafters that also embed tokens with the rows of their head.

    `ids`: token ids of the head's rows, `mask_token_id` among them; None: the head has all tokens.
    """
    if ids is None:
        return torch.arange(vocab_size)
    rows_V = torch.full((vocab_size,), int(torch.searchsorted(ids.cpu(), mask_token_id)))
    rows_V[ids.cpu()] = torch.arange(len(ids))
    return rows_V


def check_ids(ids: Tensor, what: str, remedy: str) -> Tensor:
    """Returns `ids` unchanged if they are valid token ids of a draft vocabulary: a non-empty 1-D tensor of ascending
    integers, none negative. Otherwise raises ModelFileError. `what`: beginning of the message, which names the tensor.
    `remedy`: its end, which states what the user can do."""
    is_whole = not (ids.is_floating_point() or ids.is_complex())
    if not is_whole or ids.ndim != 1 or not len(ids) or int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelFileError(f"{what}: token ids must ascend: {remedy}")
    return ids
