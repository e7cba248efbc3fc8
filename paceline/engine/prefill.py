"""How much of a prompt to prefill at once: all that fits when nobody waits, little enough when others are decoding."""

from __future__ import annotations

LEAST = 16
"""Tokens of a chunk at least: smaller ones cost as much."""
ROUNDS = 1.5
"""A chunk may take so many rounds' time: who decodes then waits for its next token less than three rounds."""


class PrefillPace:
    """Sizes of prefill chunks, from what chunks and rounds took so far."""

    def __init__(self, most: int, *, adapts: bool) -> None:
        """`adapts` only for a target that gives a token the same bits in chunks of any size, so that no text depends on it."""
        self._most, self._adapts = most, adapts
        self._token_s = self._round_s = 0.0

    def size(self, num_running: int) -> int:
        """Tokens of the next chunk, with so many requests decoding beside it."""
        if not (self._adapts and num_running and self._token_s and self._round_s):
            return self._most
        return min(max(int(ROUNDS * self._round_s / self._token_s), LEAST), self._most)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._token_s = _towards(self._token_s, seconds / num_tokens)

    def decoded(self, seconds: float) -> None:
        self._round_s = _towards(self._round_s, seconds)


def _towards(known: float, seen: float) -> float:
    """A running average that one disturbance moves by little."""
    return known + 0.2 * (min(seen, 2 * known) - known) if known else seen
