"""Trial of a new drafter on one request. Its errors do not affect that request or others."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

from paceline.draft.base import Drafter, NoDrafter, Observed
from paceline.errors import DrafterMismatchError, PacelineError
from paceline.types import CANDIDATE, Batch, Sequence, Take


class Probation(NoDrafter):
    """Wraps a new drafter to try it on one request before other requests use it. The new drafter reads the prompt and
    drafts once, which shows whether it works; these drafts are discarded. The request itself is decoded without drafts.

    The future `done` completes when the request ends, with the list of drafted tokens or the error.
    """

    name = CANDIDATE

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        """`drafter`: the drafter to try, already bound to the target."""
        self.drafter, self._vocab_size = drafter, vocab_size
        self.tap_layers, self.has_own_threads = drafter.tap_layers, drafter.has_own_threads
        self.done: Future[list[int]] = Future()
        self._drafted: list[int] = []
        self._error: Exception | None = None

    def adopt(self, seq: Sequence, source: int, length: int) -> int:
        """Returns 0: no cached state is reused, so that the new drafter reads the whole prompt."""
        return 0

    def start(self, seq: Sequence) -> None:
        self._try(lambda: self.drafter.start(seq))

    def observe(self, observed: list[Observed]) -> None:
        self._try(lambda: self.drafter.observe(observed))
        for one in observed:
            if not self._drafted and one.start + one.count == one.sequence.prompt_len:
                self._try(lambda seq=one.sequence: self._draft(seq))

    def drop(self, seq: Sequence) -> None:
        self._try(lambda: self.drafter.drop(seq))
        if self.done.done():
            return
        if self._error is None and not self._drafted:
            self._error = DrafterMismatchError(
                "the request that should try the drafter was ended before its prompt was read"
            )
        if self._error:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(self._drafted)

    def _draft(self, seq: Sequence) -> None:
        most = seq.most_drafted(self.drafter.num_drafted)
        if not most or not self.drafter.can_draft(seq):
            raise DrafterMismatchError("the drafter cannot draft after a short text that it has read")
        block = self.drafter.propose(Batch([seq], [Take(self.drafter.name, most)], whole_blocks=False))
        tokens, logprobs = block.tokens_B[0], (block.confidence_B or [None])[0]
        if any(not 0 <= token < self._vocab_size for token in tokens):
            raise DrafterMismatchError(
                "the drafter drafts tokens that the target does not have: it is of another model"
            )
        if not tokens or not all(math.isfinite(each) for each in logprobs or ()):
            raise DrafterMismatchError("the drafter drafts nothing after a short text: its weights are damaged")
        self._drafted = tokens

    def _try(self, call: Callable[[], None]) -> None:
        if self._error is None:
            try:
                call()
            except PacelineError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001  (no error of the new drafter may stop other requests)
                self._error = DrafterMismatchError(f"the drafter fails: {type(error).__name__} {error}")
