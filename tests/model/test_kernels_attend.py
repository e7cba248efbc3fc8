"""The attention kernel: against its twin under Triton's interpreter, and compiled for cards; both without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from paceline.model.torch.kernels.attend import MOST_POSITIONS, PROGRAMS, Tiles, twin

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


@needs_triton
@pytest.mark.slow
def test_the_kernel_computes_what_its_twin_does() -> None:
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    program = EXPERIMENTS / "gpu_day_stages" / "attention_cases.py"
    done = in_a_process([str(program)], TRITON_INTERPRET="1")
    cases = [json.loads(line) for line in done.splitlines()]
    assert len(cases) > 25
    assert not [each for each in cases if not each[1] < each[2]]


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
    program = Path(__file__).with_name("compiled_attend.py")
    usages = json.loads(in_a_process([str(program), json.dumps(kernels)], TRITON_CACHE_DIR=str(tmp_path)))
    assert len(usages) == 2 * len(kernels)
    for name, limit, shared, usage in usages:
        assert shared <= limit, f"{name}: {shared} bytes of shared memory"
        is_checked = "float32" not in name and "sm_90" in name  # float32 serves checks and small models
        assert not is_checked or re.findall(r"(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"], f"{name} spills: {usage}"


def in_a_process(words: list[str], **variables: str) -> str:
    """Output of a Python program run with these environment variables."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= variables | {"PYTHONPATH": os.pathsep.join([*sys.path, str(EXPERIMENTS)])}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout
