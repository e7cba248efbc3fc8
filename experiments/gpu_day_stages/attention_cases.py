"""Passes for the attention kernel against its twin, for the stage `kernels` and for tests without a GPU, which run all
of them under Triton's interpreter (`tests/model/test_kernels_attend.py`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.model.torch.attention import Scores, ancestors
from paceline.model.torch.kernels.attend import Sight


@dataclass(frozen=True)
class Case:
    """A pass; its lengths and counts are drawn, unless given."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    count: int = 4
    rows: int = 2
    dtype: torch.dtype = torch.float32
    window: int | None = None
    cap: float = 0.0
    has_sinks: bool = False
    scale: float | None = None
    own: str = "chain"
    """Relation of the new tokens: chain, tree (bits), causal, block (all see all)."""
    starts: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None
    positions: int = 100
    """Length of the cache's rows, including positions after the last start."""
    is_sliced: bool = False
    """Heads of a wider cache and a wider product, as drafters and fused projections have them."""

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 1e-2


CASES = {
    "chain": Case(),
    "one token": Case(count=1, rows=3),
    "one row of one": Case(count=1, rows=1, starts=(95,)),
    "empty rows": Case(rows=3, starts=(0, 0, 70), counts=(4, 1, 4)),
    "idle rows": Case(rows=3, starts=(0, 90, 0), counts=(0, 3, 0)),
    "tree": Case(count=8, own="tree"),
    "tree, 32 tokens": Case(count=32, own="tree", heads=2),
    "window": Case(window=20, count=8),
    "window of one": Case(window=1, count=3),
    "window and tree": Case(window=7, count=8, own="tree"),
    "cap": Case(cap=5.0),
    "sinks": Case(has_sinks=True),
    "sinks and nothing seen": Case(rows=3, has_sinks=True, starts=(0, 5, 0), counts=(0, 2, 1)),
    "cap, sinks, window, tree": Case(cap=5.0, has_sinks=True, window=30, own="tree", count=6, scale=0.3),
    "block": Case(own="block", count=8),
    "block within a window": Case(own="block", count=16, window=9),
    "causal block": Case(own="causal", count=8, window=40),
    "heads of 16": Case(head_dim=16),
    "heads of 80": Case(head_dim=80, own="tree"),
    "heads of 128": Case(head_dim=128, heads=8),
    "heads of 256": Case(head_dim=256),
    "small heads": Case(head_dim=8),
    "a key head for each": Case(heads=3, kv_heads=3),
    "groups of 5": Case(heads=10, kv_heads=2, count=16, rows=1, head_dim=16),
    "groups of 12, one key head": Case(heads=12, kv_heads=1, count=3, rows=1),
    "sliced": Case(is_sliced=True, own="tree"),
    "long": Case(positions=1500, starts=(1400, 700), heads=2, count=2, head_dim=16),
    "bfloat16": Case(dtype=torch.bfloat16, head_dim=64, count=8),
    "bfloat16, large tiles": Case(dtype=torch.bfloat16, heads=16, kv_heads=2, count=16, own="tree", rows=1),
    "bfloat16, window, cap, sinks": Case(dtype=torch.bfloat16, window=50, cap=8.0, has_sinks=True),
    "float16": Case(dtype=torch.float16, head_dim=128, count=3),
}


