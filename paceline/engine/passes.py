"""Seconds of target passes on this machine, measured when an engine starts: where a planner begins to learn from."""

from __future__ import annotations

import time

from paceline.learned import PassCosts
from paceline.model.target import ForwardBatch, Target

BUDGET_S = 0.2
LEAST_TURNS, MOST_TURNS = 2, 8


def measure_passes(target: Target, most: int, budget_s: float = BUDGET_S) -> PassCosts:
    """Time passes of 1, 2, 4, ... up to `most` positions on a free row, for `budget_s` seconds at most.

    Sizes take turns and the fastest of each counts: the machine changes its pace, and other programs disturb. A size that the
    first ones leave no time for is extrapolated.
    """
    began, best = time.perf_counter(), dict[int, float]()
    sizes = [1 << power for power in range(max(most.bit_length(), 2))]
    for turn in range(MOST_TURNS):
        for size in sizes:
            spent = time.perf_counter() - began
            expected = best.get(size, 2 * best.get(size // 2, 0.0))
            if best and spent + expected > budget_s and (turn >= LEAST_TURNS or len(best) >= 2):
                continue
            best[size] = min(best.get(size, float("inf")), _pass_seconds(target, size))
    return PassCosts(sorted(best.items()))


def _pass_seconds(target: Target, num_positions: int) -> float:
    row = target.cache.allocate()
    assert row is not None, "passes are measured before any request"
    count = min(num_positions, target.cache.max_len)
    batch = ForwardBatch([row], [0], [count], [0] * count, only_argmax=True)
    started = time.perf_counter()
    target.forward(batch).best_T()
    spent = time.perf_counter() - started
    target.cache.rollback([row], [0])
    target.cache.free(row)
    return spent * num_positions / count
