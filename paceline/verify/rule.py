"""What every verification rule shares: what it sees of a row, what it answers, and the random numbers it may use.

A rule is a pure function of tensors and tokens. The rules and the table of their names are in `lossless.py` and
`mocked.py`; `engine/judge.py` calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.rng import ACCEPT, RESIDUAL, SAMPLE, uniform
from paceline.types import Sequence


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


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What a rule sees of one row: its K drafts, and the target's distributions at the J = K+1 checked positions."""

    draft_tokens: list[int]
    draft_probs_KV: Tensor | None
    """What each draft was drawn from; None means the drafts are certain (a one-hot proposal)."""
    uniforms: Uniforms
    draw: Callable[[int], int]
    """The target's own token at a slot: the one that plain decoding with this seed takes there."""
    target_probs: Callable[[], Tensor]
    """Computes the target's distributions, [J, V]: row i where draft i stands, row K after all drafts."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to decide which drafts stand."""

    name: str
    verify: Callable[[CheckedRow], RowVerdict]
    lossless: bool
    """Whether the answers are distributed as plain decoding's, for any drafter. Every figure that a rule makes carries it."""
    needs_probs: bool
    """Whether it uses what the drafts were drawn from; a rule that does not takes all drafts as certain."""
