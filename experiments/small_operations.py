"""What the operations between the matrices cost, beside the spellings they replaced.

    .venv/bin/python experiments/small_operations.py

The shapes are smollm2-135m's, bfloat16, context 300; microseconds, the fastest of many calls. Last line: one JSON object.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import AttentionPlan, Rope
from paceline.model.linear import RMSNorm

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 576, 9, 3, 64, 49152, 300
DTYPE = torch.bfloat16


def fastest_us(run: Callable[[], object], repeats: int = 400) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return round(best * 1e6, 1)


def by_hand(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return ((query @ keys.transpose(-1, -2)) * HEAD_DIM**-0.5).softmax(-1) @ values


@torch.inference_mode()
def measure(count: int) -> dict[str, float]:
    """One layer's operations at `count` positions of one row."""
    hidden, weight = torch.randn(count, HIDDEN).to(DTYPE), torch.ones(HIDDEN, dtype=DTYPE)
    norm = RMSNorm(weight, 1e-5)
    residual = hidden.float()
    heads = torch.randn(count, HEADS + KV_HEADS, HEAD_DIM).to(DTYPE)
    rope = Rope(torch.randn(2048, HEAD_DIM).to(DTYPE), torch.randn(2048, HEAD_DIM).to(DTYPE))
    tables = rope.tables(list(range(count)))
    keys, values = (torch.randn(1, KV_HEADS, 2048, HEAD_DIM).to(DTYPE) for _ in range(2))
    seen = slice(0, CONTEXT + count)
    query = torch.randn(1, HEADS, count, HEAD_DIM).to(DTYPE)
    grouped = query.reshape(1, KV_HEADS, -1, HEAD_DIM)
    plan = AttentionPlan([0], [CONTEXT], [count], group=HEADS // KV_HEADS, dtype=DTYPE)
    logits = torch.randn(count, VOCAB).to(DTYPE)
    runs: dict[str, Callable[[], object]] = {
        "F.rms_norm": lambda: F.rms_norm(hidden, (HIDDEN,), weight, 1e-5),
        "our RMSNorm": lambda: norm(residual),
        "rope": lambda: rope.rotate(heads, tables),
        "attention, enable_gqa": lambda: F.scaled_dot_product_attention(
            query, keys[:, :, seen], values[:, :, seen], enable_gqa=True
        ),
        "attention by hand": lambda: by_hand(grouped, keys[:, :, seen], values[:, :, seen]),
        "our attention": lambda: plan.attend(heads[:, :HEADS], keys, values),
        "argmax": lambda: logits.argmax(-1),
        "argmax, widened first": lambda: logits.float().argmax(-1),
    }
    return {name: fastest_us(run) for name, run in runs.items()}


def main() -> None:
    found = {str(count): measure(count) for count in (1, 8)}
    Console(stderr=True).print(found)
    print(json.dumps({"context": CONTEXT, "us": found}))


if __name__ == "__main__":
    main()
