"""A drafter's own vocabulary and head: which tokens it drafts among, and rows of a head of its own.

    draft_ids.safetensors            beside z-lab's weights: ids int64 [Vd] ascending; head [Vd, D], if it has one of its own
    d2t int64 [Vd], t2d bool [V],    within the weights, as `speculators` and vLLM have it: target id = i + d2t[i]
    lm_head.weight [Vd, D]

All ids are the target's.
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
from paceline.model.checkpoint import read_tensors

log = logging.getLogger("paceline.draft")
DRAFT_IDS = "draft_ids.safetensors"
HEAD, OFFSETS, IS_DRAFTED = "lm_head.weight", "d2t", "t2d"
TARGETS_OWN = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that some files hold beside a drafter's, and that are the target's: nothing reads them here."""


class Vocabulary(NamedTuple):
    """Of a drafter; all None where it drafts among all of the target's tokens with the target's head."""

    ids: Tensor | None = None
    """The tokens it drafts among, int64, ascending; None: all."""
    head_VD: Tensor | None = None
    """Its own head, a row for each of them; None: the target's rows."""


ALL_TOKENS = Vocabulary()


def split(tensors: Mapping[str, Tensor], path: Path) -> tuple[dict[str, Tensor], Vocabulary, dict[str, Tensor]]:
    """A file's tensors apart: the network's, its vocabulary, and those that nothing here reads. Raises ModelFileError for a
    vocabulary that contradicts itself."""
    special = (HEAD, OFFSETS, IS_DRAFTED, *TARGETS_OWN)
    network = {name: tensor for name, tensor in tensors.items() if name not in special}
    others = {name: tensors[name] for name in TARGETS_OWN if name in tensors}
    ids, head_VD = _ids(tensors.get(OFFSETS), tensors.get(IS_DRAFTED), path), tensors.get(HEAD)
    if head_VD is not None and ids is not None and len(head_VD) != len(ids):
        if len(head_VD) <= int(ids[-1]):
            raise ModelFileError(f"{path}: {HEAD} has {len(head_VD)} rows for {len(ids)} draft tokens: fetch the drafter again")
        head_VD = head_VD[ids]
    return network, Vocabulary(ids, head_VD), others


def _ids(offsets: Tensor | None, is_drafted: Tensor | None, path: Path) -> Tensor | None:
    by_mask = None if is_drafted is None else is_drafted.bool().nonzero().flatten()
    if offsets is None:
        return by_mask
    ids = torch.arange(len(offsets)) + offsets.long()
    if by_mask is not None and torch.equal(by_mask, offsets.long()) and not torch.equal(by_mask, ids):
        log.warning("%s: %s holds token ids in place of offsets, as %s tells: read as ids", path, OFFSETS, IS_DRAFTED)
        ids = by_mask
    if by_mask is not None and not torch.equal(by_mask, ids):
        raise ModelFileError(f"{path}: {OFFSETS} and {IS_DRAFTED} name other tokens: fetch the drafter again")
    return check_ids(ids, f"{path}: {OFFSETS}", "fetch the drafter again")


def as_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """A draft vocabulary as `d2t` and `t2d`."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    return {OFFSETS: ids - torch.arange(len(ids)), IS_DRAFTED: is_drafted}


def read_beside(folder: Path) -> Vocabulary | None:
    """That of `draft_ids.safetensors`, or None. Raises ModelFileError on a damaged file."""
    file = folder / DRAFT_IDS
    if not file.is_file():
        return None
    remedy = "delete it to draft over the whole vocabulary"
    with reraised(ModelFileError, f"{file} is damaged", remedy, SafetensorError, KeyError, OSError):
        stored = read_tensors(file)
        ids = stored["ids"].long()
    check_ids(ids, str(file), remedy)
    head_VD = stored.get("head")
    if head_VD is not None and len(head_VD) != len(ids):
        raise ModelFileError(f"{file}: the head has {len(head_VD)} rows for {len(ids)} tokens: {remedy}")
    return Vocabulary(ids, head_VD)


def check_ids(ids: Tensor, what: str, remedy: str) -> Tensor:
    """Raises ModelFileError unless they are ids that ascend."""
    if ids.ndim != 1 or not len(ids) or int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all()):
        raise ModelFileError(f"{what}: token ids must ascend: {remedy}")
    return ids
