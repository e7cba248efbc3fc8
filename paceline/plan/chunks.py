"""How much of a prompt is read beside a round of decoding. No PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

LEAST_CHUNK = 8
"""Prompt tokens of a chunk at least: what smaller ones spare they cost again."""


FREE_EVERY = 8
"""One of so many rounds beside chunks is planned without a limit: where prompts wait all the time no other round shows
what rounds would take."""


class ChunkSizes:
    """Sizes of prefill chunks: all that fits when nobody decodes, else what takes about one round, so that a stream waits two
    rounds for its next token."""

    def __init__(self, most: int, adapts: bool) -> None:
        self._most, self._adapts = most, adapts
        self._token_s = self._round_s = self._free_s = 0.0
        self._num_limited = 0

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within, chunks are as large as they may be: all answers together take less time, one that is under way waits longer
        for its next token. For work that nobody follows token by token."""
        adapts, self._adapts = self._adapts, False
        try:
            yield
        finally:
            self._adapts = adapts

    def size(self, num_running: int) -> int:
        if not (self._adapts and num_running and self._token_s and self._round_s):
            return self._most
        return min(max(int(self._round_s / self._token_s), LEAST_CHUNK), self._most)

    @property
    def most_round_s(self) -> float:
        """Seconds that drafts may lengthen the next round to, beside a chunk: what rounds without such a limit take, or
        infinity. Rounds that kept to it do not lower it, else each that is shorter would shorten all after it."""
        is_free = not self._adapts or self._num_limited >= FREE_EVERY - 1
        return math.inf if is_free or not self._free_s else self._free_s

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._token_s = _towards(self._token_s, seconds / num_tokens, 2.0)

    def decoded(self, seconds: float, *, beside_chunk: bool) -> None:
        """A longer round counts little, and so does one after a chunk, which left other things in the caches."""
        self._round_s = _towards(self._round_s, seconds, 1.25, 0.05 if beside_chunk else 0.2)
        if beside_chunk and self.most_round_s < math.inf:
            self._num_limited += 1
        else:  # follows longer rounds at once: a mean would keep out the half of all rounds that take longer
            weight = 1.0 if seconds > self._free_s else 0.2
            self._free_s, self._num_limited = _towards(self._free_s, seconds, 1.25, weight), 0


def _towards(known: float, seen: float, most: float, weight: float = 0.2) -> float:
    """A running average; one value counts as `most` times what is known at most, so that one disturbance moves it by little."""
    return known + weight * (min(seen, most * known) - known) if known else seen
