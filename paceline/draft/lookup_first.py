"""A drafter with n-gram lookup beside it: where the text repeats itself drafts cost nothing, elsewhere the drafter drafts.

Which of the two a sequence is given in a round is the engine's choice, by what each promises for its time
(`engine/draft_length.py`). Greedy requests only: a sampled one's drafts come with their distribution, of one kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.draft.base import Drafter, Observed
from paceline.draft.ngram import NgramDrafter
from paceline.types import Batch, DraftBlock, Sequence

if TYPE_CHECKING:
    from paceline.model.target import Target

MOST_FREE = 16
"""Drafts of a lookup at most."""
_MIN_MATCH = 2
"""One token that stood before says less than any drafter does."""


class LookupFirst(Drafter):
    """`drafter`, and lookups for the sequences that take them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self._lookup = drafter, NgramDrafter(num_drafted=MOST_FREE, min_match=_MIN_MATCH)
        self.name, self.num_drafted, self.tap_layers = drafter.name, drafter.num_drafted, drafter.tap_layers

    def bind(self, target: Target) -> None:
        self.drafter.bind(target)
        self.has_own_threads = self.drafter.has_own_threads

    def cache_bytes(self, target: Target) -> int:
        return self.drafter.cache_bytes(target)

    def start(self, seq: Sequence) -> None:
        self.drafter.start(seq)
        self._lookup.start(seq)

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        return self.drafter.adopt(seq, source, length)  # lookups index whatever comes before what they observe

    def free_chance(self, seq: Sequence) -> float:
        return self._lookup.free_chance(seq) if seq.params.is_greedy else 0.0

    def propose(self, batch: Batch) -> DraftBlock:
        others = [index for index, seq in enumerate(batch.sequences) if not seq.takes_free]
        if len(others) == len(batch):
            return self.drafter.propose(batch)
        pairs = zip(batch.sequences, batch.draft_limits_B(MOST_FREE), strict=True)
        block = DraftBlock.certain([self._lookup.continuation(seq, limit) if seq.takes_free else [] for seq, limit in pairs])
        if others:
            drafted = self.drafter.propose(Batch([batch.sequences[index] for index in others]))
            for index, tokens, probs in zip(others, drafted.tokens_B, drafted.probs_B, strict=True):
                block.tokens_B[index], block.probs_B[index] = tokens, probs
        return block

    def observe(self, observed: list[Observed]) -> None:
        self.drafter.observe(observed)
        self._lookup.observe(observed)

    def drop(self, seq: Sequence) -> None:
        self.drafter.drop(seq)
        self._lookup.drop(seq)
