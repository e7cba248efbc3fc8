"""Streams features: worker threads compute them in advance of the trainer into a bounded buffer; none are stored.

    upcoming(trainer) -> document numbers -> worker threads: source.of -> (8 bits) -> bounded buffer -> of(number)

A step's documents depend only on its place in the data, so they are known in advance, and a resumed run starts to
produce at its checkpoint's place: the same features in the same order. A document requested out of order is computed
immediately.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from paceline.train.features.hidden_states import PLAIN, Features, FeatureSource, Form

if TYPE_CHECKING:
    from paceline.train.learn.loop import Trainer
    from paceline.train.learn.packs import Chosen


class StreamedFeatures:
    """Provides the target's hidden states of documents; threads compute them in advance into a buffer of limited size.
    `begin` starts the threads, `close` ends them; only one thread may call `of`."""

    def __init__(
        self,
        source: FeatureSource,
        size_of: Callable[[int], int],
        budget_bytes: int,
        *,
        form: Form = PLAIN,
        num_threads: int = 1,
    ) -> None:
        """`size_of(number)`: bytes of a document's features in the storage format `form`. `budget_bytes`: size of the
        buffer. `num_threads` above 1 needs a thread-safe source."""
        self._source, self._size_of, self._budget, self._form = source, size_of, budget_bytes, form
        self._num_threads = num_threads
        self._alone = threading.Lock() if num_threads == 1 else contextlib.nullcontext()
        self._executor: ThreadPoolExecutor | None = None
        self._numbers: Iterator[int] = iter(())
        self._pending: int | None = None
        """Next document to compute, which had no room in the buffer yet."""
        self._ahead: deque[tuple[int, Future[Callable[[], Features]]]] = deque()
        """(document, encoded features) in flight or ready, in the order of their requests."""
        self._failure: Exception | None = None
        self._latest: tuple[int, Features] | None = None
        self.held_bytes = self.most_held_bytes = 0
        """Bytes of features in the buffer or in flight; and their maximum so far."""
        self.num_out_of_order = 0
        """Number of documents requested out of order."""

    def begin(self, numbers: Iterator[int]) -> None:
        """Starts threads that compute the features of the documents `numbers`, in this order. The caller must then
        request the documents with `of` in the same order. If it requests a document several times in a row, `numbers`
        must have it once."""
        self.close()
        self._numbers, self._latest, self._failure, self.num_out_of_order = numbers, None, None, 0
        self._executor = ThreadPoolExecutor(self._num_threads, "paceline-features")
        self._submit(self._executor)

    def close(self) -> None:
        """Ends the threads after the documents that are being computed, and discards the buffer."""
        if self._executor:
            self._executor.shutdown(cancel_futures=True)
        self._executor, self._pending, self.held_bytes = None, None, 0
        self._ahead.clear()

    def of(self, number: int) -> Features:
        if self._latest is None or self._latest[0] != number:
            self._latest = number, self._take(number)
        return self._latest[1]

    def _take(self, number: int) -> Features:
        if not self._ahead and self._failure:
            raise self._failure
        if not self._executor or not self._ahead or self._ahead[0][0] != number:
            self.num_out_of_order += 1
            return self._encode(number)()
        _, future = self._ahead.popleft()
        try:
            encoded = future.result()
        finally:
            self.held_bytes -= self._size_of(number)
            self._submit(self._executor)
        return encoded()

    def _encode(self, number: int) -> Callable[[], Features]:
        with self._alone:
            features = self._source.of(number)
        return self._form.coder(features)

    def _submit(self, executor: ThreadPoolExecutor) -> None:
        """Submits the next documents for which the buffer has room."""
        while (number := self._next_number()) is not None:
            size = self._size_of(number)
            if self.held_bytes and self.held_bytes + size > self._budget:  # one alone may exceed the budget
                return
            self.held_bytes += size
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
            self._ahead.append((number, executor.submit(self._encode, number)))
            self._pending = None

    def _next_number(self) -> int | None:
        """Returns the next document to compute; None at the end. It is also None if planning the documents failed: then
        the request after the last document raises the error."""
        if self._pending is None and not self._failure:
            try:
                self._pending = next(self._numbers, None)
            except Exception as error:  # noqa: BLE001
                self._failure = error
        return self._pending


def upcoming_pieces(trainer: Trainer) -> Iterator[list[Chosen]]:
    """Yields the blocks of each pack (batch) that this process will train on, so that packs can be assembled in
    advance. Begins at the trainer's current position in the data, and never ends. Blocks are (document number, anchor
    positions) pairs."""
    place = trainer.state.place
    while True:
        chosen, _, place = trainer.planner.step(place)
        yield from (piece.chosen for piece in trainer.parallel.pieces(chosen, trainer.budget))


def upcoming(trainer: Trainer) -> Iterator[int]:
    """Yields the numbers of the documents whose features this process will request, so that they can be computed in
    advance. Begins at the trainer's current position in the data, and never ends. A document that is requested several
    times in a row is yielded once."""
    last = None
    for piece in upcoming_pieces(trainer):
        for number, _ in piece:
            if number != last:
                yield number
                last = number
