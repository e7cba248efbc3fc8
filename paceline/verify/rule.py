"""What every verification rule shares: its signature, its verdict, and the uniform numbers it may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.rng import ACCEPT, MOCK, RESIDUAL, SAMPLE, uniform
from paceline.types import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class RowVerdict(NamedTuple):
    """How many drafts of a row stand, and the target's token after them (not counted as accepted)."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The numbers in [0, 1) one row may use in one round; `paceline.rng` says why they are keyed as they are."""

    seed: int
    anchor_position: int
    """Place of the last committed token in prompt + answer: `len(seq.tokens) - 1`."""

    @classmethod
    def of(cls, seq: Sequence) -> Uniforms:
        return cls(seq.seed, len(seq.tokens) - 1)

    def sample(self, slot: int) -> float:
        """Draws the target's token at slot's absolute position: plain decoding uses the same number there."""
        return uniform(self.seed, SAMPLE, self.anchor_position + slot + 1)

    def accept(self, slot: int) -> float:
        """Decides on draft number `slot`."""
        return uniform(self.seed, ACCEPT, self.anchor_position, slot)

    def residual(self, slot: int) -> float:
        """Draws the token that replaces draft number `slot`."""
        return uniform(self.seed, RESIDUAL, self.anchor_position, slot)

    def mock(self) -> float:
        """Draws a mocked number of accepted drafts."""
        return uniform(self.seed, MOCK, self.anchor_position)


Rule = Callable[[list[int], "Tensor | None", "Tensor", Uniforms], RowVerdict]
"""`rule(draft_tokens, draft_probs_KV, target_probs_JV, uniforms)` for one row, J = len(draft_tokens) + 1.

Row i of `target_probs_JV` is the target's distribution where draft i stands, row K the one after all drafts. Row i of
`draft_probs_KV` is what draft i was sampled from; None means the drafts are certain (a one-hot proposal)."""
