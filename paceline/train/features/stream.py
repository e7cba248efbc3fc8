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
from typing import TYPE_CHECKING

from paceline.train.features.hidden_states import PLAIN, Features, FeatureSource, Form

if TYPE_CHECKING:
    from paceline.train.learn.loop import Trainer
    from paceline.train.learn.packs import Chosen


Encoded = Callable[[], Features] | BaseException
"""A document's encoded features, or the error of computing them."""


class StreamedFeatures:
    """A feature source (it gives the target's hidden states for documents) whose threads compute features in advance,
    for one consumer. `begin` starts the threads, `close` ends them."""

    def __init__(
        self,
        source: FeatureSource,
        size_of: Callable[[int], int],
        budget_bytes: int,
        *,
        form: Form = PLAIN,
        num_threads: int = 1,
    ) -> None:
        """`size_of(number)`: bytes of a document's features in `form`, the storage format. `budget_bytes`: size of the
        buffer. `num_threads` above 1 needs a thread-safe source."""
        self._source, self._size_of, self._budget, self._form = source, size_of, budget_bytes, form
        self._num_threads = num_threads
        self._alone = threading.Lock() if num_threads == 1 else contextlib.nullcontext()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._numbers: Iterator[int] = iter(())
        self._pending: int | None = None
        """Next document to compute, which had no room in the buffer yet."""
        self._order: deque[int] = deque()
        """Documents in flight or ready, in the order of their requests."""
        self._ready: dict[int, Encoded] = {}
        """Place in the stream -> encoded features, or an error."""
        self._first_place = self._next_place = 0
        self._is_over = True
        self._failure: Exception | None = None
        self._latest: tuple[int, Features] | None = None
        self.held_bytes = self.most_held_bytes = 0
        """Bytes of features in the buffer or in flight; and their maximum so far."""
        self.num_out_of_order = 0
        """Number of documents requested out of order."""

    def begin(self, numbers: Iterator[int]) -> None:
        """Starts computing the features of the documents `numbers`, in the order in which `of` will request them.
        `numbers` has no consecutive repetitions, since `of` returns the latest document again."""
        self.close()
        self._numbers, self._is_over, self._latest, self._pending, self.num_out_of_order = numbers, False, None, None, 0
        self._failure = None
        self._threads = [threading.Thread(target=self._produce, daemon=True) for _ in range(self._num_threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Discards all features, after documents in flight are finished."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._order.clear()
        self._ready.clear()
        self._first_place = self._next_place = self.held_bytes = 0

    def of(self, number: int) -> Features:
        if self._latest is None or self._latest[0] != number:
            self._latest = number, self._take(number)
        return self._latest[1]

    def _take(self, number: int) -> Features:
        encoded = self._next_encoded(number)
        if encoded is None:
            self.num_out_of_order += 1
            return self._form.coder(self._compute(number))()
        if isinstance(encoded, BaseException):
            raise encoded
        return encoded()

    def _next_encoded(self, number: int) -> Encoded | None:
        """Waits for the next document of the stream; returns None if it is not this one."""
        with self._changed:
            while not self._order and not self._is_over:
                self._changed.wait()
            if not self._order and self._failure:
                return self._failure
            if not self._order or self._order[0] != number:
                return None
            while self._first_place not in self._ready:
                self._changed.wait()
            self._order.popleft()
            self._first_place += 1
            self.held_bytes -= self._size_of(number)
            self._changed.notify_all()
            return self._ready.pop(self._first_place - 1)

    def _compute(self, number: int) -> Features:
        with self._alone:
            return self._source.of(number)

    def _produce(self) -> None:
        while (claimed := self._claim()) is not None:
            number, place = claimed
            try:
                encoded: Encoded = self._form.coder(self._compute(number))
            except BaseException as error:  # noqa: BLE001  (raised by `of`)
                encoded = error
            with self._changed:
                self._ready[place] = encoded
                self._changed.notify_all()

    def _next_number(self) -> int | None:
        """Returns None at the end, or if planning the documents failed; then the next request raises the error."""
        try:
            return next(self._numbers, None)
        except Exception as error:  # noqa: BLE001
            self._failure = error
            return None

    def _claim(self) -> tuple[int, int] | None:
        """Waits for room in the buffer; returns (document, place in the stream), or None at the end of the stream."""
        with self._changed:
            while not self._is_over:
                if self._pending is None:
                    self._pending = self._next_number()
                if self._pending is None:
                    self._is_over = True
                    self._changed.notify_all()
                    return None
                size = self._size_of(self._pending)
                if not self.held_bytes or self.held_bytes + size <= self._budget:
                    self.held_bytes += size
                    self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
                    number, place, self._pending = self._pending, self._next_place, None
                    self._next_place += 1
                    self._order.append(number)
                    self._changed.notify_all()
                    return number, place
                self._changed.wait()
        return None


def upcoming_pieces(trainer: Trainer) -> Iterator[list[Chosen]]:
    """Yields, without end, the blocks of each pack that this process will train on, as (document number, anchor
    positions) pairs. Begins at the trainer's current place in the data."""
    place = trainer.state.place
    while True:
        chosen, _, place = trainer.planner.step(place)
        yield from (piece.chosen for piece in trainer.parallel.pieces(chosen, trainer.budget))


def upcoming(trainer: Trainer) -> Iterator[int]:
    """Yields, without end, the numbers of the documents whose features this process will request, in this order. Begins
    at the trainer's current place in the data; a document requested several times in a row is yielded once."""
    last = None
    for piece in upcoming_pieces(trainer):
        for number, _ in piece:
            if number != last:
                yield number
                last = number
