"""N-gram drafter (prompt lookup): drafts the tokens that followed an earlier occurrence of the text's last tokens.

A hash map leads from the last two tokens to the positions after their earlier occurrences in prompt or answer; the
longest match wins, the latest one on ties. The acceptance probability of a draft is estimated from the length of the
match and this sequence's history:

    chance = distrusted + (trusted - distrusted) * trust      MATCH_CLASSES, by the length of the match
    trust: share of drafts accepted, decayed by 0.85 per round, initially 0.8

The planner decides how many drafts are verified (`paceline/plan/planner.py`). All state is per row: outputs are
batch-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.draft.base import Drafter, Observed
from paceline.errors import ConfigError, refuse
from paceline.types import LOOKUP, Batch, DraftBlock, Sequence

MATCH_CLASSES = ((1, 0.12, 0.6), (2, 0.4, 0.9), (4, 0.55, 0.95), (16, 0.9, 0.98))
"""Estimates by length of the match: (minimum matching tokens, acceptance probability at trust 0, the same at trust
1)."""
MOST_REACH = MATCH_CLASSES[-1][0]
MOST_DRAFTED = 16
MOST_MATCHES = 64
"""Number of latest earlier occurrences that are compared with the end of the text."""
_FADE, _FIRST_TRUST = 0.85, 0.8


@dataclass(slots=True)
class _Row:
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """n-gram -> positions after its occurrences, without the one that ends the text."""
    num_indexed: int = 0
    trust: float = _FIRST_TRUST


class NgramDrafter(Drafter):
    """Drafts the tokens after the longest earlier match of the text's end. Drafts nothing if fewer than `min_match`
    tokens match."""

    name = LOOKUP
    is_instant = True

    def __init__(self, *, num_drafted: int | None = None, min_match: int = 1) -> None:
        """`num_drafted`: maximum tokens drafted per round. Raises ConfigError if it is negative, or if `min_match` is
        below 1."""
        self.num_drafted = MOST_DRAFTED if num_drafted is None else num_drafted
        refuse(
            ConfigError,
            (self.num_drafted < 0, f"num_drafted must be 0 or more, not {num_drafted}"),
            (min_match < 1, f"min_match must be at least 1, not {min_match}"),
        )
        self._sizes = (2, 1) if min_match == 1 else (min_match,)
        self._rows: dict[int, _Row] = {}
        self._pending: dict[int, int] = {}
        """Number of drafts in the current round, by row."""

    def start(self, seq: Sequence) -> None:
        self._rows[seq.row] = _Row()

    def drop(self, seq: Sequence) -> None:
        self._rows.pop(seq.row, None)
        self._pending.pop(seq.row, None)

    def observe(self, observed: list[Observed]) -> None:
        """Update each row's share of accepted drafts, by which the acceptance of its next drafts is estimated. Tokens
        are added to the n-gram index later, when the row drafts."""
        for one in observed if self._pending else ():
            if num_pending := self._pending.pop(one.sequence.row, 0):
                row = self._rows[one.sequence.row]
                row.trust += (1 - _FADE) * ((one.count - 1) / num_pending - row.trust)

    def chance(self, seq: Sequence) -> float:
        row = self._rows[seq.row]
        reach, _ = self._find(row, seq.tokens)
        if not reach:
            return 0.0
        _, distrusted, trusted = next(kind for kind in reversed(MATCH_CLASSES) if kind[0] <= reach)
        return distrusted + (trusted - distrusted) * row.trust

    def propose(self, batch: Batch) -> DraftBlock:
        block = DraftBlock.certain([[] for _ in batch.sequences])
        for index, limit in enumerate(batch.draft_limits_B(self.num_drafted)):
            seq = batch.sequences[index]
            row = self._rows[seq.row]
            reach, follower = self._find(row, seq.tokens) if limit else (0, 0)
            if reach:
                self._pending[seq.row] = limit
                block.tokens_B[index] = _continuation(seq.tokens, follower, limit)
        return block

    def _index(self, row: _Row, tokens: list[int]) -> None:
        """Index every n-gram that has a following token."""
        for follower in range(row.num_indexed + 1, len(tokens)):
            for size in self._sizes:
                if follower >= size:
                    row.followers.setdefault(tuple(tokens[follower - size : follower]), []).append(follower)
        row.num_indexed = len(tokens) - 1

    def _find(self, row: _Row, tokens: list[int]) -> tuple[int, int]:
        """(length of the best match, position after it), or (0, 0) if too few tokens match."""
        self._index(row, tokens)
        for size in self._sizes:
            followers = row.followers.get(tuple(tokens[-size:]), ())
            if followers:
                latest = followers[-MOST_MATCHES:] if size > 1 else followers[-1:]
                return max((_reach(tokens, follower), follower) for follower in latest)
        return 0, 0


def _reach(tokens: list[int], follower: int) -> int:
    """Number of tokens before `follower` that equal the end of the text, at most MOST_REACH."""
    most, length = min(MOST_REACH, follower), len(tokens)
    return next((back for back in range(most) if tokens[follower - 1 - back] != tokens[length - 1 - back]), most)


def _continuation(tokens: list[int], follower: int, count: int) -> list[int]:
    """The tokens from `follower` on; past the end of the text the drafts themselves continue it, as in a loop."""
    drafts = tokens[follower : follower + count]
    period = len(tokens) - follower
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts
