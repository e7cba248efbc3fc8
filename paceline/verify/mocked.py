"""Mocked acceptance: a given number of drafts stands per round, whatever the target says.

For measuring speed at an acceptance that no drafter has yet. The text is not the target's, so nothing made this way is
lossless.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.errors import ConfigError
from paceline.verify.rule import CheckedRow, RowVerdict, Rule, Uniforms

MOCKED = "mocked"
"""Name of the rule that it makes."""


class MockedAcceptance:
    """Accepts `tokens_per_round` - 1 drafts on average, or draws from a survival curve.

    Never more than were drafted. Raises ConfigError for fewer than 1 token per round and for curves that are empty, rise, or
    leave [0, 1].
    """

    def __init__(self, tokens_per_round: float) -> None:
        if not (math.isfinite(tokens_per_round) and tokens_per_round >= 1):
            raise ConfigError(f"tokens_per_round counts the bonus token, give at least 1 (got {tokens_per_round})")
        self.tokens_per_round = tokens_per_round
        self.survival: tuple[float, ...] | None = None

    @classmethod
    def from_survival(cls, survival: Iterable[float]) -> MockedAcceptance:
        """`survival[i - 1]` is the share of rounds whose first i drafts all stood."""
        survival = tuple(survival)
        falls = all(later <= sooner for sooner, later in zip((1.0, *survival), survival, strict=False))
        if not survival or not falls or not all(0 <= share <= 1 for share in survival):
            raise ConfigError(f"a survival curve is not empty, stays within [0, 1] and never rises (got {list(survival)})")
        mocked = cls(1.0 + math.fsum(survival))
        mocked.survival = survival
        return mocked

    def num_accepted(self, num_drafted: int, uniforms: Uniforms) -> int:
        """Drafts of this round that stand, at most `num_drafted`."""
        if self.survival is not None:
            draw = uniforms.mock()
            return min(num_drafted, sum(draw < share for share in self.survival))
        return min(num_drafted, self._num_tokens(uniforms.anchor_position) - 1)

    def _num_tokens(self, anchor_position: int) -> int:
        # Error diffusion without state: round n of an ideal sequence covers positions floor(n t) up to floor((n + 1) t);
        # find n from the position. A sequence that starts in the middle of a round stays that far behind.
        round_index = math.ceil((anchor_position + 1) / self.tokens_per_round) - 1
        return math.floor((round_index + 1) * self.tokens_per_round) - math.floor(round_index * self.tokens_per_round)

    @property
    def rule(self) -> Rule:
        return Rule(MOCKED, self._verify, lossless=False, needs_probs=False)

    def _verify(self, row: CheckedRow) -> RowVerdict:
        num_accepted = self.num_accepted(len(row.draft_tokens), row.uniforms)
        return RowVerdict(num_accepted, row.draw(num_accepted))