def drawn(case: Case, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Sight, Scores]:
    """Query, keys, values, and who sees what; values are finite everywhere."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, count = case.rows, case.count
    counts = case.counts or tuple(rng.randint(1, count) for _ in range(rows))
    starts = case.starts or tuple(rng.randint(0, case.positions - count) for _ in range(rows))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    factor = 2 if case.is_sliced else 1
    query_THD = normal(rows * count, factor * case.heads, case.head_dim)[:, : case.heads]
    keys, values = (
        normal(rows + 2, factor * case.kv_heads, case.positions, case.head_dim).chunk(factor, 1)[-1] for _ in range(2)
    )
    depths_BJ = bits_BJ = None
    if case.own in ("chain", "tree"):
        seen_BJJ = torch.ones(count, count, dtype=torch.long).tril().repeat(rows, 1, 1)
        depths_BJ = torch.arange(count).repeat(rows, 1)
        for row in range(rows if case.own == "tree" else 0):
            seen, depths = ancestors([-1, *(rng.randrange(token) for token in range(1, counts[row]))][: counts[row]])
            seen_BJJ[row, : counts[row], : counts[row]] = seen.long()
            depths_BJ[row, : counts[row]] = torch.tensor(depths)
        bits_BJ = (seen_BJJ << torch.arange(count)).sum(-1).to(device)
        depths_BJ = depths_BJ.to(device)
    sight = Sight(
        torch.tensor(starts, device=device), torch.tensor(counts, device=device), count,
        window=case.window, is_causal=case.own != "block", depths_BJ=depths_BJ, bits_BJ=bits_BJ,
    )  # fmt: skip
    sinks = normal(case.heads).float() if case.has_sinks else None
    return query_THD, keys, values, sight, Scores(case.scale, case.cap, sinks)


def dead_poisoned(case: Case, sight: Sight, cache: Tensor) -> Tensor:
    """The cache with NaN wherever no token of the pass sees anything, and in rows that have no part in it."""
    seen_BS = sight.mask(case.positions).any(1)
    poisoned = torch.full_like(cache, float("nan"))
    poisoned[: case.rows] = cache[: case.rows].masked_fill(~seen_BS[:, None, :, None], float("nan"))
    return poisoned


def by_loop(query_THD: Tensor, keys: Tensor, values: Tensor, sight: Sight, scores: Scores) -> Tensor:
    """The formula, one query after another over the keys that it sees, in float64."""
    group, size = query_THD.shape[1] // keys.shape[1], query_THD.shape[2]
    out, seen_TS = torch.zeros_like(query_THD, dtype=torch.float64), sight.mask(keys.shape[2]).flatten(0, 1)
    for token, head in itertools.product(range(len(query_THD)), range(query_THD.shape[1])):
        own = token // sight.count, head // group, seen_TS[token]
        score_S = keys[own].double() @ query_THD[token, head].double() * (scores.scale or size**-0.5)
        if scores.cap:
            score_S = torch.tanh(score_S / scores.cap) * scores.cap
        sinks = [] if scores.sinks_H is None else [scores.sinks_H[head : head + 1].double()]
        weight_S = torch.cat([score_S, *sinks]).softmax(0)[: len(score_S)]
        out[token, head] = weight_S @ values[own].double()
    return out.flatten(1)


Attention = Callable[[Tensor, Tensor, Tensor, Sight, Scores], Tensor]


def difference(case: Case, run: Attention, reference: Attention, seed: int, device: str = "cpu") -> float:
    """Largest difference of `run`, on poisoned memory, from the reference in float32; relative to the largest value."""
    query_THD, keys, values, sight, scores = drawn(case, seed, device)
    expected = reference(query_THD.float(), keys.float(), values.float(), sight, scores)
    keys, values = (dead_poisoned(case, sight, cache) for cache in (keys, values))
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        output = run(query_THD, keys, values, sight, scores)
    finally:
        torch.use_deterministic_algorithms(False)
    assert output.dtype == case.dtype and output.shape == expected.shape
    if not bool(output.isfinite().all()):
        return float("inf")
    return float((output.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-3))


def mend_interpreter() -> None:
    """Two faults of Triton 3.6's interpreter: it takes bfloat16 factors of a product for integers, and under numpy 2.4,
    which makes no int of an array of one element, it cannot run loops with bounds of run time."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang_tensor
    multiply: Any = interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def product(self: Any, one: Any, two: Any, *rest: Any) -> Any:
        return multiply(self, widened(one), widened(two), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = product
