"""One step's input for an autoregressive drafter: one draft per row, or several tree nodes with their ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.model.torch.attention import AttentionPlan, CacheWriter


@dataclass(slots=True)
class Level:
    """Input of one drafting step: the draft-tree nodes of one depth, in several rows. Each node gets one cache entry,
    after the row's verified entries and those of earlier drafting steps."""

    rows: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    """Number of verified cache entries of each row."""
    before: list[int] = field(default_factory=list)
    """Number of cache entries of earlier steps' drafts, for each row."""
    seen: list[Sequence[Sequence[int]]] = field(default_factory=list)
    """For each row and new entry: indices of the row's draft entries that it attends to (its ancestors, then itself).
    Index 0 is the row's first draft."""

    def add(self, row: int, base: int, before: int, seen: Sequence[Sequence[int]]) -> None:
        self.rows.append(row)
        self.bases.append(base)
        self.before.append(before)
        self.seen.append(seen)

    @property
    def counts(self) -> list[int]:
        return [len(each) for each in self.seen]

    @property
    def starts(self) -> list[int]:
        """Cache index of the first new entry of each row."""
        return [base + before for base, before in zip(self.bases, self.before, strict=True)]

    @property
    def positions(self) -> list[int]:
        """RoPE position of each new entry, as a list over all rows: the number of its row's verified entries plus the
        number of its ancestors in the draft tree."""
        return [base + len(own) - 1 for base, seen in zip(self.bases, self.seen, strict=True) for own in seen]

    def writer(self, device: torch.device) -> CacheWriter:
        return CacheWriter(self.rows, self.starts, self.counts, device)

    def plan(self, group: int, dtype: torch.dtype, device: torch.device, window: int | None) -> AttentionPlan:
        """Returns the attention plan with which the new entries attend to their rows' caches. `window`: the layer's
        sliding window; None: full attention. `group`: query heads per key head."""
        kind: dict[str, Any] = {"group": group, "dtype": dtype, "device": device}
        chains = [[list(range(before + 1))] for before in self.before]
        if [[list(own) for own in seen] for seen in self.seen] == chains:
            return AttentionPlan(self.rows, self.starts, self.counts, window=window, **kind)
        return AttentionPlan.masked(
            self.rows, self.counts, [self._visible(index, window) for index in range(len(self.rows))], **kind
        )

    def _visible(self, index: int, window: int | None) -> Tensor:
        """Cache positions that each entry of a row attends to, bool [entries, positions]."""
        base, seen = self.bases[index], self.seen[index]
        visible = torch.zeros(len(seen), self.starts[index] + len(seen), dtype=torch.bool)
        for number, own in enumerate(seen):
            begin = 0 if window is None else max(0, base + len(own) - window)
            visible[number, begin:base] = True
            visible[number, [base + each for each in (own if window is None else own[-window:])]] = True
        return visible
