"""A layer's kernels: each equals its twin under Triton's interpreter, and compiles for an H100 without spills.

Both need Triton, not a GPU; they run in processes of their own, as the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import MOST_SHARED, compiling, in_a_process
from torch import Tensor

from paceline.model.checkpoint import random_tensors
from paceline.model.target import ForwardBatch
from paceline.model.torch.attention import CacheWriter, Rope
from paceline.model.torch.decoder import Decoder
from paceline.model.torch.heads import heads_twin
from paceline.model.torch.kernels import available, layer
from paceline.model.torch.kernels.layer import NormWeight, Places
from paceline.model.torch.parts import RMSNorm, WholeNorm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
DTYPES = {"float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 1e-2)}
SIZES = {
    "1.5B": (1536, 12, 2, 8960),
    "8B": (4096, 32, 8, 12288),
    "27B": (5120, 40, 8, 17408),
    "32B": (5120, 64, 8, 25600),
}
"""Widths of hidden states, numbers of query and key heads of 128, and inner widths of MLPs."""
WIRINGS = ("qwen3", "smollm3", "granite", "olmo2", "phi4-mini", "gemma2", "gemma3", "qwen3.5", "gpt-oss")
"""Families whose layers differ in norms, scales, rotation, windows or gates."""


def error(ours: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value; infinite where a value was not written."""
    difference = (ours.float() - expected.float()).abs().nan_to_num(nan=float("inf"))
    return float(difference.max() / expected.float().abs().max())


def as_on_a_gpu(weight: NormWeight, dtype: torch.dtype) -> RMSNorm:
    """A norm on CPU that takes the formula of other devices."""
    norm = RMSNorm(weight.weight.to(dtype), weight.eps)
    norm._is_cpu, norm._is_wide, norm._weight = False, weight.is_wide, weight.weight
    return norm


