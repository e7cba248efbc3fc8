"""The drafter contract: guess the next tokens, learn from what was verified, forget what is done.

One drafter serves a whole batch; its per-sequence state is keyed by the sequence's cache row. The engine calls, in order:
`bind` once; then for each sequence `start`, `observe` (once per prefill chunk), and each round `propose` and `observe`; at
last `drop`. A drafter owns its cache and trims it itself: after `propose` it may hold entries for drafted positions, and
the next `propose` must not see them unless they were verified.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from paceline.model.target import Target
from paceline.types import Batch, DraftBlock, Sequence


@dataclass(slots=True)
class Observed:
    """Positions [start, start + count) of one sequence that the target has just verified and cached."""

    sequence: Sequence
    start: int
    count: int
    taps_TF: Tensor | None
    """The target's hidden states at `tap_layers`, concatenated in that order, of the pass that these positions were in; valid
    during the call, and longer where the target does not overwrite them."""
    begin: int = 0
    """The first of `taps_TF` that is of this sequence."""

    @property
    def taps_NF(self) -> Tensor | None:
        """Those of `taps_TF` that are of these positions."""
        return None if self.taps_TF is None else self.taps_TF[self.begin : self.begin + self.count]


class Drafter(ABC):
    """Base of all drafters. Implementations are one file each and are named in `draft/registry.py`."""

    name: str = ""
    source: str = ""
    """What it was made from: a name that `draft/registry.py` knows, a folder, a hub id."""
    num_drafted: int = 0
    """The most tokens drafted per round (block_size - 1)."""
    is_at_hand: bool = False
    """Whether its drafts cost next to nothing to make, and it can tell beforehand how likely they are to stand (`chance`)."""
    is_stepwise: bool = False
    """Whether each draft takes a step of its own, so that drafting takes longer the more is drafted."""
    has_own_threads: bool = True
    """Whether it has nothing to compute that PyTorch's threads would be worth having for."""
    tap_layers: tuple[int, ...] = ()
    """Target layers whose outputs `observe` needs; layer l is Transformers' hidden_states[l + 1]."""

    def bind(self, target: Target) -> None:
        """Check that this drafter fits the target and allocate caches of `target.cache.num_rows` rows.

        Raises DrafterMismatchError naming both values when hidden size, vocabulary or layer ids differ.
        """

    def cache_bytes(self, target: Target) -> int:
        """Bytes of cache this drafter adds to the KV budget for a target."""
        return 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that this drafter holds beside the target's, packed copies included once it is bound."""
        return 0

    def keep_weights(self) -> None:
        """Read what still lies in files: those may change from now on."""

    def record(self) -> None:
        """Record passes of fixed shape, where the device replays such; `bind` came before. Takes seconds on CUDA."""

    def start(self, seq: Sequence) -> None:
        """A sequence was admitted to `seq.row`; forget whatever that row held."""

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """How many of the first `length` positions of row `source`, whose tokens are those of `seq`, this drafter can take over
        for `seq`, which was just started: it will observe only what comes behind them. `source` may be a sequence's that is
        running, or that was dropped and whose row no other has been given since; or `seq.row` itself."""
        return 0 if self.tap_layers else length

    def can_draft(self, seq: Sequence) -> bool:
        """Whether it knows all of the sequence that it needs: one that it did not observe from its beginning it may not."""
        return True

    def chance(self, seq: Sequence) -> float:
        """Of a drafter with drafts at hand: the chance that each stands if those before it do; 0.0 when it has none now."""
        return 0.0

    @abstractmethod
    def propose(self, batch: Batch) -> DraftBlock:
        """Guess up to `num_drafted` tokens after each sequence's anchor; never more than `batch.draft_limits_B`.

        Greedy requests and those with a seed get certain drafts: the text of a seed is plain decoding's, whatever is drafted.
        """

    def observe(self, observed: list[Observed]) -> None:
        """Learn newly verified positions; those of a round come for all sequences of the batch at once, batch order."""

    def drop(self, seq: Sequence) -> None:
        """The sequence is done; its row will be given to another."""


class NoDrafter(Drafter):
    """Plain decoding: drafts nothing."""

    name = "none"

    def propose(self, batch: Batch) -> DraftBlock:
        return DraftBlock.certain([[] for _ in batch.sequences])
