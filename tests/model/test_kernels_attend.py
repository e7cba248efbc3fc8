"""The attention kernel: against its twin under Triton's interpreter, and compiled for cards; both without a GPU."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import POINTERS, compiled, in_a_process, usage

from paceline.model.torch.kernels.attend import CHUNK, MOST_POSITIONS, PROGRAMS, Tiles, run_kernels, twin

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: extra gpu-dev")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
CARDS = {90: 227 * 1024, 80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024}
"""Bytes of shared memory that a program may use on an H100, an A100, an RTX 3090 and an RTX 4090, by their sm
numbers."""
SHAPES = {"1.5B": (6, 128), "8B": (4, 128), "27B": (5, 128), "32B": (8, 128), "hybrid 27B": (6, 256), "small": (3, 64)}
"""Query heads of a key head, and the head size, of the models of experiments/gpu_day.py."""


@pytest.mark.slow
def test_the_twin_computes_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory of dead positions, and of idle rows, holds NaN."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    cases = importlib.import_module("gpu_day_stages.attention_cases")
    for seed, (name, case) in enumerate(cases.CASES.items()):
        assert cases.difference(case, twin, cases.by_loop, seed) < case.tolerance, name


@pytest.mark.parametrize(("rows", "positions"), [(1, 4096), (8, 32768), (64, 32768), (64, 500)])
def test_no_program_walks_a_long_row_alone(rows: int, positions: int) -> None:
    tiles = Tiles.of(4, 16, 128, torch.bfloat16)
    splits = tiles.splits(rows * 8, 4 * 16, positions)
    assert positions / splits <= MOST_POSITIONS and splits <= -(-positions // tiles.keys)
    assert rows > 1 or splits * 8 >= 0.9 * PROGRAMS, "one row fills the card"


def interpreted() -> list[tuple[str, float, float]]:
    """Each case with its error and tolerance, in a process of its own under the interpreter."""
    from gpu_day_stages import attention_cases as cases

    cases.mend_interpreter()
    return [
        (name, cases.difference(case, run_kernels, twin, seed), case.tolerance)
        for seed, (name, case) in enumerate(cases.CASES.items())
    ]


@needs_triton
@pytest.mark.slow
def test_the_kernel_computes_what_its_twin_does() -> None:
    cases = in_a_process(__file__, "interpreted()", TRITON_INTERPRET="1")
    assert len(cases) > 25
    assert not [each for each in cases if not each[1] < each[2]]


def resources(group: int, head_dim: int, dtype: str, count: int, has_all: bool, arch: int, limit: int) -> list[Any]:
    """Name, limit, and bytes of stack and of shared memory of the split kernel and of the combining one. `group`: query
    heads of a key head; `count`: tokens of a row; `has_all`: scores have window and cap; `limit`: bytes of shared
    memory for a program on cards of sm_`arch`."""
    from paceline.model.torch.kernels.triton.attend import attend_split, combine_splits

    kind = getattr(torch, dtype)
    tiles, pointer = Tiles.of(group, count, head_dim, kind, limit), POINTERS[kind]
    shape = {"GROUP": group, "HEAD": head_dim, "BLOCK_D": tiles.channels, "OVERLAPS": arch >= 90}
    parts = dict.fromkeys(("sums", "weights", "maxima"), "*fp32")
    pointers = parts | dict.fromkeys(("query", "keys", "values"), pointer)
    pointers |= dict.fromkeys(("starts_B", "counts_B", "depths_BJ", "bits_BJ"), "*i64")
    split = {
        **shape, "BLOCK_M": tiles.members, "BLOCK_N": tiles.keys, "HAS_BITS": True, "IS_CAUSAL": True,
        "HAS_WINDOW": has_all, "HAS_CAP": has_all, "PRECISION": "ieee", "STAGES": tiles.stages,
    }  # fmt: skip
    combined = {**shape, "CHUNK": CHUNK, "HAS_SINKS": True}
    name = f"{group} heads of {head_dim}, {count} tokens in {dtype} on sm_{arch}"
    kernels: list[tuple[str, Any, dict[str, str], dict[str, Any], int]] = [
        ("split", attend_split, pointers, split, tiles.warps),
        ("combined", combine_splits, parts | {"sinks_H": "*fp32", "out": pointer}, combined, 4),
    ]
    results = list[Any]()
    for what, kernel, typed, constants, num_warps in kernels:
        numbers = {each: "fp32" if each in ("scale", "cap") else "i32" for each in kernel.arg_names}
        kinds = {each: typed.get(each, number) for each, number in numbers.items() if each not in constants}
        aligned = [
            at
            for at, each in enumerate(kernel.arg_names)
            if each.endswith("_stride") or kinds.get(each) in ("*fp32", pointer)
        ]
        results.append((f"{what}, {name}", limit, usage(compiled(kernel, kinds, constants, num_warps, aligned, arch))))
    return results


@needs_triton
@pytest.mark.slow
def test_the_kernels_fit_their_cards(tmp_path: Path) -> None:
    """Compiled to machine code: nothing spills in half precision, and shared memory suffices."""
    h100, *others = CARDS.items()
    kernels = [(*shape, "bfloat16", count, False, *h100) for shape in SHAPES.values() for count in (1, 2, 8, 16)]
    kernels += [
        (*SHAPES["8B"], dtype, 16, has_all, *h100) for dtype, has_all in (("bfloat16", True), ("float32", False))
    ]
    kernels += [(*SHAPES[name], "bfloat16", 16, False, *card) for name in ("27B", "hybrid 27B") for card in others]
    call = f"[each for kernel in {kernels} for each in resources(*kernel)]"
    used = in_a_process(__file__, call, TRITON_CACHE_DIR=str(tmp_path))
    assert len(used) == 2 * len(kernels)
    for name, limit, sizes in used:
        assert sizes["shared"] <= limit, f"{name}: {sizes['shared']} bytes of shared memory"
        is_checked = "float32" not in name and "sm_90" in name  # float32 serves checks and small models
        assert not is_checked or sizes["stack"] == 0, f"{name} spills {sizes['stack']} bytes"
