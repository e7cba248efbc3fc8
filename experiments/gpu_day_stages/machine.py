"""Stages 0 and 1: which machine this is, and its ceilings."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from importlib.metadata import distributions

import torch

from gpu_day_stages.models import Clock, datasheet_rate, summary
from gpu_day_stages.visit import Visit, nvidia_smi

MODULES = ("paceline.engine.llm", "paceline.train.run", "paceline.bench.runs", "paceline.draft.registry")
WANTED = ("gguf", "llguidance", "fastapi", "scipy", "pyarrow", "pytest", "safetensors", "tokenizers", "triton")
QUERY = "name,driver_version,memory.used,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def env(visit: Visit) -> None:
    """Versions, card, driver and clocks; passes when the package's parts import and the device computes."""
    present = {each.metadata["Name"].lower(): each.version for each in distributions()}
    visit.report("packages", versions={name: present.get(name) for name in ("torch", "transformers", "numpy", *WANTED)})
    visit.report("card", **card(visit.device))
    for name in MODULES:
        began = time.perf_counter()
        with visit.part(f"import {name}"):
            importlib.import_module(name)
            visit.check(f"import {name}", True, seconds=time.perf_counter() - began)
    with visit.part("native library"):
        from paceline.model.native import library as native_lib

        visit.report("native library", is_there=native_lib.load() is not None)
    values = torch.arange(5.0, device=visit.device)
    visit.check("the device computes", float((values * values).sum()) == 30.0)


def card(device: str) -> dict[str, object]:
    if torch.device(device).type != "cuda":
        return {"name": device, "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    figures: dict[str, object] = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "datasheet_bytes_per_s": datasheet_rate(device),
    }
    return figures | nvidia_smi(QUERY)


def ceilings(visit: Visit) -> None:
    """Bandwidth of reading and copying, matrix products, and what the host's part in a kernel costs."""
    device, clock = torch.device(visit.device), Clock(visit.device)
    size = visit.sized(2**32, 2**20)
    buffer = torch.randn(size // 4096, 1024, device=device)
    vector = torch.randn(1024, device=device)
    ways = {"sum": buffer.sum, "product with a vector": lambda: buffer @ vector}
    times = {way: clock.samples(work, visit.sized(15, 3)) for way, work in ways.items()}
    best = min(times, key=lambda way: statistics.median(times[way]))
    rate = size / (1e-3 * statistics.median(times[best]))
    datasheet = datasheet_rate(visit.device)
    every = {way: size / (1e-3 * statistics.median(samples)) for way, samples in times.items()}
    share = rate / datasheet if datasheet else None
    figures = {"by": best, "all_bytes_per_s": every, "share_of_datasheet": share}
    visit.report("read", ms=summary(times[best]), bytes_per_s=rate, **figures)
    other = torch.empty_like(buffer)
    samples = clock.samples(lambda: other.copy_(buffer), visit.sized(15, 3))
    visit.report("copy", ms=summary(samples), bytes_per_s=2 * size / (1e-3 * statistics.median(samples)))
    for name in ("bfloat16", "float32", "float8_e4m3fn"):
        with visit.part(f"matmul {name}"):
            products(visit, clock, name)
    if device.type == "cuda":
        with visit.part("host costs"):
            host_costs(visit, clock)


def products(visit: Visit, clock: Clock, name: str) -> None:
    """A square product of random numbers; ones or zeros would run faster than real data."""
    size, dtype = visit.sized(8192, 64), getattr(torch, name)
    left, right = (torch.randn(size, size, device=visit.device).to(dtype) for _ in range(2))
    work: Callable[[], object]
    if name.startswith("float8"):
        if torch.device(visit.device).type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
            visit.leave_out(f"matmul {name}", "this device has no such products")
            return
        one = torch.ones((), device=visit.device)
        work = lambda: torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    else:
        work = lambda: left @ right  # noqa: E731
    samples = clock.samples(work, visit.sized(10, 2))
    visit.report(f"matmul {name}", ms=summary(samples), flops_per_s=2 * size**3 / (1e-3 * statistics.median(samples)))


def host_costs(visit: Visit, clock: Clock) -> None:
    """Microseconds of a launch, of a node of a graph, of a small upload, of waiting for an event and of a read-back."""
    small, number = torch.zeros(256, device=visit.device), 1000

    def many() -> None:
        for _ in range(number):
            small.add_(1.0)

    began = time.perf_counter()
    many()
    host_us = 1e6 * (time.perf_counter() - began) / number
    visit.report("launch", us=1e3 * statistics.median(clock.samples(many, 5)) / number, host_us=host_us)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        many()
    visit.report("graph node", us=1e3 * statistics.median(clock.samples(graph.replay, 10)) / number)
    pageable, there = torch.zeros(64, dtype=torch.long), torch.zeros(64, dtype=torch.long, device=visit.device)
    pinned, event = pageable.pin_memory(), torch.cuda.Event()

    def waited() -> None:
        small.add_(1.0)
        event.record()
        event.synchronize()

    host: dict[str, Callable[[], object]] = {
        "small upload, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "small upload, pageable": lambda: there.copy_(pageable),
        "launch and event wait": waited,
        "launch and read-back": lambda: float(small.add_(1.0)[0]),
    }
    for name, work in host.items():
        began = time.perf_counter()
        for _ in range(200):
            work()
        visit.report(name, us=1e6 * (time.perf_counter() - began) / 200)
