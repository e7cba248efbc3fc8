"""Weights between two drafters of one shape: a drafter that was trained on, and what it was before.

    blended(before, trained, 0.75, out)    three quarters of the way

Training on one kind of text forgets some of the others. On the way from the old weights to the new ones the gain comes early
and the loss late, so a part of the way keeps most of the one without much of the other (Wortsman et al. 2109.01903, section 3).
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.draft.dflash.checkpoint import read_checkpoint, read_stored, write_checkpoint
from paceline.errors import DrafterMismatchError


def blended(before: Path, trained: Path, share: float, out: Path) -> None:
    """Write a drafter with the weights (1 - share) x before + share x trained, in the dtype of `trained`, with its config and
    the tokens it drafts among, which may have become more: a drafter has no weights for them.

    Raises DrafterMismatchError when the two differ in more than weights, CacheError when `out` cannot be written, and what
    reading a checkpoint raises.
    """
    stored = read_stored(trained)
    (config_of_old, old), (config, new) = read_checkpoint(before), (stored.config, stored.tensors)
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (old, new)]
    if config_of_old != config or shapes[0] != shapes[1]:
        raise DrafterMismatchError(f"{before} and {trained} differ in more than their weights: there is nothing between them")
    tensors = {name: torch.lerp(old[name].float(), tensor.float(), share).to(tensor.dtype) for name, tensor in new.items()}
    ids, head_VD = stored.vocabulary
    write_checkpoint(out, config.raw, tensors, ids, head_VD=head_VD)
