"""Distributes work over a Ray cluster with Ray Data: actors hold the target and process batches of items.

    with connected(where) as ray:
        for result in distributed(ray, where, job, items, at_most=64): ...

A Job defines what a worker loads and how it processes a batch. Ray gives batches to idle workers, restarts a worker
that dies and retries its batch, and recomputes a batch that was lost with a machine. A PacelineError would only repeat,
so it is raised here and ends the work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from paceline import errors
from paceline.errors import ConfigError, DownloadError, PacelineError, needing, reraised
from paceline.train.config import RemoteConfig

LOCAL = "local"
BATCHES_PER_WORKER = 4
"""Batches per worker at least, if there is enough work, so that others wait less for a slow worker."""
MOST_DEATHS = 8
"""Most restarts of a worker, and retries of a batch; more have a common cause, such as a model that is too large."""

Work = Callable[[list[Any]], list[Any]]
"""Processes a batch: items -> results."""


class Job(Protocol):
    """A job for Ray workers: loads something once, such as a model, then processes batches of items. Jobs, items and
    results are sent by pickle."""

    def begin(self, num_threads: int | None) -> Work:
        """Loads what the work needs, such as a model; returns the function that processes batches. `num_threads`: CPU
        threads to use; None for a worker with a GPU."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
    """The number of workers, and the CPUs and GPUs of each."""

    num_workers: int
    num_cpus: float
    num_gpus: float

    @classmethod
    def of(cls, machines: Sequence[Mapping[str, float]], requested: int | None) -> Share:
        """Divides a cluster among workers. `machines`: the Ray resources of each machine, name -> amount; machines
        without CPU are ignored. `requested`: number of workers; None for one per GPU or, in a cluster without GPUs, one
        per machine. Raises ConfigError if no machine has CPUs, or if the cluster has GPUs but fewer than requested
        workers."""
        useful = [machine for machine in machines if machine.get("CPU", 0) > 0]
        if not useful:
            raise ConfigError("the Ray cluster has no machine with processors: start workers (ray start --address ...)")
        gpus = sum(int(machine.get("GPU", 0)) for machine in useful)
        if gpus:
            if (requested or gpus) > gpus:
                raise ConfigError(f"ray_workers {requested}: the cluster has {gpus} GPUs, and each worker takes one")
            return cls(requested or gpus, 1.0, 1.0)
        number = requested or len(useful)
        machine = min(machine["CPU"] for machine in useful) / -(-number // len(useful))
        return cls(number, float(int(machine)) if machine >= 1 else machine, 0.0)


class BatchResult(NamedTuple):
    """The results of one batch of items, or the PacelineError that the worker raised."""

    results: list[Any]
    error: tuple[str, str] | None = None
    """Name and text of the error."""


class Worker:
    """A Ray Data actor that runs a `Job` on batches of items. Each call processes one batch and returns {"made":
    [BatchResult]}, which is one row for Ray. Errors of the job are not raised, but stored in the BatchResult."""

    def __init__(self, job: Job, num_threads: int | None) -> None:
        self._error: PacelineError | None = None
        try:
            self._work = job.begin(num_threads)
        except PacelineError as error:
            self._error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[BatchResult]]:
        try:
            if self._error is not None:
                raise self._error
            return {"made": [BatchResult(self._work(list(batch["asked"])))]}
        except PacelineError as error:
            return {"made": [BatchResult([], (type(error).__name__, str(error)))]}


@contextlib.contextmanager
def connected(where: RemoteConfig) -> Iterator[ModuleType]:
    """Context manager: connects this process to the Ray cluster at `where.ray`, yields the module `ray`, and
    disconnects at the end. An existing connection is used, and stays open. Raises ConfigError if Ray is not installed,
    DownloadError if the cluster cannot be reached."""
    with needing(ConfigError, "--ray needs Ray: pip install 'paceline[ray]', here and on every machine of the cluster"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        import ray
        import ray.data
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    options |= {"include_dashboard": False} if where.ray == LOCAL else {"address": where.ray}
    remedy = "start one (ray start --head), or give auto, HOST:PORT or local"
    what = f"there is no Ray cluster at {where.ray}"
    with reraised(DownloadError, what, remedy, ConnectionError, OSError, ValueError):
        ray.init(**options)
    try:
        yield ray
    finally:
        ray.shutdown()


def distributed(ray: ModuleType, where: RemoteConfig, job: Job, items: Sequence[Any], at_most: int) -> Iterator[Any]:
    """Processes the items on the cluster with `job`, in batches of at most `at_most`; yields the results in any order.
    Re-raises the PacelineError of a worker. Raises DownloadError if the cluster fails, ConfigError if it has too few
    CPUs or GPUs for the workers."""
    if not items:
        return
    share = Share.of([node["Resources"] for node in ray.nodes() if node["Alive"]], where.ray_workers)
    size = max(1, min(at_most, len(items) // (BATCHES_PER_WORKER * share.num_workers)))
    ray.data.DataContext.get_current().enable_progress_bars = False
    threads = None if share.num_gpus else max(1, int(share.num_cpus))
    remedy = "see its logs, and run again: what is done stays"
    with reraised(DownloadError, "the Ray cluster failed", remedy, ray.exceptions.RayError):
        rows = ray.data.from_items([{"asked": item} for item in items], override_num_blocks=-(-len(items) // size))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of ray_remote_args_fn, which goes with 2.64
            batches = rows.map_batches(
                Worker,
                fn_constructor_kwargs={"job": job, "num_threads": threads},
                compute=ray.data.ActorPoolStrategy(size=share.num_workers),
                num_cpus=share.num_cpus,
                num_gpus=share.num_gpus,
                batch_size=size,
                ray_remote_args_fn=lambda deaths=MOST_DEATHS: {"max_restarts": deaths, "max_task_retries": deaths},
            )
        for row in batches.iter_rows():
            if row["made"].error:
                name, text = row["made"].error
                raise getattr(errors, name, PacelineError)(text)
            yield from row["made"].results
