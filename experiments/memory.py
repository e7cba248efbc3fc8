"""How much memory does a loaded model take beside its weights and its stated KV cache?

    .venv/bin/python experiments/memory.py --dtype bfloat16

Resident memory over that of the imported libraries: after loading, at its peak, and after a prompt of 256 tokens and 64
decoded ones. Last line: one JSON object, MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from paceline.config import EngineConfig
from paceline.model.backends import load_target
from paceline.model.target import ForwardBatch
from paceline.runlog import record_of


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    before, started = resident_mb(), time.perf_counter()
    target = load_target(EngineConfig(args.model, dtype=args.dtype, device="cpu", max_batch=1))
    load_s, loaded = time.perf_counter() - started, resident_mb() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before
    target.cache.allocate()
    target.forward(ForwardBatch([0], [0], [256], [5] * 256, "last"))
    for position in range(256, 320):
        target.forward(ForwardBatch([0], [position], [1], [5]))
    weights, cache = target.weight_bytes / 1e6, target.cache.num_bytes / 1e6
    result = {
        "dtype": args.dtype,
        "load_s": load_s,
        "weights": weights,
        "kv_cache": cache,
        "loaded": loaded,
        "peak_while_loading": peak,
        "running": resident_mb() - before,
        "limit": 1.3 * weights + cache,
    }
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}
    print(json.dumps(record_of(rounded)))


if __name__ == "__main__":
    main()
