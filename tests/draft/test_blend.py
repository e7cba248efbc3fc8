"""Weights between two drafters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.draft.dflash.checkpoint import read_draft_ids, read_stored, write_checkpoint
from paceline.draft.dflash.config import new_config
from paceline.draft.formats.blend import blended
from paceline.errors import DrafterMismatchError


def drafter(folder: Path, value: float, ids: tuple[int, ...] | None = (1, 4), hidden: int = 32) -> Path:
    tensors = {
        "layers.0.weight": torch.full((4, hidden), value, dtype=torch.bfloat16),
        "norm.weight": torch.full((3,), -value),
    }
    raw = new_config(hidden, 258, 2, num_layers=1, num_taps=1, head_dim=8, intermediate_size=48, block_size=4)
    write_checkpoint(folder, raw, tensors, None if ids is None else torch.tensor(ids))
    return folder


def test_a_share_of_the_way(tmp_path: Path) -> None:
    old, new, out = drafter(tmp_path / "old", 1.0), drafter(tmp_path / "new", 3.0), tmp_path / "out"
    for share, value in ((0.75, 2.5), (0.5, 2.0), (1.0, 3.0)):  # into a folder that exists, too
        blended(old, new, share, out)
        tensors = read_stored(out).tensors
        assert read_stored(out).config == read_stored(new).config
        assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16", "torch.float32"}
        assert bool((tensors["layers.0.weight"] == value).all()) and bool((tensors["norm.weight"] == -value).all())
        assert (ids := read_draft_ids(out)) is not None and ids.tolist() == [1, 4]


@pytest.mark.parametrize("ids", [(4,), None])
def test_what_was_trained_may_draft_among_more(tmp_path: Path, ids: tuple[int, ...] | None) -> None:
    """The head is the target's: no weight belongs to a token."""
    blended(drafter(tmp_path / "old", 1.0, ids), drafter(tmp_path / "new", 3.0), 0.5, tmp_path / "out")
    assert (draft_ids := read_draft_ids(tmp_path / "out")) is not None and draft_ids.tolist() == [1, 4]


def test_others_have_nothing_between_them(tmp_path: Path) -> None:
    old, new = drafter(tmp_path / "old", 1.0, hidden=64), drafter(tmp_path / "new", 3.0)
    with pytest.raises(DrafterMismatchError, match="differ in more than their weights"):
        blended(old, new, 0.5, tmp_path / "out")
    assert not (tmp_path / "out").exists()
