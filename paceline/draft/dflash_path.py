"""What DFlash's decode paths have in common: what they are made of, and what they do for the drafter in `dflash.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from paceline.draft.checkpoint import DFlashConfig
from paceline.model.kv_cache import KVCache

Drafts = tuple[list[list[int]], Tensor | None]


class Network(Protocol):
    """What a path is made of: a DFlashNetwork's config and weights."""

    @property
    def config(self) -> DFlashConfig: ...

    def state_dict(self) -> Mapping[str, Tensor]: ...


class DraftPath(Protocol):
    """The network made for decoding with one target, and the keys and values of the target's rows."""

    @property
    def cache(self) -> KVCache:
        """What was injected, by the target's rows."""
        ...

    def inject(self, rows: list[int], starts: list[int], counts: list[int], taps_TF: Tensor) -> None:
        """Append the keys and values that every layer makes of newly verified positions: the first sum(counts) of `taps_TF`."""
        ...

    def draft(self, rows: list[int], anchors: list[int], width: int, size: int, with_logits: bool) -> Drafts:
        """The most likely token of the first `width` drafts of each row, counted in the draft vocabulary, and their logits
        [B, width, V] as the head gives them; each block of `size` slots stands right behind its row's context and is dead
        afterwards."""
        ...