def round_to_nearest() -> None:
    """The interpreter cuts numbers off to bfloat16, where a GPU rounds to nearest, ties to even."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(values, source, target, mode)
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view("uint16")

    interpreter._convert_float = rounded


def poisoned_empties() -> None:
    """Outputs are filled with NaN when they are made."""
    from gpu_day_stages.layer_kernels import poisoned

    torch.empty_like = poisoned(torch.empty_like)
    Tensor.new_empty = poisoned(Tensor.new_empty)


def norm_cases(kind: dict[str, Any]) -> Iterator[tuple[str, float]]:
    dtype = kind["dtype"]
    for num_rows, size in ((1, 1536), (3, 77), (64, 130), (2, 5120)):
        for wide in (False, True):
            inputs, update = (torch.randn(num_rows, size).to(dtype) for _ in range(2))
            first, second = (torch.randn(size).to(torch.float32 if wide else dtype) for _ in range(2))
            norms = NormWeight(first, 1e-6, wide), NormWeight(second, 1e-5, wide)
            name = f"{num_rows} x {size}{' wide' if wide else ''}"
            yield (
                f"norm {name}",
                error(layer.rms_norm(inputs, norms[0], dtype), layer.rms_norm_twin(inputs, norms[0], dtype)),
            )
            for update_norm in (None, norms[0]):
                for norm in (None, norms[1]):
                    hidden, expected = inputs.clone(), inputs.clone()
                    # PyTorch's addition on CPU rounds the factor to bfloat16; on CUDA it does not.
                    scale = 0.22 if dtype == torch.float32 else 0.25
                    out = layer.add_norm(hidden, update, update_norm, norm, scale)
                    out_expected = layer.add_norm_twin(expected, update, update_norm, norm, scale)
                    case = f"add {name} {'normed' if update_norm else ''} {'norm' if norm else ''}"
                    yield case, error(hidden, expected)
                    assert (out is None) == (norm is None)
                    if out is not None and out_expected is not None:
                        yield f"{case} out", error(out, out_expected)


def head_cases(kind: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Whole, per-head and no norms; all, some or none of a head rotated; one row, several, and no queries."""
    for num_heads, num_kv_heads, size, rotary, rows, counts, norm_kind, rest in (
        (4, 2, 64, 64, [1], [1], "heads", 0),
        (5, 2, 128, 128, [0], [3], None, 0),
        (6, 3, 24, 16, [0, 2], [2, 1], "heads", 0),
        (2, 1, 16, 16, [1, 2], [16, 48], "whole", 0),
        (5, 1, 40, 0, [2, 0, 1], [1, 1, 1], "wide", 0),
        (3, 1, 32, 8, [0], [7], "wide", 3 * 32),
        (0, 6, 32, 32, [0, 2], [4, 1], "heads", 0),
    ):
        dtype, num_tokens, positions = kind["dtype"], sum(counts), 70
        fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size + rest).to(dtype)
        weight = torch.randn(num_heads + num_kv_heads, size).to(dtype)
        offset = 1.0 if norm_kind == "wide" else 0.0
        raw = NormWeight(weight.float() + offset if offset else weight, 1e-6, bool(offset))
        norm: RMSNorm | WholeNorm | None = None if norm_kind is None else as_on_a_gpu(raw, dtype)
        if norm_kind == "whole":
            parts = (raw._replace(weight=each.flatten()) for each in weight.tensor_split([num_heads]))
            norm = WholeNorm(*(as_on_a_gpu(each, dtype) for each in parts), num_heads)
        rope, tables, starts = None, None, [3 + row for row in rows]
        writer = CacheWriter(rows, starts, counts)
        if rotary:
            angles = torch.randn(positions, rotary // 2).repeat(1, 2)
            rope = Rope(angles.cos().to(dtype), angles.sin().to(dtype))
            tables = rope.tables(
                [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
            )
        caches = torch.full((4, 3, 2 * num_kv_heads, positions, size), 7.0, **kind)
        # Heads of a layer may be some of those of a longer cache.
        keys, values, expected_keys, expected_values = caches[:, :, num_kv_heads:]
        ours = layer.heads(
            fused, num_heads, keys, values, writer.places, raw if norm else None, tables, norm_kind == "whole"
        )  # fmt: skip
        theirs = heads_twin(fused, num_heads, expected_keys, expected_values, writer, norm, rope, tables)
        name = f"heads {num_heads} + {num_kv_heads} of {size}, {rotary} rotated, {norm_kind}, rows {rows}"
        if num_heads:
            yield name, error(ours, theirs)
        yield f"{name} keys", error(caches[0], caches[2])
        yield f"{name} values", error(caches[1], caches[3])
        assert not torch.equal(caches[0], torch.full_like(caches[0], 7.0))


def gated_cases(kind: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for activation in layer.GATED:
        for num_rows, size in ((1, 8960), (3, 77), (64, 1025)):
            inputs = (3 * torch.randn(num_rows, 2 * size)).to(kind["dtype"])
            ours, expected = layer.gated(inputs, activation), layer.gated_twin(inputs, activation)
            yield f"{activation} {num_rows} x {size}", error(ours, expected)


def decoder_cases(kind: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Logits and hidden states of a family's decoder that runs on kernels, and of one that does not."""
    pytest.importorskip("transformers")
    from test_recorded_regions import family_config

    make_norm = RMSNorm.__init__

    def make_norm_of_a_gpu(
        norm: RMSNorm, weight: Tensor, eps: float, offset: float = 0.0, is_wide: bool = False
    ) -> None:
        make_norm(norm, weight, eps, offset)
        norm._is_cpu, norm._is_wide = False, bool(offset) or is_wide
        norm._weight = weight.float() + offset if norm._is_wide else weight

    for name in WIRINGS:
        with tempfile.TemporaryDirectory() as folder:
            config = family_config(name, Path(folder))
        tensors, outputs = list(random_tensors(config)), list[tuple[Tensor, ...]]()
        for can_use in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(available, "can_use", lambda device, can_use=can_use: can_use)
                if can_use:
                    patch.setattr(RMSNorm, "__init__", make_norm_of_a_gpu)
                target = Decoder(config, tensors, num_rows=2, max_len=32, **kind)
                target.set_taps((1, config.num_layers - 1))
                rows = [target.cache.allocate() or 0 for _ in range(2)]
                first = target.forward(ForwardBatch(rows[:1], [0], [2], [5, 6]))
                both = target.forward(ForwardBatch(rows, [2, 0], [1, 1], [8, 9]))
                outputs.append(tuple(each for out in (first, both) for each in (out.logits_TV, out.taps_TF)))
        for place, (ours, expected) in enumerate(zip(outputs[1], outputs[0], strict=True)):
            yield f"{name} {place}", error(ours, expected)


CASES = {"norms": norm_cases, "heads": head_cases, "gated": gated_cases, "decoders": decoder_cases}


def interpreted(cases: str, dtype: str) -> dict[str, float]:
    """The error of each case, in a process of its own under the interpreter."""
    poisoned_empties()
    round_to_nearest()
    torch.manual_seed(1)
    return dict(CASES[cases]({"dtype": DTYPES[dtype][0]}))


@pytest.mark.parametrize(
    ("cases", "dtype"),
    [(cases, dtype) for cases in CASES for dtype in DTYPES if (cases, dtype) != ("decoders", "bfloat16")],
)
def test_a_kernel_equals_its_twin(cases: str, dtype: str) -> None:
    errors = in_a_process(__file__, f"interpreted({cases!r}, {dtype!r})", TRITON_INTERPRET="1")
    assert len(errors) >= 6
    assert {name: size for name, size in errors.items() if not size <= DTYPES[dtype][1]} == {}


def resources(model: str) -> dict[str, dict[str, int]]:
    """Bytes of stack, which spilled registers go to, and of shared memory, of each kernel compiled for an H100."""
    from paceline.model.torch.kernels.triton import layer as layer_triton

    used: dict[str, dict[str, int]] = {}
    layer._launch = compiling(layer_triton, used, aligns=False, OVERLAPS=True)
    hidden, num_heads, num_kv_heads, inner = SIZES[model]
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    weight = NormWeight(torch.empty(hidden, **kind), 1e-6)
    state = torch.empty(3, hidden, **kind)
    layer.rms_norm(state, weight, torch.bfloat16)
    layer.add_norm(state, state, None, weight, 1.0)
    layer.add_norm(state, state, weight, weight, 1.0)
    fused = torch.empty(3, (num_heads + 2 * num_kv_heads) * 128, **kind)
    keys = torch.empty(1, num_kv_heads, 99, 128, **kind)
    places = Places(*torch.empty(2, 3, dtype=torch.long, device="meta"))
    tables = torch.empty(3, 1, 128, **kind), torch.empty(3, 1, 128, **kind)
    head_norm = NormWeight(torch.empty(num_heads + num_kv_heads, 128, **kind), 1e-6)
    for norm, is_whole in ((None, False), (head_norm, False), (head_norm, True)):
        layer.heads(fused, num_heads, keys, keys, places, norm, tables, is_whole)
    for activation in layer.GATED:
        layer.gated(torch.empty(3, 2 * inner, **kind), activation)
    return used


@pytest.mark.parametrize("model", SIZES)
def test_a_kernel_compiles_for_an_h100(model: str) -> None:
    used = in_a_process(__file__, f"resources({model!r})")
    assert len(used) == 8
    assert {name: each for name, each in used.items() if each["stack"] or each["shared"] >= MOST_SHARED} == {}
