"""What a pass of the native library takes where others want the processor too: alone, then in two processes at once.

    python experiments/native_busy.py
    PACELINE_NATIVE_LIBRARY=other.so python experiments/native_busy.py      # another build of the library

Each process decodes one row at 200 tokens of context with all cores. Printed are mean, median and 90th percentile of a pass.
Two processes on the same cores cannot take less than twice as long each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from paceline import LLM
from paceline.model.target import ForwardBatch

CONTEXT = 200


def passes_s(model: str, seconds: float, begins_at: float) -> list[float]:
    """Seconds of each pass made between `begins_at`, by the clock, and `seconds` later."""
    target, taken = LLM(model, drafter="none", max_batch=1, max_len=2 * CONTEXT).target, list[float]()
    row = target.cache.allocate()
    assert row is not None
    target.forward(ForwardBatch([row], [0], [CONTEXT], list(range(100, 100 + CONTEXT)), "none"))
    time.sleep(max(begins_at - time.time(), 0.0))
    while time.time() < begins_at + seconds:
        began = time.perf_counter()
        target.forward(ForwardBatch([row], [CONTEXT], [1], [100], "all"))
        taken.append(time.perf_counter() - began)
        target.cache.rollback([row], [CONTEXT])
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--load-seconds", type=float, default=30.0, help="until then all processes have loaded the model")
    args = parser.parse_args()
    for count in (1, 2):
        with ProcessPoolExecutor(count, get_context("spawn")) as pool:
            begins_at = time.time() + args.load_seconds
            for taken in pool.map(passes_s, [args.model] * count, [args.seconds] * count, [begins_at] * count):
                ms = [1e3 * each for each in taken]
                late = statistics.quantiles(ms, n=10)[-1]
                told = f"mean {statistics.fmean(ms):.1f} ms, median {statistics.median(ms):.1f}, 90% {late:.1f}"
                print(f"{count} process{'es' * (count > 1)}: {len(taken)} passes, {told}", flush=True)


if __name__ == "__main__":
    main()
