"""Measures the time of target passes by number of tokens before serving starts; the planner starts with these costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from paceline.model.target import ForwardBatch, Target
from paceline.plan.costs import PassCosts

Timer = Callable[[Callable[[], object]], float]
"""Runs its argument and returns the seconds that this took."""
_MEASURE_S, _MOST_TURNS = 0.3, 8
_ALIKE, _MOST_S = 1.2, 3.0
"""A time counts as undisturbed if another run of the same size took at most 1.2 times as long; most seconds spent to
find such times."""


def measure_passes(target: Target, most: int, width: int | None = None) -> PassCosts:
    """Measure the time of target passes of several sizes, up to `most` tokens; returns the costs, interpolated between
    the measured sizes. All rows of the cache must be free.

    - Sizes: on CUDA 1, 8, 16, 64, 128, 256, ... and `most`; on other devices powers of two.
    - `width`: on CUDA, the maximum tokens per row; None: as many as a row holds, as always on other devices.
    - Each size runs once untimed and then up to 8 times; the fastest run counts. All timed runs together take about 0.3
      seconds. Large sizes that do not fit into this time are not measured.
    - One token and the largest size up to `width` (None: `most`) are always measured, because plans depend on the ratio
      of their times. Their runs may exceed the 0.3 seconds: they continue until two times differ by at most 20%, or
      until all runs together have taken 3 seconds.
    """
    on_cuda = target.device.type == "cuda"
    sizes = _cuda_sizes(most) if on_cuda else [1 << power for power in range(max(most.bit_length(), 2))]
    seconds_of: Timer = partial(_event_seconds, target.device) if on_cuda else _clock_seconds
    needed = (1, max(size for size in sizes if size <= max(width or most, sizes[1])))
    spent, best, undisturbed = 0.0, dict[int, float](), set[int]()
    for _ in range(_MOST_TURNS):
        for size in (*needed, *(size for size in sizes if size not in needed)):
            smaller = max((each for each in best if each < size), default=0)
            expected = best.get(size, best[smaller] * size / smaller if smaller else 0.0)
            is_needed = size in needed and size not in undisturbed and spent < _MOST_S
            if spent + expected > _MEASURE_S and not is_needed:
                continue
            if size not in best:
                _timed(target, size, width if on_cuda else None, _clock_seconds)
            began = time.perf_counter()
            seconds = _timed(target, size, width if on_cuda else None, seconds_of)
            spent += time.perf_counter() - began
            known = best.get(size, math.inf)
            if seconds / _ALIKE <= known <= seconds * _ALIKE:
                undisturbed.add(size)
            best[size] = min(known, seconds)
    return PassCosts(sorted(best.items()))


def _cuda_sizes(most: int) -> list[int]:
    sizes = [1, 8, 16, *(64 << power for power in range(max(most.bit_length() - 6, 0)))]
    most = max(most, 2)
    return [*(size for size in sizes if size < most), most]


def _timed(target: Target, num_positions: int, width: int | None, seconds_of: Timer) -> float:
    """Seconds of one pass, scaled to `num_positions` if the rows hold fewer."""
    cache = target.cache
    count = min(num_positions, cache.max_len, width or num_positions)
    num_rows = min(-(-num_positions // count), cache.num_rows)
    rows = [row for row in (cache.allocate() for _ in range(num_rows)) if row is not None]
    assert len(rows) == num_rows, "passes are measured before any request"
    num_tokens = count * num_rows
    batch = ForwardBatch(rows, [0] * num_rows, [count] * num_rows, [0] * num_tokens, only_argmax=True)
    spent = seconds_of(lambda: target.forward(batch).best_T())
    cache.rollback(rows, [0] * num_rows)
    for row in rows:
        cache.free(row)
    return spent * num_positions / num_tokens


def _clock_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _event_seconds(device: torch.device, run: Callable[[], object]) -> float:
    with torch.cuda.device(device):  # events are recorded on the current device's stream
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3
