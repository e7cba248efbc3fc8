"""Memory bandwidth and arithmetic throughput of a machine, from data sheets or measured on this one.

Decoding reads all weights in every pass, so bandwidth / size of the weights is the upper limit of plain decoding at
batch size 1 (`ceiling_tokens_per_s`). torch is imported inside functions, because predictions need only the dataclass.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """A device with its peak memory bandwidth and arithmetic throughput."""

    name: str
    bytes_per_s: float
    """Bandwidth of reads from memory, in bytes per second."""
    flops_per_s: dict[str, float]
    """FLOP/s of dense matrix products for each number format: float4, float8, bfloat16, float32."""
    num_threads: int
    """CPU threads used in the measurement; 0 for a GPU."""
    memory_bytes: int
    link_bytes_per_s: float = 0.0
    """One-way bandwidth to another device of this type, in bytes per second; 0 if unknown or without a link."""
    cached_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Buffer size in bytes -> bandwidth of repeated reads, which caches speed up. Measured on CPUs only."""

    def read_bytes_per_s(self, num_bytes: int) -> float:
        """Return the bandwidth of repeated reads of a buffer of `num_bytes`, in bytes per second. CPU caches can raise
        it above `bytes_per_s`."""
        sizes = [int(size) for size in self.cached_bytes_per_s]
        least = max((size for size in sizes if size <= num_bytes), default=0)
        return max([self.bytes_per_s, *(rate for size, rate in self.cached_bytes_per_s.items() if int(size) >= least)])

    def ceiling_tokens_per_s(self, weight_bytes: int) -> float:
        """Return the upper limit of plain decoding for one request, in tokens per second. It is bandwidth over
        `weight_bytes`, because every token reads all weights once."""
        return self.read_bytes_per_s(weight_bytes) / weight_bytes


def device_name(device: str = "cpu") -> str:
    """Returns the name of the GPU or CPU."""
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else cpu_name()


def this_machine(device: str = "cpu") -> Machine:
    """Measure the memory bandwidth and FLOP/s of a device, each as the best of a few runs. Takes less than a second."""
    import torch

    where = torch.device(device)
    with torch.inference_mode():
        is_gpu = where.type == "cuda"
        capacity = torch.cuda.get_device_properties(where).total_memory if is_gpu else memory_bytes()
        *cached, memory_rate = _read_bytes_per_s(where, _SIZES if where.type == "cpu" else _SIZES_GPU)
        return Machine(
            device_name(device),
            memory_rate,
            _matmul_flops_per_s(where),
            0 if is_gpu else torch.get_num_threads(),
            capacity,
            cached_bytes_per_s={str(size): rate for size, rate in zip(_SIZES, cached, strict=False)},
        )


_SIZES, _SIZES_GPU = (2**20, 2**22, 2**24, 2**26, 2**28), (2**30,)
"""Sizes in bytes of the buffers that are read repeatedly; the last one exceeds the caches."""


def _read_bytes_per_s(device: torch.device, sizes: tuple[int, ...]) -> list[float]:
    """Return the read bandwidth for each buffer size: the better of two pure reads, a sum and a product with a
    vector."""
    buffer, vector = _numbers(sizes[-1] // 4096, 1024, device=device), _numbers(1024, device=device)
    rates = []
    for size in sizes:
        part = buffer[: size // 4096]
        works = (part.sum, lambda part=part: part @ vector)
        rates.append(size / min(_best_s(work, device, budget_s=0.02) for work in works))
    return rates


def _matmul_flops_per_s(device: torch.device) -> dict[str, float]:
    import torch

    sizes = (256, 1024) if device.type == "cpu" else (8192,)
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for size in sizes:
            left = _numbers(size, size, device=device).to(dtype)
            rates[name] = 2 * size**3 / _best_s(lambda left=left: left @ left, device, budget_s=0.06)
            if 2 * sizes[-1] ** 3 / rates[name] > 0.6:
                break  # a processor without bfloat16 emulates it: one large product would take seconds
    return rates


def _numbers(*shape: int, device: torch.device) -> torch.Tensor:
    """Return random numbers on a GPU, which multiplies equal numbers faster than real weights, and ones on the CPU."""
    import torch

    return torch.randn(shape, device=device) if device.type == "cuda" else torch.ones(shape, device=device)


_QUEUED = 4
"""Runs between two GPU events: runs are launched ahead, so that the host's latency does not count."""


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run; on a GPU they are measured with events."""
    import torch

    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    for _ in range(_QUEUED):
        work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / _QUEUED


def _best_s(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the seconds of the fastest run, since other programs only slow a run down. Makes at least three."""
    best, began, runs = float("inf"), time.perf_counter(), 0
    while runs < 3 or time.perf_counter() - began < budget_s:
        best = min(best, _seconds(work, device))
        runs += 1
        if time.perf_counter() - began > 10 * budget_s:
            break
    return best


def processor() -> dict[str, object]:
    """Return {"name": the CPU's name, "num_cores": number of cores that this process may use}."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": cpu_name(), "num_cores": cores}


def cpu_name() -> str:
    """Return the CPU model name reported by the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "cpu"


def memory_bytes() -> int:
    """Return the machine's total memory in bytes; 0 if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a Unix
        return 0


def free_bytes() -> int | None:
    """Return the bytes of memory available without swapping, within the container's limit; None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, StopIteration, ValueError):  # int("max") fails: there is no limit
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = next(line for line in (group / "memory.stat").read_text().splitlines() if line.startswith("file "))
        limits.append(max(limit - used + int(cached.split()[1]), 0))
    return min(limits, default=None)


class BusyClock:
    """Measures how much CPU time other processes have used since its creation. Linux only; on other systems it measures
    0."""

    def __init__(self) -> None:
        self._began = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return seconds of (the monotonic clock, busy time of all CPUs, CPU time of this process)."""
        busy = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
            ticks = [int(count) for count in first.split()[1:9]]
            busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle and waiting for a disk left out
        own = os.times()
        return time.monotonic(), busy, own.user + own.system

    def others_share(self) -> float:
        """Return the CPU time used by other processes since creation, as a share (0 to 1) of the time of all cores.
        Child processes of this process count as others. In a virtual machine, the time that the host withheld is
        included."""
        wall_s, busy_s, own_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))) if wall_s else 0.0
