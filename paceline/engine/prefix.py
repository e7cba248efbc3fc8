"""Prompts that begin alike share the work: keys, values and a drafter's features of a common prefix are copied between rows.

A row remembers the tokens whose keys and values it holds, also after its sequence is gone and until another takes it. A new
sequence takes over the longest prefix that any row has, from its own row without a copy. Only for targets that give a position
the same bits in any company (`Target.is_width_invariant`): then reuse changes nothing of what is said.
"""

from __future__ import annotations

from paceline.draft.pool import Pool
from paceline.figures import num_common
from paceline.model.target import Target
from paceline.types import Sequence

LEAST = 16
"""Shorter prefixes are not worth a copy: a chat template's beginning is shared by everything."""


class PrefixReuse:
    """What every row of the cache holds. `Engine` tells it of admissions and releases."""

    def __init__(self, target: Target, drafters: Pool) -> None:
        self._target, self._drafters = target, drafters
        self._left: dict[int, tuple[list[int], int]] = {}
        """Row without a sequence -> tokens it still holds, and which giving away of the row that was."""
        self._running: dict[int, Sequence] = {}
        self.num_reused = 0
        """Prompt tokens that were not computed again, since the engine began."""

    def best_row(self, seq: Sequence, free: list[int]) -> int | None:
        """The free row that holds the longest prefix of the prompt, if it holds one worth keeping."""
        lengths = {row: _common(tokens, seq) for row, tokens in self._still_held().items() if row in free}
        best = max(lengths, key=lengths.__getitem__, default=None)
        return best if best is not None and lengths[best] >= LEAST else None

    def admitted(self, seq: Sequence) -> None:
        """Take over what is known of the prompt; `seq.row` is allocated and its drafter has started it."""
        # Its own row was just given to it, and holds what it held before.
        held = self._still_held(seq.row) | {row: other.tokens[: other.cached_len] for row, other in self._running.items()}
        lengths = {row: _common(tokens, seq) for row, tokens in held.items()}
        source = max(lengths, key=lambda row: (lengths[row], row == seq.row), default=None)
        if source is not None and lengths[source] >= LEAST:
            length = self._drafters.adopt(seq, source, lengths[source])
            if length:
                self._target.cache.adopt(source, seq.row, length)
                seq.cached_len = seq.num_reused = length
                self.num_reused += length
        self._left.pop(seq.row, None)
        self._running[seq.row] = seq

    def released(self, seq: Sequence, *, is_sound: bool = True) -> None:
        """The sequence is about to leave `seq.row`, whose keys and values others may use if they are sound."""
        if self._running.pop(seq.row, None) is not None and is_sound:
            self._left[seq.row] = seq.tokens[: seq.cached_len], self._target.cache.generations[seq.row]

    def _still_held(self, given: int | None = None) -> dict[int, list[int]]:
        """What rows without a sequence hold; others than this engine may have used them since."""
        now = self._target.cache.generations
        return {row: tokens for row, (tokens, when) in self._left.items() if when + (row == given) == now[row]}


def _common(tokens: list[int], seq: Sequence) -> int:
    """How many first tokens of the prompt `tokens` begins with; the prompt's last token is always left to compute."""
    return num_common(tokens, seq.tokens[: seq.prompt_len - 1])
