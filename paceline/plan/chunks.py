"""Chooses the sizes of prefill chunks for engine steps that also decode. Imports no PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

LEAST_CHUNK = 8
"""Minimum prompt tokens per chunk; smaller chunks save no time."""
FREE_EVERY = 8
"""While prompts are waiting, one in 8 rounds is planned without a time limit, to measure how long such a round
takes."""


class ChunkSizes:
    """Chooses how many prompt tokens the next prefill chunk has, at most `most`.

    With `adapts`, while other rows decode, a chunk is sized to take about as long as one decode round. A running answer
    then waits about two rounds for its next token. Without `adapts`, or if no row decodes, chunks have the maximum
    size.
    """

    def __init__(self, most: int, adapts: bool) -> None:
        self._most, self._adapts = most, adapts
        self._token_s = self._round_s = self._free_s = 0.0
        self._num_limited = 0

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context manager within which chunks have the maximum size, as without `adapts`. Use it while no answer is
        streamed: throughput is higher, but running answers wait longer for their next token."""
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
        """Time limit in seconds for the next decode round if a prefill chunk runs in the same step, so that drafts do
        not delay the prompt. Infinity if there is no limit, as in every eighth such round (FREE_EVERY).

        The limit is the average duration of the rounds that ran without a limit. A longer one of these raises it at
        once, but at most by a quarter; shorter ones lower it slowly.
        """
        is_free = not self._adapts or self._num_limited >= FREE_EVERY - 1
        return math.inf if is_free or not self._free_s else self._free_s

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        self._token_s = _average(self._token_s, seconds / num_tokens, 2.0)

    def decoded(self, seconds: float, *, beside_chunk: bool) -> None:
        """Update the estimated duration of a decode round with a measured one. `beside_chunk`: True if a prefill chunk
        ran in the same step. Such a round has less weight, because the processor's caches are cold after the chunk."""
        self._round_s = _average(self._round_s, seconds, 1.25, 0.05 if beside_chunk else 0.2)
        # `most_round_s` still is the limit by which this round was planned: only the lines below change it.
        if beside_chunk and self.most_round_s < math.inf:
            self._num_limited += 1
        else:  # follows longer rounds immediately: a mean would exclude the half of all rounds that take longer
            weight = 1.0 if seconds > self._free_s else 0.2
            self._free_s, self._num_limited = _average(self._free_s, seconds, 1.25, weight), 0


def _average(known: float, value: float, most: float, weight: float = 0.2) -> float:
    """Updates a running average; clips `value` to `most` times it, so that one disturbance has little effect."""
    return known + weight * (min(value, most * known) - known) if known else value
