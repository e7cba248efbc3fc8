"""N-gram drafter (prompt lookup): what followed the last time the text went like this, in prompt or answer.

No model: hash maps from the last n tokens to where they last stood, kept up token by token. The longest n that is found
wins. How likely its drafts are to stand follows from how far back the match reaches and how this sequence's drafts fared:

    chance = distrusted + (trusted - distrusted) * trust      MATCH_CLASSES, by how many tokens match
    trust: share of drafts accepted, fading by 0.85 a round, 0.8 at first

How many are checked is the planner's choice (`paceline/plan.py`). Everything is kept per row: a text does not depend on its
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.draft.base import Drafter, Observed
from paceline.errors import ConfigError, refuse
from paceline.types import LOOKUP, Batch, DraftBlock, Sequence

MATCH_CLASSES = ((1, 0.12, 0.6), (2, 0.4, 0.9), (4, 0.55, 0.95), (16, 0.9, 0.98))
"""(least tokens that match, chance that a draft stands when none did lately, when all did)."""
MOST_DRAFTED = 16
_FADE, _FIRST_TRUST = 0.85, 0.8


@dataclass(slots=True)
class _Row:
    last: list[dict[tuple[int, ...], int]]
    """Per n: the last n tokens -> the position after where they last stood, the text's very end excepted."""
    num_indexed: int = 0
    trust: float = _FIRST_TRUST
    num_pending: int = 0
    """Drafts of the round under way."""


class NgramDrafter(Drafter):
    """Drafts the continuation of the longest earlier match; nothing when fewer than `min_match` tokens match."""

    name = LOOKUP
    is_at_hand = True

    def __init__(self, *, num_drafted: int | None = None, min_match: int = 1) -> None:
        """`num_drafted`: tokens of a continuation at most. Raises ConfigError when it is negative or min_match below 1."""
        self.num_drafted = MOST_DRAFTED if num_drafted is None else num_drafted
        refuse(
            ConfigError,
            (self.num_drafted < 0, f"num_drafted must be 0 or more, not {num_drafted}"),
            (min_match < 1, f"min_match must be at least 1, not {min_match}"),
        )
        self.min_match = min_match
        self._sizes = [size for size in (8, 5, 3, 2, 1) if size > min_match] + [min_match]
        self._rows: dict[int, _Row] = {}

    def start(self, seq: Sequence) -> None:
        self._rows[seq.row] = _Row([{} for _ in self._sizes])

    def drop(self, seq: Sequence) -> None:
        self._rows.pop(seq.row, None)

    def observe(self, observed: list[Observed]) -> None:
        for one in observed:
            row = self._rows[one.sequence.row]
            if row.num_pending:
                row.trust += (1 - _FADE) * ((one.count - 1) / row.num_pending - row.trust)
                row.num_pending = 0
            self._index(row, one.sequence.tokens, one.start + one.count)

    def chance(self, seq: Sequence) -> float:
        row = self._rows[seq.row]
        follower = self._find(row, seq.tokens)
        if follower is None:
            return 0.0
        reach = _reach(seq.tokens, follower)
        _, distrusted, trusted = next(kind for kind in reversed(MATCH_CLASSES) if kind[0] <= reach)
        return distrusted + (trusted - distrusted) * row.trust

    def propose(self, batch: Batch) -> DraftBlock:
        block = DraftBlock.certain([[] for _ in batch.sequences])
        for index, limit in enumerate(batch.draft_limits_B(self.num_drafted)):
            seq = batch.sequences[index]
            row = self._rows[seq.row]
            if limit and (follower := self._find(row, seq.tokens)) is not None:
                row.num_pending = limit
                block.tokens_B[index] = _continuation(seq.tokens, follower, limit)
        return block

    def _index(self, row: _Row, tokens: list[int], end: int) -> None:
        """Enter every n-gram whose last token stands before `end` and has a follower."""
        for position in range(row.num_indexed, min(end, len(tokens) - 1)):
            for size, last in zip(self._sizes, row.last, strict=True):
                if size <= position + 1:
                    last[tuple(tokens[position + 1 - size : position + 1])] = position + 1
        row.num_indexed = max(row.num_indexed, min(end, len(tokens) - 1))

    def _find(self, row: _Row, tokens: list[int]) -> int | None:
        """Where the text went on after the longest earlier occurrence of its own end."""
        for size, last in zip(self._sizes, row.last, strict=True):
            follower = last.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if follower is not None:
                return follower
        return None


def _reach(tokens: list[int], follower: int) -> int:
    """How many tokens before `follower` equal the text's end; looked at as far as the classes go."""
    most, length = min(MATCH_CLASSES[-1][0], follower), len(tokens)
    return next((back for back in range(most) if tokens[follower - 1 - back] != tokens[length - 1 - back]), most)


def _continuation(tokens: list[int], follower: int, count: int) -> list[int]:
    """What stood from `follower` on; where the text ends it goes on with the drafts themselves, as in a loop."""
    drafts = tokens[follower : follower + count]
    period = len(tokens) - follower
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts
