"""Prefetches packs: a thread reads features and assembles packs while the trainer computes the previous pack.

    upcoming_pieces(trainer) -> thread: Packer.pack, in main memory -> (CUDA: pinned, copied during computation) -> take

The packs and their order are those of the trainer without prefetching. It is used for features from disk, and on a GPU for
streamed features; features that the target computes on the trainer's device would not come sooner.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.train.features.stream import upcoming_pieces
from paceline.train.learn.packs import Chosen, Pack, Packer

if TYPE_CHECKING:
    from paceline.train.learn.loop import Trainer

DEPTH = 2
"""Prefetched packs at most, including the one being assembled; they use main memory and the device's memory."""


class PackPrefetcher:
    """Assembles these packs in order, in a thread that runs until `close`."""

    def __init__(self, packer: Packer, pieces: Iterator[list[Chosen]], depth: int = DEPTH) -> None:
        self._pieces, self._depth = pieces, depth
        is_gpu = torch.device(packer.device).type == "cuda"
        self._make = _Copier(packer).pack if is_gpu else partial(_in_memory, packer)
        self._changed = threading.Condition()
        self._ready: deque[tuple[list[Chosen], Callable[[], Pack]] | BaseException] = deque()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="paceline-packs", daemon=True)
        self._thread.start()

    def take(self, chosen: list[Chosen]) -> Pack:
        """Returns the next pack, which must have these blocks. Raises the error of assembling it."""
        with self._changed:
            while not self._ready:
                self._changed.wait()
            ready = self._ready[0]
            if isinstance(ready, BaseException):  # stays in the queue, so that a second call raises it again
                raise ready
            self._ready.popleft()
            self._changed.notify_all()
        assert _same(ready[0], chosen), "packs are taken in the order in which they were planned"
        return ready[1]()

    def close(self) -> None:
        """Discards all prefetched packs, after the current one is finished."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _work(self) -> None:
        try:
            for chosen in self._pieces:
                pack = self._make(chosen)
                with self._changed:
                    self._ready.append((chosen, pack))
                    self._changed.notify_all()
                    while len(self._ready) >= self._depth and not self._is_over:
                        self._changed.wait()
                    if self._is_over:
                        return
        except BaseException as error:  # noqa: BLE001  (raised by `take`)
            with self._changed:
                self._ready.append(error)
                self._changed.notify_all()


def _in_memory(packer: Packer, chosen: list[Chosen]) -> Callable[[], Pack]:
    pack = packer.pack(chosen)
    return lambda: pack


class _Copier:
    """Copies packs to a GPU through pinned memory, on a separate stream, in parallel with computation."""

    def __init__(self, packer: Packer) -> None:
        self._device, self._packer = torch.device(packer.device), replace(packer, device="cpu")
        self._stream: Any = torch.cuda.Stream(self._device)

    def pack(self, chosen: list[Chosen]) -> Callable[[], Pack]:
        """Starts copying the pack of these blocks; the returned function makes the computing stream wait for the copy."""
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
    """Prefetches the trainer's packs while the context is open; `trainer.run` may be called only once in it."""
    prefetcher = PackPrefetcher(trainer.packer, upcoming_pieces(trainer))
    pack, trainer.pack = trainer.pack, prefetcher.take
    try:
        yield
    finally:
        trainer.pack = pack
        prefetcher.close()


def _same(some: list[Chosen], others: list[Chosen]) -> bool:
    return len(some) == len(others) and all(
        one == other and np.array_equal(one_A, other_A) for (one, one_A), (other, other_A) in zip(some, others, strict=True)
    )
