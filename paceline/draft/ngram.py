"""N-gram drafter (prompt lookup): what followed the last time the text went like this, in prompt or answer.

No model: hash maps from the last n tokens to where they last stood, kept up token by token. The longest n that is found
wins. How much is drafted follows from how far back the match reaches and how this sequence's drafts fared lately:

    a = distrusted + (trusted - distrusted) * trust      chance that a draft stands, from MATCH_CLASSES by the match's reach
    trust: share of drafts accepted, fading by 0.85 a round, 0.8 at first
    draft the K that maximises (B + a + a^2 + ... + a^K) / (cost of a pass over B + K positions), B rows running

So copying soon drafts as much as is allowed, and text that only seems to repeat itself costs one spare position a round.
The figures come from replayed texts (docs/LOG.md). Everything is kept per row: a text does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from paceline.draft.base import Drafter, Observed
from paceline.errors import ConfigError
from paceline.types import Batch, DraftBlock, Sequence

MATCH_CLASSES = ((1, 0.12, 0.6), (2, 0.4, 0.9), (4, 0.55, 0.95), (16, 0.9, 0.98))
"""(least tokens that match, chance that a draft stands when none did lately, when all did)."""
PASS_COSTS = ((1, 1.0), (4, 1.08), (8, 1.22), (16, 1.5))
"""Cost of a target pass over so many positions, in one-token passes: the 135M model on two CPU cores."""
_FADE, _FIRST_TRUST = 0.85, 0.8


@dataclass(slots=True)
class _Row:
    """Index and record of one sequence."""

    last: list[dict[tuple[int, ...], int]]
    """Per n: the last n tokens -> the position after where they last stood, the text's very end excepted."""
    num_indexed: int = 0
    trust: float = _FIRST_TRUST
    follower: int | None = None
    """Where the text went on after the match that was found last."""
    num_pending: int = 0
    """Drafts of the round under way."""


class NgramDrafter(Drafter):
    """Drafts the continuation of the longest earlier match; nothing when fewer than `min_match` tokens match."""

    name = "ngram"
    chooses_length = True

    def __init__(
        self,
        *,
        num_drafted: int | None = None,
        min_match: int = 1,
        pass_costs: tuple[tuple[int, float], ...] = PASS_COSTS,
    ) -> None:
        """`pass_costs`: (positions, cost) points of the target pass, ascending, cost 1.0 at one position.

        Raises ConfigError on a negative num_drafted or a min_match below 1.
        """
        self.num_drafted = 16 if num_drafted is None else num_drafted
        if self.num_drafted < 0 or min_match < 1:
            raise ConfigError(f"ngram needs num_drafted >= 0 and min_match >= 1 (got {num_drafted}, {min_match})")
        self.min_match = min_match
        self._sizes = [size for size in (8, 5, 3, 2, 1) if size > min_match] + [min_match]
        self._cost_of: Callable[[int], float] = partial(_cost, pass_costs)
        self._rows: dict[int, _Row] = {}

    def learn_costs(self, seconds_of: Callable[[int], float]) -> None:
        self._cost_of = seconds_of

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

    def propose(self, batch: Batch) -> DraftBlock:
        limits = batch.draft_limits_B(self.num_drafted)
        pairs = zip(batch.sequences, limits, strict=True)
        return DraftBlock.certain([self._draft(seq, limit, len(batch)) for seq, limit in pairs])

    def _draft(self, seq: Sequence, limit: int, num_rows: int) -> list[int]:
        chance = self.free_chance(seq) if limit > 0 else 0.0
        return self.continuation(seq, self._best_count(chance, limit, num_rows)) if chance else []

    def free_chance(self, seq: Sequence) -> float:
        row = self._rows[seq.row]
        row.follower = self._find(row, seq.tokens)
        return 0.0 if row.follower is None else _acceptance(_reach(seq.tokens, row.follower), row.trust)

    def continuation(self, seq: Sequence, count: int) -> list[int]:
        """So many tokens of what followed the match that `free_chance` has found in this round."""
        row = self._rows[seq.row]
        assert row.follower is not None
        row.num_pending = count
        return _continuation(seq.tokens, row.follower, count)

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

    def _best_count(self, acceptance: float, limit: int, num_rows: int) -> int:
        best, best_rate = 0, num_rows / self._cost_of(num_rows)
        expected, survival = float(num_rows), 1.0
        for count in range(1, limit + 1):
            survival *= acceptance
            expected += survival
            if (rate := expected / self._cost_of(num_rows + count)) > best_rate:
                best, best_rate = count, rate
        return best


def _reach(tokens: list[int], follower: int) -> int:
    """How many tokens before `follower` equal the text's end; looked at as far as the classes go."""
    most, length = min(MATCH_CLASSES[-1][0], follower), len(tokens)
    return next((back for back in range(most) if tokens[follower - 1 - back] != tokens[length - 1 - back]), most)


def _acceptance(reach: int, trust: float) -> float:
    _, distrusted, trusted = next(kind for kind in reversed(MATCH_CLASSES) if kind[0] <= reach)
    return distrusted + (trusted - distrusted) * trust


def _continuation(tokens: list[int], follower: int, count: int) -> list[int]:
    """What stood from `follower` on; where the text ends it goes on with the drafts themselves, as in a loop."""
    drafts = tokens[follower : follower + count]
    period = len(tokens) - follower
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts


def _cost(points: tuple[tuple[int, float], ...], positions: int) -> float:
    """Straight lines between the points, the last one prolonged."""
    pairs = list(pairwise(points))
    (left, low), (right, high) = next((pair for pair in pairs if positions <= pair[1][0]), pairs[-1])
    return low + (high - low) * (positions - left) / (right - left)
