"""Ray Data shares work among the machines of a cluster: actors that hold the target, batches of prompts or documents to them.

    with connected(where) as ray:
        for found in shared_out(ray, where, job, asked, at_most=64): ...

A Job says what a worker loads and what it makes of a batch. What Ray does by itself is left to it: batches go to workers that
are free, a worker that dies is started again and its batch given to another one, and a batch that was lost with a machine is
made again. Errors of ours would only come again: they are raised here, and end the work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from paceline import errors
from paceline.errors import ConfigError, DownloadError, PacelineError, needing, reraised
from paceline.train.config import ElsewhereConfig

LOCAL = "local"
BATCHES_PER_WORKER = 4
"""At least, as far as there is work for so many: a slow worker leaves the others less to wait for."""
MOST_DEATHS = 8
"""Of one worker, and of the workers that had one batch; beyond, something kills them all, as a model too large for memory."""

Work = Callable[[list[Any]], list[Any]]
"""What makes results of a batch."""


class Job(Protocol):
    """Sent to the workers, pickled; so are the things that are asked, and their results."""

    def begin(self, num_threads: int | None) -> Work:
        """Load what is needed. `num_threads`: of a worker without a GPU."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """What each worker has of the cluster."""

    num_workers: int
    num_cpus: float
    num_gpus: float

    @classmethod
    def of(cls, machines: Sequence[Mapping[str, float]], asked: int | None) -> Share:
        """One worker for each GPU, else for each machine, unless so many are asked for. `machines`: the resources of each, of
        which those without a processor for Ray count nothing. Raises ConfigError where there are too few."""
        useful = [each for each in machines if each.get("CPU", 0) > 0]
        if not useful:
            raise ConfigError("the Ray cluster has no machine with processors: start workers (ray start --address ...)")
        gpus = sum(int(each.get("GPU", 0)) for each in useful)
        if gpus:
            if (asked or gpus) > gpus:
                raise ConfigError(f"ray_workers {asked}: the cluster has {gpus} GPUs, and each worker takes one")
            return cls(asked or gpus, 1.0, 1.0)
        number = asked or len(useful)
        each = min(machine["CPU"] for machine in useful) / -(-number // len(useful))
        return cls(number, float(int(each)) if each >= 1 else each, 0.0)


@dataclass(frozen=True, slots=True)
class Made:
    """What a worker made of one batch."""

    found: list[Any]
    error: tuple[str, str] | None = None
    """The name of an error of ours, and its text."""


class Worker:
    """An actor of Ray Data: one row for each batch."""

    def __init__(self, job: Job, num_threads: int | None) -> None:
        self._error: PacelineError | None = None
        try:
            self._work = job.begin(num_threads)
        except PacelineError as error:
            self._error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Made]]:
        try:
            if self._error is not None:
                raise self._error
            return {"made": [Made(self._work(list(batch["asked"])))]}
        except PacelineError as error:
            return {"made": [Made([], (type(error).__name__, str(error)))]}


@contextlib.contextmanager
def connected(where: ElsewhereConfig) -> Iterator[ModuleType]:
    """Within, this process has the cluster at `where.ray`; one that it had before is used and kept.

    Raises ConfigError without Ray, DownloadError when there is no such cluster.
    """
    with needing(ConfigError, "--ray needs Ray: pip install 'paceline[ray]', here and on every machine of the cluster"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unasked
        import ray
        import ray.data
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    options |= {"include_dashboard": False} if where.ray == LOCAL else {"address": where.ray}
    remedy = "start one (ray start --head), or give auto, HOST:PORT or local"
    with reraised(DownloadError, f"there is no Ray cluster at {where.ray}", remedy, ConnectionError, OSError, ValueError):
        ray.init(**options)
    try:
        yield ray
    finally:
        ray.shutdown()


def shared_out(ray: ModuleType, where: ElsewhereConfig, job: Job, asked: Sequence[Any], at_most: int) -> Iterator[Any]:
    """Results of everything asked, in any order; a batch has `at_most` of it. Raises what a worker raised of ours, and
    DownloadError when the cluster fails."""
    if not asked:
        return
    share = Share.of([each["Resources"] for each in ray.nodes() if each["Alive"]], where.ray_workers)
    size = max(1, min(at_most, len(asked) // (BATCHES_PER_WORKER * share.num_workers)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    threads = None if share.num_gpus else max(1, int(share.num_cpus))
    remedy = "see its logs, and run again: what is done stays"
    with reraised(DownloadError, "the Ray cluster failed", remedy, ray.exceptions.RayError):
        rows = ray.data.from_items([{"asked": each} for each in asked], override_num_blocks=-(-len(asked) // size))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of ray_remote_args_fn, which goes with 2.64
            made = rows.map_batches(
                Worker,
                fn_constructor_kwargs={"job": job, "num_threads": threads},
                compute=ray.data.ActorPoolStrategy(size=share.num_workers),
                num_cpus=share.num_cpus,
                num_gpus=share.num_gpus,
                batch_size=size,
                ray_remote_args_fn=lambda deaths=MOST_DEATHS: {"max_restarts": deaths, "max_task_retries": deaths},
            )
        for row in made.iter_rows():
            if row["made"].error:
                name, text = row["made"].error
                raise getattr(errors, name, PacelineError)(text)
            yield from row["made"].found
