"""The processes of one run: torchrun's group, and a roll call between stages that waits for the slow and notices the dead.

A stage (answers, features, serving held-out prompts) may take hours longer on one process than on another; a step may not. So
what a step sends has a time limit, and `Roll.wait`, between stages, has none: it waits as long as those that are missing give
signs of life, one every `BEAT_S` through the store by which torchrun's processes found each other. Who ends with an error says
so there, and who says nothing for `LOST_AFTER_S` is named as lost.

    wait/<n>/<rank>   this process is at its n-th wait      alive/<rank>   signs of life so far
    failed/<rank>     what ended this process               parted/<rank>  it has left
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from paceline.errors import ConfigError, ProcessesError, reraised
from paceline.runs.ranks import Ranks

BEAT_S = 1.0
LOST_AFTER_S = 300.0
"""A process that has shown no sign of life for so long is lost: reading a large file may silence one for minutes."""
LINGERS = 10
"""Beats that the first process stays after an error: the others take half as many to find out whose it was."""
JOIN_MINUTES = 10.0
"""How long processes wait for each other at the beginning: machines start at their own pace."""
VICTIM = "ProcessesError: "
"""Begins what a process tells that ends because of another one."""
GO_ON = "what is finished is kept: start all processes again with the same command"


class Roll:
    """Which processes live, and where they are. Belongs to one thread; the signs of life come from another one."""

    def __init__(self, store: Any, ranks: Ranks, beat_s: float = BEAT_S, lost_after_s: float = LOST_AFTER_S) -> None:
        """`store`: a store of torch.distributed that all processes share."""
        self._store, self._ranks, self._beat_s, self._lost_after_s = store, ranks, beat_s, lost_after_s
        self._others = [rank for rank in range(ranks.world) if rank != ranks.rank]
        self._num_waits = 0
        self._is_over = threading.Event()
        store.add(f"alive/{ranks.rank}", 1)
        # A connection of its own: a request of the main thread may wait.
        self._thread = threading.Thread(target=self._live, args=(store.clone(),), name="paceline-alive", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all processes have called this as often as this one. Raises ProcessesError when one of them is gone."""
        self._num_waits += 1
        with self._named():
            self._store.set(f"wait/{self._num_waits}/{self._ranks.rank}", "")
            self._until_all([f"wait/{self._num_waits}/{rank}" for rank in self._others])

    def blame(self, error: BaseException) -> ProcessesError:
        """What a collective that failed is told as: who is gone, or that somebody is late."""
        if lost := self.lost():
            return lost
        told = f"{' '.join(str(error).split()):.200}"
        return ProcessesError(
            f"{self._name([self._ranks.rank])} waited in vain for what others were to send in a step ({told}): one is slow or "
            f"hangs, see what each does; a longer --step-timeout-minutes waits longer; {GO_ON}"
        )

    def lost(self) -> ProcessesError | None:
        """Who has told what ended it, or gives no sign of life for some beats; None when all others go on."""
        try:
            silence = _Silence(self)
            for _ in range(LINGERS // 2):
                time.sleep(self._beat_s)
                self._raise_told(of_victims=False)
                silence.look(self._others, self._beat_s)
            lost = [rank for rank in self._others if silence.of(rank) >= 3 * self._beat_s]
            if lost := [rank for rank in lost if not self._store.check([f"parted/{rank}"])]:
                return ProcessesError(f"{self._name(lost)} gave no sign of life, what was to come from there is lost: {GO_ON}")
            self._raise_told(of_victims=True)
        except ProcessesError as known:
            return known
        except RuntimeError as gone:
            return self._without_store(gone)
        return None

    def fail(self, error: BaseException) -> None:
        """Tell the others what ends this process."""
        with contextlib.suppress(RuntimeError):  # the store is gone: the others know that by themselves
            self._store.set(f"failed/{self._ranks.rank}", f"{type(error).__name__}: {' '.join(str(error).split())}")

    def leave(self) -> None:
        """No more signs of life. The first process goes last, or after some beats: it may keep the store, in which the others
        look up what happened."""
        self._is_over.set()
        self._thread.join()
        parted = [f"parted/{rank}" for rank in self._others]
        with contextlib.suppress(RuntimeError):  # as above
            self._store.set(f"parted/{self._ranks.rank}", "")
            for _ in range(20 * LINGERS if self._ranks.is_first else 0):
                if self._store.check(parted):
                    return
                time.sleep(self._beat_s / 20)

    def _live(self, store: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread is told so when it asks for something
            while not self._is_over.wait(self._beat_s):
                store.add(f"alive/{self._ranks.rank}", 1)

    def _until_all(self, keys: Sequence[str]) -> None:
        silence, pause_s = _Silence(self), 0.001
        while missing := [key for key in keys if not self._store.check([key])]:
            time.sleep(pause_s)
            self._raise_told(of_victims=True)
            silence.look([int(key.rpartition("/")[2]) for key in missing], pause_s)
            if lost := [rank for rank in self._others if silence.of(rank) > self._lost_after_s]:
                raise ProcessesError(f"{self._name(lost)} gave no sign of life for {self._lost_after_s:.0f} s: {GO_ON}")
            keys, pause_s = missing, min(1.5 * pause_s, self._beat_s)

    def _raise_told(self, of_victims: bool) -> None:
        """Raises ProcessesError when a process has told what ended it; `of_victims`: also that it was another one."""
        told = {
            rank: self._store.get(f"failed/{rank}").decode() for rank in self._others if self._store.check([f"failed/{rank}"])
        }
        own = {rank: text for rank, text in told.items() if not text.startswith(VICTIM)}
        for rank, text in own.items():
            raise ProcessesError(f"{self._name([rank])} ended with {text}: {GO_ON}")
        if told and of_victims:
            raise ProcessesError(next(iter(told.values())).removeprefix(VICTIM))

    def num_beats(self, rank: int) -> int:
        """Signs of life of a process so far."""
        return self._store.add(f"alive/{rank}", 0)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Around what asks the store."""
        try:
            yield
        except ProcessesError:
            raise
        except RuntimeError as error:
            raise self._without_store(error) from error

    def _without_store(self, error: BaseException) -> ProcessesError:
        told = f"{' '.join(str(error).split()):.200}"
        return ProcessesError(f"{self._name([0])}, or torchrun, which keeps the processes together, is gone ({told}): {GO_ON}")

    def _name(self, ranks: Sequence[int]) -> str:
        return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._ranks.world} (counted from 0)"


class _Silence:
    """How long processes have been silent, by the pauses of whoever looks: a machine that slept or was stopped counts none."""

    def __init__(self, roll: Roll) -> None:
        self._roll = roll
        self._heard: dict[int, tuple[int, float]] = {}
        """Rank -> (signs of life, seconds since the latest)."""

    def look(self, ranks: Sequence[int], seconds: float) -> None:
        for rank in ranks:
            number, (before, silent_s) = self._roll.num_beats(rank), self._heard.get(rank, (-1, 0.0))
            self._heard[rank] = number, silent_s + seconds if number == before else 0.0

    def of(self, rank: int) -> float:
        return self._heard.get(rank, (0, 0.0))[1]


@contextlib.contextmanager
def process_group(
    ranks: Ranks, device: str, step_timeout_minutes: float = 30.0, beat_s: float = BEAT_S
) -> Iterator[Callable[[], None]]:
    """torchrun's process group, if there is one; the value given waits until all processes are there, however long it takes.

    Raises ConfigError for more processes than GPUs; ProcessesError when processes do not find each other, and in the others
    when one ends with an error, is lost, or lets them wait longer than `step_timeout_minutes` for what a step sends.
    """
    if ranks.world == 1:
        yield lambda: None
        return
    is_gpu = device != "cpu" and torch.cuda.is_available()
    if is_gpu and ranks.local >= (number := torch.cuda.device_count()):
        raise ConfigError(
            f"{ranks.local + 1} processes or more are to run on this machine, a GPU each, and it has {number} GPUs: "
            f"start torchrun with --nproc-per-node {number}, or add --device cpu"
        )
    if is_gpu:
        torch.cuda.set_device(ranks.local)
    remedy = "start all of them with one torchrun, or with its variables: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE"
    with reraised(ProcessesError, f"the {ranks.world} processes did not find each other", remedy, RuntimeError, ValueError):
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timedelta(minutes=JOIN_MINUTES)))
        roll = Roll(dist.PrefixStore("paceline", store), ranks, beat_s)
        try:
            dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                store=dist.PrefixStore("group", store),
                rank=ranks.rank,
                world_size=ranks.world,
                timeout=timedelta(minutes=step_timeout_minutes),
            )
        except RuntimeError as error:  # one that was there may have ended since
            if lost := roll.lost():
                raise lost from error
            raise
    try:
        yield roll.wait
        roll.wait()
    except BaseException as error:
        if not _is_of_group(error):
            roll.fail(error)
            raise
        blamed = roll.blame(error)
        roll.fail(blamed)
        raise blamed from error
    finally:
        roll.leave()
        gc.collect()  # sharded networks hold the group in circles; its threads must not outlive the interpreter
        dist.destroy_process_group()


def _is_of_group(error: BaseException) -> bool:
    """Whether a collective failed; gloo raises RuntimeError itself."""
    if not isinstance(error, RuntimeError) or isinstance(error, ProcessesError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
