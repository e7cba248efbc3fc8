"""Teacher forcing: a model reads given texts, and its logits at their tokens are computed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.model.target import ForwardBatch, Target
from paceline.report.statistics import num_common

CHUNK = 256
"""Number of positions per forward pass."""


class ForcedReader:
    """Computes the logits with which a model predicts the tokens of given texts, for scoring and distillation.

    Occupies one row of the model's KV cache until `close`, and removes the target's taps (`Target.set_taps`). The
    model's engine must be idle until `close`.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        target.set_taps(())
        row = target.cache.allocate()
        assert row is not None, "the engine is not idle"
        self._row, self._cached = row, list[int]()

    def close(self) -> None:
        """Frees the cache row that the reader uses."""
        self._target.cache.rollback([self._row], [0])
        self._target.cache.free(self._row)

    @torch.inference_mode()
    def logits(self, tokens: list[int], first: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the tokens from index `first` (at least 1) on, in chunks of T tokens, with the logits [T, V] that
        predict them. The logits of a chunk are valid until the next chunk is requested.

        `tokens`: the whole text. If its beginning equals that of the previous call's text, the common tokens before
        index `first` - 1 are not computed again.
        """
        common = num_common(self._cached, tokens[: first - 1])
        self._cached = tokens[:common]
        self._target.cache.rollback([self._row], [common])
        for start in range(common, first - 1, CHUNK):
            part = tokens[start : min(start + CHUNK, first - 1)]
            self._target.forward(ForwardBatch([self._row], [start], [len(part)], part, "none"))
        for start in range(first - 1, len(tokens) - 1, CHUNK):
            part = tokens[start : min(start + CHUNK, len(tokens) - 1)]
            out = self._target.forward(ForwardBatch([self._row], [start], [len(part)], part))
            assert out.logits_TV is not None
            yield tokens[start + 1 : start + 1 + len(part)], out.logits_TV
        self._cached = tokens[:-1]
