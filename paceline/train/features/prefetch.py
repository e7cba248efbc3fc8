"""Packs made beforehand: a thread reads features and puts packs together while the trainer computes the one before.

    upcoming_pieces(trainer) -> thread: Packer.pack, in main memory -> (CUDA: pinned, copied beside what is computed) -> take

The packs are those that the trainer would make, in its order. It is for features that are read from disk, and for a GPU's that
come from a stream; those that the target computes where the trainer does are not made sooner by a thread.
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
"""Packs beside the one that is computed, at most, that being made included: they take main memory, and the device's."""


class PacksAhead:
    """Makes these packs in turn, in a thread that begins at once and ends with `close`."""

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
        """The next pack, which must be of these blocks. Raises what making it raised."""
        with self._changed:
            while not self._ready:
                self._changed.wait()
            made = self._ready[0]
            if isinstance(made, BaseException):  # nothing comes after it: whoever asks again is told again
                raise made
            self._ready.popleft()
            self._changed.notify_all()
        assert _same(made[0], chosen), "packs are taken in the order in which they were planned"
        return made[1]()

    def close(self) -> None:
        """Forget what was made. A pack that is being made is finished first."""
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
        except BaseException as error:  # noqa: BLE001  (raised again where the pack is asked for)
            with self._changed:
                self._ready.append(error)
                self._changed.notify_all()


def _in_memory(packer: Packer, chosen: list[Chosen]) -> Callable[[], Pack]:
    pack = packer.pack(chosen)
    return lambda: pack


class _Copier:
    """Packs on a GPU by way of pinned memory, copied on a stream of their own beside what is computed."""

    def __init__(self, packer: Packer) -> None:
        self._device, self._packer = torch.device(packer.device), replace(packer, device="cpu")
        self._stream: Any = torch.cuda.Stream(self._device)

    def pack(self, chosen: list[Chosen]) -> Callable[[], Pack]:
        """Begin to copy the pack of these blocks; what is returned gives it to the stream that computes."""
        packed = self._packer.pack(chosen)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = packed.changed(lambda tensor: tensor.pin_memory())
            copy = pinned.changed(lambda tensor: tensor.to(self._device, non_blocking=True))
            is_there = self._stream.record_event()

        def hand_over() -> Pack:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(is_there)
            for tensor in copy.tensors():
                tensor.record_stream(computing)  # its memory is not used again before the computation is done with it
            return copy

        return hand_over


@contextlib.contextmanager
def packs_ahead(trainer: Trainer) -> Iterator[None]:
    """Within, the trainer's packs are made beforehand; `trainer.run` begins no more than once."""
    ahead = PacksAhead(trainer.packer, upcoming_pieces(trainer))
    before, trainer.pack = trainer.pack, ahead.take
    try:
        yield
    finally:
        trainer.pack = before
        ahead.close()


def _same(some: list[Chosen], others: list[Chosen]) -> bool:
    return len(some) == len(others) and all(
        one == other and np.array_equal(one_A, other_A) for (one, one_A), (other, other_A) in zip(some, others, strict=True)
    )
