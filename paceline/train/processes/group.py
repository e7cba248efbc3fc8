"""The processes of one run: torchrun's group, with a liveness check between stages that waits for slow processes.

A stage (answers, features, serving held-out prompts) may take hours longer in one process than in another; a step may
not. So communication within a step has a timeout; `Liveness.wait`, between stages, waits as long as the missing
processes send heartbeats, one every `BEAT_S`, through torchrun's store. A process that fails reports its error there;
one without heartbeats for `LOST_AFTER_S` is reported as lost.

    wait/<n>/<rank>   this process is at its n-th wait      alive/<rank>   heartbeats so far
    failed/<rank>     error that ended this process         parted/<rank>  it has left
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
"""Seconds without a heartbeat after which a process is lost: reading a large file may block one for minutes."""
LINGERS = 10
"""Heartbeats that the first process waits after an error before it leaves; the others need half as many to find the
failed process."""
JOIN_MINUTES = 10.0
"""Minutes that processes wait for each other at the beginning, as machines may start late."""
VICTIM = "ProcessesError: "
"""Prefix of the reported error of a process that ended because of another process."""
GO_ON = "what is finished is kept: start all processes again with the same command"


class Liveness:
    """Detects failed training processes: every process regularly sends a heartbeat to the others through a shared
    store. The heartbeats are sent by a background thread. Also has a barrier, `wait`. Its methods must be called from a
    single thread."""

    def __init__(self, store: Any, ranks: Ranks, beat_s: float = BEAT_S, lost_after_s: float = LOST_AFTER_S) -> None:
        """`store`: a store of torch.distributed that all processes share."""
        self._store, self._ranks, self._beat_s, self._lost_after_s = store, ranks, beat_s, lost_after_s
        self._others = [rank for rank in range(ranks.world) if rank != ranks.rank]
        self._num_waits = 0
        self._is_over = threading.Event()
        store.add(f"alive/{ranks.rank}", 1)
        # A separate connection, since a request of the main thread may block.
        self._thread = threading.Thread(target=self._live, args=(store.clone(),), name="paceline-alive", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until all processes have called it, without a timeout. Raises ProcessesError if another process fails
        or sends no more heartbeats."""
        self._num_waits += 1
        try:
            self._store.set(f"wait/{self._num_waits}/{self._ranks.rank}", "")
            self._until_all([f"wait/{self._num_waits}/{rank}" for rank in self._others])
        except ProcessesError:
            raise
        except RuntimeError as error:  # of the store
            raise self._without_store(error) from error

    def blame(self, error: BaseException) -> ProcessesError:
        """Returns the error to raise after a collective operation has failed with `error`. The message names a process
        that failed or sends no heartbeats. If all are alive, it says that some process is slow or hangs."""
        if lost := self.lost():
            return lost
        reason = f"{' '.join(str(error).split()):.200}"
        return ProcessesError(
            f"{self._name([self._ranks.rank])} waited in vain for what others were to send in a step ({reason}): one "
            f"is slow or hangs, see what each does; a longer --step-timeout-minutes waits longer; {GO_ON}"
        )

    def lost(self) -> ProcessesError | None:
        """Returns an error that names a process which failed or sends no heartbeats; None if all others are alive."""
        try:
            silence = _Silence(self)
            for _ in range(LINGERS // 2):
                time.sleep(self._beat_s)
                self._raise_reported(of_victims=False)
                silence.look(self._others, self._beat_s)
            lost = [rank for rank in self._others if silence.of(rank) >= 3 * self._beat_s]
            if lost := [rank for rank in lost if not self._store.check([f"parted/{rank}"])]:
                return ProcessesError(
                    f"{self._name(lost)} gave no sign of life, what was to come from there is lost: {GO_ON}"
                )
            self._raise_reported(of_victims=True)
        except ProcessesError as known:
            return known
        except RuntimeError as gone:
            return self._without_store(gone)
        return None

    def fail(self, error: BaseException) -> None:
        """Reports to the other processes that this process ends because of `error`."""
        with contextlib.suppress(RuntimeError):  # without the store, the others notice by themselves
            self._store.set(f"failed/{self._ranks.rank}", f"{type(error).__name__}: {' '.join(str(error).split())}")

    def leave(self) -> None:
        """Stops the heartbeats, and reports to the other processes that this one has left. The first process may host
        the store, so it also waits, for a limited time, until the others have left."""
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
        with contextlib.suppress(RuntimeError):  # without the store, the main thread's next request fails
            while not self._is_over.wait(self._beat_s):
                store.add(f"alive/{self._ranks.rank}", 1)

    def _until_all(self, keys: Sequence[str]) -> None:
        silence, pause_s = _Silence(self), 0.001
        while missing := [key for key in keys if not self._store.check([key])]:
            time.sleep(pause_s)
            self._raise_reported(of_victims=True)
            silence.look([int(key.rpartition("/")[2]) for key in missing], pause_s)
            if lost := [rank for rank in self._others if silence.of(rank) > self._lost_after_s]:
                raise ProcessesError(f"{self._name(lost)} gave no sign of life for {self._lost_after_s:.0f} s: {GO_ON}")
            keys, pause_s = missing, min(1.5 * pause_s, self._beat_s)

    def _raise_reported(self, of_victims: bool) -> None:
        """Raises ProcessesError if another process has reported an error. `of_victims`: also if a third one caused
        it."""
        reports = {
            rank: self._store.get(f"failed/{rank}").decode()
            for rank in self._others
            if self._store.check([f"failed/{rank}"])
        }
        own = {rank: text for rank, text in reports.items() if not text.startswith(VICTIM)}
        for rank, text in own.items():
            raise ProcessesError(f"{self._name([rank])} ended with {text}: {GO_ON}")
        if reports and of_victims:
            raise ProcessesError(next(iter(reports.values())).removeprefix(VICTIM))

    def num_beats(self, rank: int) -> int:
        """Returns the number of heartbeats that process `rank` has sent so far."""
        return self._store.add(f"alive/{rank}", 0)

    def _without_store(self, error: BaseException) -> ProcessesError:
        reason = f"{' '.join(str(error).split()):.200}"
        return ProcessesError(
            f"{self._name([0])}, or torchrun, which keeps the processes together, is gone ({reason}): {GO_ON}"
        )

    def _name(self, ranks: Sequence[int]) -> str:
        return f"process{'es' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {self._ranks.world} (counted from 0)"


class _Silence:
    """Measures how long processes have been silent, in the caller's pauses, so that a suspended machine does not
    count."""

    def __init__(self, liveness: Liveness) -> None:
        self._roll = liveness
        self._heard: dict[int, tuple[int, float]] = {}
        """Rank -> (heartbeats, seconds since the latest)."""

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
    """Context manager: connects the processes that torchrun started to a process group; does nothing for a single
    process. Yields a function that waits until all processes have called it, without a timeout.
    - `device`: "cpu" selects gloo; otherwise NCCL with one GPU per process, if there are GPUs.
    - `beat_s`: seconds between heartbeats.

    Raises ConfigError for more processes than GPUs. Raises ProcessesError if processes do not find each other, or if
    another one fails, sends no more heartbeats, or keeps a step waiting for more than `step_timeout_minutes`."""
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
    what = f"the {ranks.world} processes did not find each other"
    with reraised(ProcessesError, what, remedy, RuntimeError, ValueError):
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timedelta(minutes=JOIN_MINUTES)))
        liveness = Liveness(dist.PrefixStore("paceline", store), ranks, beat_s)
        try:
            dist.init_process_group(
                "nccl" if is_gpu else "gloo",
                store=dist.PrefixStore("group", store),
                rank=ranks.rank,
                world_size=ranks.world,
                timeout=timedelta(minutes=step_timeout_minutes),
            )
        except RuntimeError as error:  # a process that had joined may have ended
            if lost := liveness.lost():
                raise lost from error
            raise
    try:
        yield liveness.wait
        liveness.wait()
    except BaseException as error:
        if not _is_of_group(error):
            liveness.fail(error)
            raise
        blamed = liveness.blame(error)
        liveness.fail(blamed)
        raise blamed from error
    finally:
        liveness.leave()
        gc.collect()  # sharded networks hold the group in reference cycles; its threads must end before the interpreter
        dist.destroy_process_group()


def _is_of_group(error: BaseException) -> bool:
    """Returns True for the error of a collective; gloo raises a plain RuntimeError."""
    if not isinstance(error, RuntimeError) or isinstance(error, ProcessesError):
        return False
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL"))
