"""The stage `layer_kernels`: a layer's kernels against their PyTorch twins on the device, and the time of one
launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_day_stages.models import Clock, graphed, shape_of, summary
from gpu_day_stages.visit import Visit
from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.attention import Rope
from paceline.model.torch.heads import heads_twin, split_heads
from paceline.model.torch.kernels import available, skinny
from paceline.model.torch.kernels import layer as kernels
from paceline.model.torch.kernels.layer import NormWeight
from paceline.model.torch.parts import NoNorm, Residual, RMSNorm, WholeNorm
from paceline.model.torch.recorded_pass import StaticWriter

LEAST_S = 2.0
"""Time that is left when what remains is left out."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference from the twin, as a share of the largest value."""
LAUNCHES = 100
"""Repetitions of one kernel in the timed graph."""


class Case(NamedTuple):
    """One operation: as layers run it, which on CUDA is a kernel, and its twin. Each returns all that it computes."""

    name: str
    ours: Callable[[], list[Tensor]]
    twin: Callable[[], list[Tensor]]


@torch.inference_mode()
def layer_kernels(visit: Visit) -> None:
    """Every kernel at the widths of 8B, with 1 and 16 tokens, bfloat16 first. On CPU, which has no kernels, other
    formulas of the same, in float32: in bfloat16 they round elsewhere."""
    if torch.device(visit.device).type == "cuda":
        visit.check("the kernels can be used", available.can_use(visit.device))
        check(visit, torch.bfloat16)
    else:
        visit.leave_out("kernels", "they need CUDA; other formulas are compared with the twins")
    for num_tokens in (1, 16):
        for case in cases(visit, num_tokens, visit.sized(torch.bfloat16, torch.float32)):
            name = f"kernel: {case.name}, {num_tokens} tokens"
            with visit.part(name):
                visit.need(LEAST_S)
                visit.report(name, us=launch_us(visit, case.ours), twin_us=launch_us(visit, case.twin))
    check(visit, torch.float32)


def check(visit: Visit, dtype: torch.dtype) -> None:
    """Compare all cases with their twins."""
    for num_tokens in (1, 16):
        for case in cases(visit, num_tokens, dtype):
            name = f"{case.name}, {num_tokens} tokens, {str(dtype).removeprefix('torch.')}"
            with visit.part(name):
                visit.need(LEAST_S)
                error = largest_difference(case)
                visit.check(name, error <= BOUNDS[dtype], error=error)


