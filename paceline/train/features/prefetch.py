"""Prefetches packs: a thread reads features and assembles packs while the trainer computes the previous pack.

    upcoming_pieces(trainer) -> thread: Packer.pack, in main memory -> (CUDA: pinned, copied during computation) -> take

The packs and their order are those of the trainer without prefetching. It is used for features from disk, and on a GPU
for streamed features; features that the target computes on the trainer's device would not come sooner.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
