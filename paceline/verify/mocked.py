"""Mocked acceptance: a given number of drafts stands per round, whatever the target says.

For measuring speed at an acceptance that no drafter has yet. The text is not the target's, so nothing made this way is
lossless.
"""

from __future__ import annotations

import math

from paceline.errors import ConfigError
from paceline.verify.rule import CheckedRow, RowVerdict, Rule

MOCKED = "mocked"
"""Name of the rule that is made here."""


def mocked(tokens_per_round: float) -> Rule:
    """Accepts `tokens_per_round` - 1 drafts on average, never more than were drafted. Raises ConfigError below 1."""
    if not (math.isfinite(tokens_per_round) and tokens_per_round >= 1):
        raise ConfigError(f"tokens_per_round counts the bonus token, give at least 1 (got {tokens_per_round})")

    def verify(row: CheckedRow) -> RowVerdict:
        num_accepted = min(len(row.draft_tokens), _num_tokens(row.uniforms.anchor_position, tokens_per_round) - 1)
        return RowVerdict(num_accepted, row.draw(num_accepted))

    return Rule(MOCKED, verify, lossless=False, needs_probs=False)


def _num_tokens(anchor_position: int, tokens_per_round: float) -> int:
    # Error diffusion without state: round n of an ideal sequence covers positions floor(n t) up to floor((n + 1) t);
    # find n from the position. A sequence that starts in the middle of a round stays that far behind.
    round_index = math.ceil((anchor_position + 1) / tokens_per_round) - 1
    return math.floor((round_index + 1) * tokens_per_round) - math.floor(round_index * tokens_per_round)
