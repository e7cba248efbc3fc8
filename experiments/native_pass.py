"""What a native pass costs by the number of its positions, beside this machine's ceilings; and where its time goes.

    python experiments/native_pass.py                     # the built-in model, bfloat16: blocks as stored, and dense
    python experiments/native_pass.py --dtype float32 --context 1000

Forms of the weights take turns; a figure is the median over rounds of the medians of --repeats passes. The ceilings are
measured in the same run: bytes read per second, and matrix products per second in PyTorch. Ends with one JSON line,
which --out keeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from paceline.config import EngineConfig
from paceline.hardware import Machine, this_machine
from paceline.model.backends import load_target
from paceline.model.native.decoder import NativeDecoder
from paceline.model.native.library import STAGES
from paceline.model.target import ForwardBatch
from paceline.runs.folder import record_of, write_results

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (8, 1), (8, 4), (8, 8), (1, 256))
"""(rows, positions of each)"""


def passes(target: NativeDecoder, rows: int, count: int, context: int, repeats: int) -> list[float]:
    """Seconds of each pass; the cache is as long as `context` before every one of them."""
    cache = target.cache
    cache.lengths[:rows] = [context] * rows
    batch = ForwardBatch(list(range(rows)), [context] * rows, [count] * rows, [5] * (rows * count), only_argmax=True)
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        target.forward(batch)
        seconds.append(time.perf_counter() - started)
        cache.rollback(batch.rows, batch.starts)
    return seconds[1:]


def flops(target: NativeDecoder, tokens: int) -> float:
    """Multiplications and additions of the weight matrices, every position through the head."""
    config = target.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return 2.0 * tokens * (config.num_layers * layer + config.vocab_size * config.hidden_size)


def line(
    target: NativeDecoder, form: str, shape: tuple[int, int], seconds: list[float], machine: Machine, dtype: str
) -> Any:
    median = statistics.median(seconds)
    rate, bytes_per_s = flops(target, shape[0] * shape[1]) / median, target.weight_bytes / median
    return {
        "form": form,
        "rows": shape[0],
        "positions": shape[1],
        "ms": 1e3 * median,
        "ms_range": [1e3 * min(seconds), 1e3 * max(seconds)],
        "bytes_per_s": bytes_per_s,
        "share_of_read_ceiling": bytes_per_s / machine.read_bytes_per_s(target.weight_bytes),
        "flops_per_s": rate,
        "share_of_product_ceiling": rate / machine.flops_per_s[dtype],
    }


def stages(target: NativeDecoder, count: int, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a pass by stage."""
    seconds = torch.zeros(len(STAGES))
    target.time_stages(seconds)
    passes(target, 1, count, context, repeats)
    return {name: 1e3 * spent_s / (repeats + 1) for name, spent_s in zip(STAGES, seconds.tolist(), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--context", type=int, default=200, help="positions in the cache before the pass")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often the forms take turns; the median of rounds is told"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    args = parser.parse_args()
    rows, longest = max(shape[0] for shape in SHAPES), max(shape[1] for shape in SHAPES)
    targets: dict[str, NativeDecoder] = {}
    for form in ("blocks", "dense"):
        target = load_target(
            EngineConfig(
                args.model, dtype=args.dtype, device="cpu", max_batch=rows, max_len=args.context + longest,
                backend="native",
                weight_format=form,
            )
        )  # fmt: skip
        assert isinstance(target, NativeDecoder)
        targets.setdefault(target.weight_format, target)
    machine = this_machine()
    ceiling = f"{machine.bytes_per_s / 1e9:.1f} GB/s read, {machine.flops_per_s[args.dtype] / 1e9:.0f} GFLOP/s"
    print(f"{machine.name}, {machine.num_threads} threads: {ceiling} in {args.dtype}; context {args.context}")
    print(
        f"{'weights':<12}{'rows':>5}{'pos.':>5}{'ms':>8}{'x one':>7}{'GB/s':>7}{'share':>7}{'GFLOP/s':>9}{'share':>7}"
    )
    lines = []
    taken: dict[tuple[str, tuple[int, int]], list[float]] = {}
    for _ in range(args.rounds):
        for shape in SHAPES:
            for form, target in targets.items():
                repeats = args.repeats if shape[0] * shape[1] <= 16 else max(2, args.repeats // 5)
                taken.setdefault((form, shape), []).append(
                    statistics.median(passes(target, *shape, args.context, repeats))
                )
    for (form, shape), seconds in sorted(taken.items(), key=lambda item: item[0][0]):
        one = line(targets[form], form, shape, seconds, machine, args.dtype)
        one["over_one_position"] = one["ms"] / (1e3 * statistics.median(taken[form, (1, 1)]))
        lines.append(one)
        print(
            f"{form:<12}{shape[0]:>5}{shape[1]:>5}{one['ms']:>8.2f}{one['over_one_position']:>7.2f}"
            f"{one['bytes_per_s'] / 1e9:>7.1f}{one['share_of_read_ceiling']:>7.0%}"
            f"{one['flops_per_s'] / 1e9:>9.0f}{one['share_of_product_ceiling']:>7.0%}"
        )
    by_stage = {
        f"{form}, {count} positions": stages(target, count, args.context, args.repeats)
        for form, target in targets.items()
        for count in (1, 8)
    }
    for what, spent in by_stage.items():
        print(
            f"{what}: "
            + ", ".join(f"{name} {ms:.2f}" for name, ms in spent.items())
            + f"; {sum(spent.values()):.2f} ms"
        )
    settings = {"machine": machine, "dtype": args.dtype, "context": args.context}
    figures = {**settings, "passes": lines, "stages_ms": by_stage}
    print(json.dumps(record_of(figures)))
    if args.out:
        write_results(args.out, figures)


if __name__ == "__main__":
    main()
