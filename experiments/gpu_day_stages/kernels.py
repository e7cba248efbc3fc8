"""The stage `kernels`: each Triton kernel against its PyTorch twin on the device, and its time beside what it replaced.

Those of a layer have a stage of their own, `layer_kernels`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_day_stages.attention_cases import CASES, by_loop, difference
from gpu_day_stages.mixture_kernels import a_delta_net, experts_of_a_layer
from gpu_day_stages.models import Clock, free_memory, graphed, shape_of, shares, summary
from gpu_day_stages.visit import Visit
from paceline.model.torch.attention import attend_rows
from paceline.model.torch.kernels.attend import Sight, attend, run_kernels, twin
from paceline.model.torch.kernels.available import can_use

ROTATED_BYTES = 256 * 2**20
"""Caches that a timed graph reads one after another: more than a GPU keeps in its own caches."""


def kernels(visit: Visit) -> None:
    """All of PARTS; on a device without kernels the twins are checked instead."""
    if torch.device(visit.device).type == "cuda":
        visit.check("Triton and a C compiler are there", can_use(visit.device))
    for part in PARTS:
        with visit.part(part.__name__.replace("_", " ")):
            part(visit)
        free_memory()


def attention_is_right(visit: Visit) -> None:
    """The cases of attention_cases.py, the most telling first, on poisoned memory and dead positions."""
    has_kernels = can_use(visit.device)
    run, reference = (run_kernels, twin) if has_kernels else (twin, by_loop)
    first = ("bfloat16, large tiles", "idle rows", "cap, sinks, window, tree", "block within a window", "heads of 256")
    names = [*first, *visit.sized([name for name in CASES if name not in first], [])]
    for seed, name in enumerate(names):
        if visit.left_s < 15:  # each compiles anew; the times are worth more than the last of them
            visit.leave_out(f"attention: {len(names) - seed} cases", "the time is kept for measuring")
            break
        with visit.part(f"attention: {name}"):
            error, most = difference(CASES[name], run, reference, seed, visit.device), CASES[name].tolerance
            visit.check(f"attention: {name}", error < most, largest_difference=error, tolerance=most)


def attention_times(visit: Visit) -> None:
    """One layer's attention within a graph, beside the masked products that it replaced."""
    for context in visit.sized((4096, 256, 16384, 32768), (40,)):
        for name in ("8B", "27B"):
            for count in (1, 16):
                visit.need(2)
                _attention(visit, name, count, context)
                free_memory()


def _attention(visit: Visit, name: str, count: int, context: int) -> None:
    own, dtype = shape_of(visit, name), visit.sized(torch.bfloat16, torch.float32)
    kind: dict[str, Any] = {"dtype": dtype, "device": visit.device}
    read = 2 * own.num_kv_heads * (context + count) * own.head_dim * dtype.itemsize
    layers = max(2, min(own.num_layers, ROTATED_BYTES // read))
    query_THD = torch.randn(count, own.num_heads, own.head_dim, **kind)
    caches = torch.randn(layers, 2, 1, own.num_kv_heads, context + count, own.head_dim, **kind)
    sight = _chain(count, context, visit.device)
    mask = torch.zeros(1, 1, own.num_heads // own.num_kv_heads * count, context + count, **kind)
    works: dict[str, Callable[[Tensor, Tensor], object]] = {
        "ms": lambda keys, values: attend(query_THD, keys, values, sight),
        "masked_ms": lambda keys, values: attend_rows(query_THD, keys, values, mask),
    }
    samples: dict[str, list[float]] = {}
    for way, work in works.items():
        clock = Clock(visit.device)
        replay = graphed(visit, lambda work=work: [work(*cache) for cache in caches])
        samples[way] = [each / layers for each in clock.samples(replay, visit.sized(20, 2))]
    figures = shares(visit, read, samples["ms"])
    rate = read / (1e-3 * statistics.median(samples["ms"]))
    visit.report(
        f"attention of {name}, {count} tokens behind {context}",
        **{way: summary(each) for way, each in samples.items()},
        bytes_per_s=rate,
        **figures,
    )


def _chain(count: int, start: int, device: str) -> Sight:
    slot_J = torch.arange(count, device=device)
    relation = {"depths_BJ": slot_J[None], "bits_BJ": ((2 << slot_J) - 1)[None]}
    return Sight(torch.tensor([start], device=device), torch.tensor([count], device=device), count, **relation)


PARTS: tuple[Callable[[Visit], None], ...] = (experts_of_a_layer, a_delta_net, attention_is_right, attention_times)
