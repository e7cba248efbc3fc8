"""Features as they come: a producer runs ahead of the trainer, a bounded number of bytes, and nothing is kept.

    upcoming(trainer) -> numbers of documents -> worker threads: source.of -> (8 bits) -> bounded buffer -> of(number)

Which documents a step takes follows from its place in the data alone, so the producer knows them beforehand, and a run that is
resumed begins to produce at the place of its checkpoint: the same features in the same order, the same curve. A document that
is asked for out of turn is computed at once.
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


Kept = Callable[[], Features] | BaseException
"""A document's features in the form in which they wait, or what went wrong."""


class StreamedFeatures:
    """A feature source that works ahead. Belongs to one consumer; `begin` starts it, `close` ends its threads."""

    def __init__(
        self,
        source: FeatureSource,
        size_of: Callable[[int], int],
        budget_bytes: int,
        *,
        form: Form = PLAIN,
        num_threads: int = 1,
    ) -> None:
        """`size_of(number)`: bytes of a document's features as `form` keeps them. Several threads are for sources that may be
        asked from several; one at a time asks the others."""
        self._source, self._size_of, self._budget, self._form = source, size_of, budget_bytes, form
        self._num_threads = num_threads
        self._alone = threading.Lock() if num_threads == 1 else contextlib.nullcontext()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._numbers: Iterator[int] = iter(())
        self._ahead: int | None = None
        """The next number to be produced, for which there was no room yet."""
        self._order: deque[int] = deque()
        """Numbers that are under way or ready, in the order in which they will be asked for."""
        self._ready: dict[int, Kept] = {}
        """By place in the stream: kept features, or what went wrong."""
        self._first_place = self._next_place = 0
        self._is_over = True
        self._failure: Exception | None = None
        self._now: tuple[int, Features] | None = None
        self.held_bytes = self.most_held_bytes = 0
        """Of features that wait or are under way; and the most there were."""
        self.num_aside = 0
        """Documents that were asked for out of turn."""

    def begin(self, numbers: Iterator[int]) -> None:
        """From now on documents will be asked for in this order; the same one several times in a row counts once."""
        self.close()
        self._numbers, self._is_over, self._now, self._ahead, self.num_aside = numbers, False, None, None, 0
        self._failure = None
        self._threads = [threading.Thread(target=self._produce, daemon=True) for _ in range(self._num_threads)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Forget what was produced. A document under way is finished first."""
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
        if self._now is None or self._now[0] != number:
            self._now = number, self._take(number)
        return self._now[1]

    def _take(self, number: int) -> Features:
        kept = self._next_kept(number)
        if kept is None:
            self.num_aside += 1
            return self._form.coder(self._compute(number))()
        if isinstance(kept, BaseException):
            raise kept
        return kept()

    def _next_kept(self, number: int) -> Kept | None:
        """The next document of the stream, as soon as it is ready; None when that is not this one."""
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
                kept: Kept = self._form.coder(self._compute(number))
            except BaseException as error:  # noqa: BLE001  (raised again where it is asked for)
                kept = error
            with self._changed:
                self._ready[place] = kept
                self._changed.notify_all()

    def _next_number(self) -> int | None:
        """None at the end, and when what plans the documents has failed, which whoever asks for the next one is told."""
        try:
            return next(self._numbers, None)
        except Exception as error:  # noqa: BLE001
            self._failure = error
            return None

    def _claim(self) -> tuple[int, int] | None:
        """(document, place in the stream) of the next one, as soon as there is room for it; None when the stream is over."""
        with self._changed:
            while not self._is_over:
                if self._ahead is None:
                    self._ahead = self._next_number()
                if self._ahead is None:
                    self._is_over = True
                    self._changed.notify_all()
                    return None
                size = self._size_of(self._ahead)
                if not self.held_bytes or self.held_bytes + size <= self._budget:
                    self.held_bytes += size
                    self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
                    number, place, self._ahead = self._ahead, self._next_place, None
                    self._next_place += 1
                    self._order.append(number)
                    self._changed.notify_all()
                    return number, place
                self._changed.wait()
        return None


def upcoming_pieces(trainer: Trainer) -> Iterator[list[Chosen]]:
    """The blocks of the packs that this process will compute from where the trainer stands, without end."""
    place = trainer.state.place
    while True:
        chosen, _, place = trainer.planner.step(place)
        yield from (piece.chosen for piece in trainer.parallel.pieces(chosen, trainer.budget))


def upcoming(trainer: Trainer) -> Iterator[int]:
    """The documents that this process will ask for from where the trainer stands, without end; repeated ones once."""
    last = None
    for piece in upcoming_pieces(trainer):
        for number, _ in piece:
            if number != last:
                yield number
                last = number