def cases(visit: Visit, num_tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """All operations on fresh random inputs."""
    config, kind = shape_of(visit, "8B"), {"dtype": dtype, "device": visit.device}
    yield from norm_cases(*torch.randn(2, num_tokens, config.hidden_size, **kind), kind)
    yield from head_cases(config, num_tokens, kind)
    gate_up = torch.randn(num_tokens, 2 * config.intermediate_size, **kind)
    gate, up = gate_up.chunk(2, dim=-1)
    others = {
        "silu": lambda: gate * torch.sigmoid(gate) * up,
        "gelu_tanh": lambda: F.gelu(gate, approximate="tanh") * up,
    }
    for activation in kernels.GATED:

        def gated(activation: str = activation) -> list[Tensor]:
            return [kernels.gated(gate_up, activation) if kernels.can_run(gate_up) else others[activation]()]

        yield Case(
            f"gated {activation}", gated, lambda activation=activation: [kernels.gated_twin(gate_up, activation)]
        )
    yield from product_cases(config, num_tokens, kind)


def product_cases(config: DecoderConfig, num_tokens: int, kind: dict[str, Any]) -> Iterator[Case]:
    """Products with a matrix, one of them gated. In float32 both are PyTorch's. Timed ones find the matrix in the
    cache."""
    hidden, inner = config.hidden_size, config.intermediate_size
    inputs = torch.randn(num_tokens, hidden, **kind)
    for name, rows, activation in (("product", hidden, None), ("gated product", 2 * inner, "silu")):
        weight = 0.02 * torch.randn(rows, hidden, **kind)

        def product(weight: Tensor = weight, activation: str | None = activation) -> list[Tensor]:
            is_ours = skinny.can_run(inputs, weight, is_gated=activation is not None)
            return [(skinny.product if is_ours else skinny.product_twin)(inputs, weight, None, activation)]

        def twin(weight: Tensor = weight, activation: str | None = activation) -> list[Tensor]:
            return [skinny.product_twin(inputs, weight, None, activation)]

        yield Case(name, product, twin)


def norm_cases(hidden_TD: Tensor, update_TD: Tensor, kind: dict[str, Any]) -> Iterator[Case]:
    """Norms with and without an offset; additions with norms before, behind, around and none. Timed ones add up in
    place."""
    weight = 1 + 0.1 * torch.randn(hidden_TD.shape[-1], **kind)
    norms = {"norm": RMSNorm(weight, 1e-6), "wide norm": RMSNorm(weight, 1e-6, 1.0)}
    raw = {"norm": NormWeight(weight, 1e-6), "wide norm": NormWeight(weight.float() + 1.0, 1e-6, True), "": None}
    dtype = kind["dtype"]
    for name, norm in norms.items():
        yield Case(
            name,
            lambda norm=norm: [norm(hidden_TD)],
            lambda name=name: [kernels.rms_norm_twin(hidden_TD, raw[name] or raw["norm"], dtype)],
        )
    for behind, before in (("", "norm"), ("norm", ""), ("wide norm", "wide norm"), ("", "")):

        def add(behind: str = behind, before: str = before) -> list[Tensor]:
            sum_TD = hidden_TD.clone()
            residual = Residual(sum_TD)
            residual.add(update_TD, norms.get(behind, NoNorm(dtype)))
            normed = [residual.normed(norms[before])] if before else []
            return [residual.hidden_TD, *normed]

        def twin(behind: str = behind, before: str = before) -> list[Tensor]:
            sum_TD = hidden_TD.clone()
            normed_TD = kernels.add_norm_twin(sum_TD, update_TD, raw[behind], raw[before], 1.0)
            return [sum_TD] if normed_TD is None else [sum_TD, normed_TD]

        words = [behind and f"{behind} of the update", "addition", before]
        yield Case(" and ".join(filter(None, words)) + " (with a copy)", add, twin)


def head_cases(config: DecoderConfig, num_tokens: int, kind: dict[str, Any]) -> Iterator[Case]:
    """Heads without norms, with one each and with one over all; a part of each rotated; and an injection's, without
    queries."""
    num_kv_heads, size = config.num_kv_heads, config.head_dim
    positions, device = 64, torch.device(kind["device"])
    writer = StaticWriter(1, num_tokens, positions - num_tokens, device)
    writer.point(torch.tensor([3], device=device), torch.tensor([num_tokens], device=device))
    for name, num_heads, rotary in (
        ("heads", config.num_heads, size),
        ("normed heads", config.num_heads, size),
        ("heads normed together", config.num_heads, size // 2),
        ("heads of an injection", 0, size),
    ):
        fused = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * size, **kind)
        weight = 1 + 0.1 * torch.randn(num_heads + num_kv_heads, size, **kind)
        norm: RMSNorm | WholeNorm | None = None if name == "heads" else RMSNorm(weight, 1e-6)
        if "together" in name:
            halves = (RMSNorm(each.flatten(), 1e-6) for each in weight.tensor_split([num_heads]))
            norm = WholeNorm(*halves, num_heads)
        angles = torch.randn(positions, rotary // 2, device=device).repeat(1, 2)
        rope = Rope(angles.cos().to(kind["dtype"]), angles.sin().to(kind["dtype"]))
        tables = rope.tables(list(range(3, 3 + num_tokens)))
        caches = torch.full((4, 1, num_kv_heads, positions, size), 7.0, **kind)
        rest = writer, norm, rope, tables

        def run(split: Any, own: Tensor, fused: Tensor = fused, num: int = num_heads, rest: Any = rest) -> list[Tensor]:
            query_THD = split(fused, num, *own, *rest)
            return [*own, query_THD] if num else [*own]

        yield Case(
            name,
            lambda run=run, own=caches[:2]: run(split_heads, own),
            lambda run=run, own=caches[2:]: run(heads_twin, own),
        )


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of PyTorch's that makes a tensor, which is filled with NaN now."""

    def create_poisoned(*args: Any, **options: Any) -> Tensor:
        out = make(*args, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return create_poisoned


def largest_difference(case: Case) -> float:
    """Between an operation on poisoned memory and its twin; infinite where a value was not written."""
    expected = case.twin()
    with (
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        ours = case.ours()
    errors = [
        float((one.float() - two.float()).abs().nan_to_num(nan=float("inf")).max() / two.float().abs().max())
        for one, two in zip(ours, expected, strict=True)
    ]
    return max(errors)


def launch_us(visit: Visit, work: Callable[[], object]) -> dict[str, float]:
    """Microseconds of one run, of LAUNCHES within a CUDA graph; by the host's clock elsewhere."""
    clock, repeat, launches = Clock(visit.device), visit.sized(9, 2), visit.sized(LAUNCHES, 2)
    work()

    def many() -> None:
        for _ in range(launches):
            work()

    samples = clock.samples(graphed(visit, many, warm=work), repeat)
    return summary([1e3 * sample / launches for sample in samples])
