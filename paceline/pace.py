"""How much of a prompt to prefill at once: all that fits when nobody waits, little enough when others are decoding."""

from __future__ import annotations

import math

LEAST = 8
"""Tokens of a chunk at least: what smaller ones spare they cost again."""
ROUNDS = 1.0
"""A chunk may take so many rounds' time: who decodes waits two for its next token then, and three when disturbed."""


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

    @property
    def most_round_s(self) -> float:
        """Seconds that drafts may extend a round to that has a chunk beside it: what rounds usually take."""
        return self._round_s if self._adapts and self._round_s else math.inf

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._token_s = _towards(self._token_s, seconds / num_tokens, 2.0)

    def decoded(self, seconds: float, *, beside_chunk: bool = False) -> None:
        """A longer round counts little, and so does one after a chunk, which left other things in the caches: a stream notices
        waits beside the rounds that are usual, not beside their mean."""
        self._round_s = _towards(self._round_s, seconds, 1.25, 0.05 if beside_chunk else 0.2)


def _towards(known: float, seen: float, most: float, weight: float = 0.2) -> float:
    """A running average; one value counts as `most` times what is known at most, so that one disturbance moves it by little."""
    return known + weight * (min(seen, most * known) - known) if known else seen
