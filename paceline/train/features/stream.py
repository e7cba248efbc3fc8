"""Computes in advance of the trainer: worker threads stream features into a bounded buffer, a thread assembles packs.

    upcoming(trainer) -> document numbers -> worker threads: source.of -> (8 bits) -> bounded buffer -> of(number)
    upcoming_pieces(trainer) -> thread: Packer.pack, in main memory -> (CUDA: pinned, copied during computation) -> take

A step's documents depend only on its place in the data, so they are known in advance, and a resumed run starts to
produce at its checkpoint's place: the same features and packs in the same order. A document requested out of order is
computed immediately. Packs are prefetched for features from disk, and on a GPU for streamed features; features that the
target computes on the trainer's device would not come sooner.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.train.features.hidden_states import PLAIN, Features, FeatureSource, Form
from paceline.train.learn.packs import Chosen, Pack, Packer

if TYPE_CHECKING:
    from paceline.train.learn.loop import Trainer

DEPTH = 2
"""Prefetched packs at most, including the one being assembled; they use main memory and the device's memory."""


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


class PackPrefetcher:
    """Assembles packs (batches of training blocks) in advance in a thread, until `close` is called. `pieces`, given by
    the caller, yields the blocks of each pack, in the order in which `take` is called for them."""

    def __init__(self, packer: Packer, pieces: Iterator[list[Chosen]], depth: int = DEPTH) -> None:
        self._pieces = pieces
        is_gpu = torch.device(packer.device).type == "cuda"
        self._make = _Copier(packer).pack if is_gpu else partial(_in_memory, packer)
        self._executor = ThreadPoolExecutor(1, "paceline-packs")  # one thread: `pieces` must be read in order
        self._packs = deque(self._executor.submit(self._next) for _ in range(depth))

    def take(self, chosen: list[Chosen]) -> Pack:
        """Returns the next pack; waits until it is ready. `chosen`: the blocks that the caller expects in it, used to
        check that packs are taken in the planned order. Raises the error that occurred while the pack was assembled."""
        planned, hand_over = self._packs[0].result()  # an error stays in the queue: a second call raises it again
        self._packs.popleft()
        self._packs.append(self._executor.submit(self._next))
        assert _same(planned, chosen), "packs are taken in the order in which they were planned"
        return hand_over()

    def close(self) -> None:
        """Ends the thread after the pack that is being assembled, and discards all prefetched packs."""
        self._executor.shutdown(cancel_futures=True)
        self._packs.clear()

    def _next(self) -> tuple[list[Chosen], Callable[[], Pack]]:
        chosen = next(self._pieces)
        return chosen, self._make(chosen)


def _in_memory(packer: Packer, chosen: list[Chosen]) -> Callable[[], Pack]:
    pack = packer.pack(chosen)
    return lambda: pack


class _Copier:
    """Copies packs to a GPU through pinned memory, on a separate stream, in parallel with computation."""

    def __init__(self, packer: Packer) -> None:
        self._device, self._packer = torch.device(packer.device), replace(packer, device="cpu")
        self._stream: Any = torch.cuda.Stream(self._device)

    def pack(self, chosen: list[Chosen]) -> Callable[[], Pack]:
        """Starts copying the pack of these blocks; the returned function makes the computing stream wait for the
        copy."""
        packed = self._packer.pack(chosen)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = packed.changed(lambda tensor: tensor.pin_memory())
            copy = pinned.changed(lambda tensor: tensor.to(self._device, non_blocking=True))
            copied = self._stream.record_event()

        def hand_over() -> Pack:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            for tensor in copy.tensors():
                tensor.record_stream(computing)  # the allocator reuses its memory only after the computation
            return copy

        return hand_over


@contextlib.contextmanager
def packs_ahead(trainer: Trainer) -> Iterator[None]:
    """Context manager: inside it, a thread assembles the trainer's next packs (batches of training blocks) in advance.
    `trainer.run` may be called only once inside it."""
    prefetcher = PackPrefetcher(trainer.packer, upcoming_pieces(trainer))
    pack, trainer.pack = trainer.pack, prefetcher.take
    try:
        yield
    finally:
        trainer.pack = pack
        prefetcher.close()


def _same(some: list[Chosen], others: list[Chosen]) -> bool:
    return len(some) == len(others) and all(
        one == other and np.array_equal(one_A, other_A)
        for (one, one_A), (other, other_A) in zip(some, others, strict=True)
    )
