"""Products of few tokens: the kernel equals PyTorch's product under Triton's interpreter, and compiles for an H100."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import MOST_SHARED, compiled, in_a_process, usage

from paceline.model.torch.kernels import available, skinny
from paceline.model.torch.kernels.layer import GATED
from paceline.model.torch.parts import PackedLinear

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
WIDTHS = {"1.5B": (1536, 8960), "8B": (4096, 12288), "27B": (5120, 17408)}
"""Hidden and inner widths."""


def test_a_tile_divides_every_matrix_of_known_models() -> None:
    for hidden, inner in WIDTHS.values():
        for num_tokens in (1, 2, 16):
            for size, columns, is_gated in ((hidden, hidden, False), (inner, hidden, True), (hidden, inner, False)):
                tile = skinny.tile_of(num_tokens, size, columns, is_gated)
                assert tile is not None and size % tile.rows == columns % tile.columns == 0


def test_a_matrix_without_a_tile_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "can_use", lambda device: True)
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert skinny.can_run(weight[:16], weight)
    assert not skinny.can_run(weight[:17], weight)  # too many tokens
    assert not skinny.can_run(weight[:0], weight)
    assert not skinny.can_run(weight[:2].float(), weight)
    assert not skinny.can_run(torch.zeros(2, 96, dtype=torch.bfloat16), weight[:, :96])  # no multiple of 64
    assert not skinny.can_run(weight[:2], weight[:63])
    with pytest.raises(ValueError, match="no tile divides"):
        skinny.product(weight[:2], weight[:63], None)


def test_a_gated_product_is_left_to_two_operations_without_a_kernel() -> None:
    linear = PackedLinear(torch.randn(64, 128))
    assert linear.gated(torch.randn(1, 128), "silu") is None


def errors() -> dict[str, list[float]]:
    """Error and bound of each case, under the interpreter: fresh random inputs, outputs poisoned."""
    from gpu_day_stages.attention_cases import mend_interpreter
    from test_kernels_layer import error, poisoned_empties, round_to_nearest

    mend_interpreter()
    poisoned_empties()
    round_to_nearest()
    torch.manual_seed(3)
    figures: dict[str, list[float]] = {}
    for num_tokens, dtype, size, inner in (
        (1, torch.bfloat16, 32, 1536), (1, torch.float32, 32, 320), (2, torch.bfloat16, 32, 320),
        (3, torch.float32, 48, 128), (16, torch.float32, 16, 512),
    ):  # fmt: skip
        for activation in (None, *GATED):
            num_rows = size if activation is None else 2 * size
            inputs, weight = torch.randn(num_tokens, inner).to(dtype), torch.randn(num_rows, inner).to(dtype) / 8
            for bias in (None, torch.randn(num_rows).to(dtype)):
                ours = skinny.product(inputs, weight, bias, activation)
                expected = skinny.product_twin(inputs, weight, bias, activation)
                name = (
                    f"{num_tokens} x {inner}, {size} rows, {dtype}, {activation}, {'no ' if bias is None else ''}bias"
                )
                figures[name] = [error(ours, expected), 1e-5 if dtype == torch.float32 else 1e-2]
    return figures


def resources() -> dict[str, dict[str, int]]:
    """Bytes of stack and of shared memory of the kernel for an H100, at each tile."""
    from paceline.model.torch.kernels.triton import skinny as skinny_triton

    used: dict[str, dict[str, int]] = {}
    kinds = {"inputs_ptr": "*bf16", "weight_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    kinds |= {"num_tokens": "i32", "size": "i32"}
    for (is_one, is_gated), tile in skinny.TILES.items():
        constants: dict[str, Any] = {
            "INNER": 4096, "TOKENS": 1 if is_one else skinny.MOST_TOKENS, "ROWS": tile.rows, "COLUMNS": tile.columns,
            "HAS_BIAS": True, "GATE": int(is_gated), "PRECISION": "ieee", "STAGES": tile.stages, "OVERLAPS": True,
        }  # fmt: skip
        binary = compiled(skinny_triton.skinny, kinds, constants, tile.warps, (0, 1, 2, 3, 5))
        assert binary.asm["ptx"].count("griddepcontrol") == 2
        used[f"{is_one} {is_gated}"] = usage(binary)
    return used


@needs_triton
@pytest.mark.slow
def test_the_kernel_equals_pytorchs_product() -> None:
    figures = in_a_process(__file__, "errors()", TRITON_INTERPRET="1")
    assert len(figures) == 30
    assert {name: size for name, (size, bound) in figures.items() if not size <= bound} == {}


@needs_triton
@pytest.mark.slow
def test_the_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    used = in_a_process(__file__, "resources()", TRITON_CACHE_DIR=str(tmp_path))
    assert len(used) == len(skinny.TILES)
    assert all(each["stack"] == 0 and each["shared"] < MOST_SHARED for each in used.values()), used
