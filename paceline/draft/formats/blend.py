"""Interpolates the weights of two drafters of one shape: before and after further training.

    blended(before, trained, 0.75, out)    weights 75 % of the way to `trained`

Training on one kind of text forgets some of the others. Between old and new weights the gain comes early and the loss
late, so an interpolation keeps most of the gain with little of the loss (Wortsman et al. 2109.01903, section 3).
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.draft.dflash.checkpoint import read_stored, write_checkpoint
from paceline.errors import DrafterMismatchError


def blended(before: Path, trained: Path, share: float, out: Path) -> None:
    """Interpolates between the weights of two drafters, in the folders `before` and `trained`: writes a drafter with
    the weights (1 - share) * before + share * trained into the folder `out`. Its data type, config, draft vocabulary
    and LM head are those of `trained`.

    Raises DrafterMismatchError if the drafters differ in config or tensor shapes, CacheError if `out` cannot be
    written, UnsupportedModelError or ModelFileError if a drafter cannot be read.
    """
    old, new = read_stored(before), read_stored(trained)
    shapes = [{name: tensor.shape for name, tensor in each.tensors.items()} for each in (old, new)]
    if old.config != new.config or shapes[0] != shapes[1]:
        raise DrafterMismatchError(
            f"{before} and {trained} differ in more than their weights: there is nothing between them"
        )
    tensors = {
        name: torch.lerp(old.tensors[name].float(), tensor.float(), share).to(tensor.dtype)
        for name, tensor in new.tensors.items()
    }
    ids, head_VD = new.vocabulary
    write_checkpoint(out, new.config.raw, tensors, ids, head_VD=head_VD)
