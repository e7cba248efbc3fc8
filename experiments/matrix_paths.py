"""How fast can this CPU multiply all of a model's matrices by a few rows? The table behind `model/linear.py`.

    .venv/bin/python experiments/matrix_paths.py --rows 1,8,16,32

Times one pass over every matrix of a config (no norms, no attention) through F.linear, oneDNN with prepacked weights, int8
weights (per-channel scales, as PyTorch has them) and torch.compile with freezing. Last line: one JSON object, milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from paceline.hub import resolve
from paceline.model.checkpoint import load_config
from paceline.model.linear import PackedLinear


def shapes(model: str) -> list[tuple[int, int]]:
    """[out, in] of every matrix of one pass: fused qkv, output, fused gate-up, down, and the head."""
    config = load_config(resolve(model))
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = [
        (qkv, config.hidden_size),
        (config.hidden_size, config.num_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    return layer * config.num_layers + [(config.vocab_size, config.hidden_size)]


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def paths(weights: list[Tensor], dtype: torch.dtype, with_compile: bool) -> dict[str, Callable[[dict[int, Tensor]], object]]:
    packed = [PackedLinear(weight) for weight in weights]
    found: dict[str, Callable[[dict[int, Tensor]], object]] = {
        "F.linear": lambda inputs: [F.linear(inputs[weight.shape[1]], weight) for weight in weights],
        "oneDNN packed": lambda inputs: [matrix(inputs[matrix.in_features]) for matrix in packed],
    }
    if dtype == torch.bfloat16:
        quantised = [
            (torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.ones(len(weight), dtype=dtype))
            for weight in weights
        ]
        found["int8 per channel"] = lambda inputs: [
            torch._weight_int8pack_mm(inputs[weight.shape[1]], weight, scale) for weight, scale in quantised
        ]
    if with_compile:
        import torch._inductor.config as inductor

        inductor.freezing = True
        module = torch.nn.ModuleList(
            torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(dtype) for weight in weights
        )
        compiled = torch.compile(lambda inputs: [layer(inputs[layer.in_features]) for layer in module])
        found["torch.compile, freezing"] = compiled
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", default="1,8,16,32")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile too: half a minute per row count")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    sizes = shapes(args.model)
    weights = [torch.randn(size).mul_(0.02).to(dtype) for size in sizes]
    table: dict[str, dict[str, float]] = {}
    for name, run in paths(weights, dtype, args.compile).items():
        table[name] = {}
        for rows in (int(rows) for rows in args.rows.split(",")):
            inputs = {width: torch.randn(rows, width).to(dtype) for width in {size[1] for size in sizes}}
            table[name][str(rows)] = round(milliseconds(lambda run=run, inputs=inputs: run(inputs), args.repeats), 2)
        Console(stderr=True).print(name, table[name])
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    print(json.dumps({"dtype": args.dtype, "threads": torch.get_num_threads(), "weight_bytes": num_bytes, "ms": table}))


if __name__ == "__main__":
    main()
