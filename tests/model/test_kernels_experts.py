"""Kernels of mixtures of experts: each equals its twin under Triton's interpreter, and compiles for an H100.

As in `test_kernels_layer.py`, in processes of their own; without Triton only the twins are tested.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_kernels import MOST_SHARED, compiling, in_a_process
from model.test_kernels_layer import DTYPES, error, poisoned_empties, round_to_nearest
from torch import Tensor

from paceline.model.config.decoder import DecoderConfig
from paceline.model.torch.experts import Experts
from paceline.model.torch.kernels import available, experts
from paceline.model.torch.kernels.experts import ExpertStack
from paceline.model.torch.parts import GatedMLP, PackedLinear, make_experts

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
TINY = DecoderConfig(
    "qwen3_moe", 50, 40, 24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, max_position=64,
    num_experts=9, experts_per_token=3, expert_size=24,
)  # fmt: skip
WIDTHS = {"30B-A3B": (2048, 768, 128, 8, "silu"), "gpt-oss 20B": (2880, 2880, 32, 4, "clamped_swiglu")}
"""Hidden and inner widths, experts, those of a token, activation."""


def drawn(config: DecoderConfig, dtype: torch.dtype) -> tuple[ExpertStack, list[GatedMLP]]:
    """Matrices of experts, and each of them as an MLP of its own."""
    num, inner, hidden = config.num_experts, config.expert_size, config.hidden_size
    shapes = [(num, 2 * inner, hidden), (num, hidden, inner), (num, 2 * inner), (num, hidden)]
    gate_up, down, gate_up_bias, down_bias = ((torch.randn(shape) / shape[-1] ** 0.5).to(dtype) for shape in shapes)
    if not config.has_expert_biases:
        gate_up_bias = down_bias = None
    rest = config.activation, config.swiglu_limit, config.swiglu_alpha
    mlps = [
        GatedMLP(
            config,
            PackedLinear(gate_up[expert].clone(), None if gate_up_bias is None else gate_up_bias[expert].clone()),
            PackedLinear(down[expert].clone(), None if down_bias is None else down_bias[expert].clone()),
        )
        for expert in range(num)
    ]
    return ExpertStack(gate_up, down, gate_up_bias, down_bias, *rest), mlps


def route_cases(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for num_tokens, num_experts, per_token in ((1, 128, 8), (5, 9, 3), (3, 4, 4), (2, 60, 1)):
        # Distinct in bfloat16 too: kernel and PyTorch may break ties otherwise.
        logits_TE = torch.stack([torch.randperm(num_experts) for _ in range(num_tokens)]).to(dtype) / 16
        live_T = torch.arange(num_tokens) % 2 == 0
        for is_normed in (False, True):
            for live in (None, live_T):
                ours = experts.route(logits_TE, per_token, is_normed, live)
                expected = experts.route_twin(logits_TE, per_token, is_normed, live)
                name = f"route {num_tokens} x {num_experts}, {per_token} a token, {is_normed}, {live is not None}"
                yield f"{name}, weights", error(ours[0], expected[0])
                yield f"{name}, numbers", float(not torch.equal(ours[1].long(), expected[1]))


def mix_cases(dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """One token, one block of them, and lists; fewer pairs than experts and more; idle tokens; biases; inputs of
    padding that are no numbers."""
    for num_tokens, activation, has_biases, num_idle in (
        (1, "silu", False, 0),
        (3, "clamped_swiglu", True, 1),
        (3, "silu", False, 2),
        (16, "gelu_tanh", False, 0),
        (17, "silu", True, 3),
        (150, "silu", False, 0),
    ):
        config = replace(TINY, activation=activation, has_expert_biases=has_biases)
        stack, mlps = drawn(config, dtype)
        inputs_TD = torch.randn(num_tokens, config.hidden_size).to(dtype)
        live_T = torch.ones(num_tokens, dtype=torch.bool)
        live_T[torch.randperm(num_tokens)[:num_idle]] = False
        logits_TE = torch.randn(num_tokens, config.num_experts)
        weights_TK, chosen_TK = experts.route_twin(logits_TE, config.experts_per_token, True, live_T)
        expected = experts.mix_twin(inputs_TD, mlps, weights_TK, chosen_TK)
        inputs_TD[~live_T] = float("nan")
        shared = None
        if num_idle == 0:
            shared = torch.randn(num_tokens, config.hidden_size).to(dtype), torch.randn(num_tokens, 1).to(dtype)
            expected += shared[0] * torch.sigmoid(shared[1])
        ours = experts.mix(inputs_TD, stack, weights_TK, chosen_TK.int(), shared)
        yield f"{num_tokens} tokens, {activation}, biases {has_biases}, {num_idle} idle", error(ours, expected)


def interpreted(dtype: str) -> dict[str, float]:
    """The error of each case, in a process of its own under the interpreter."""
    from gpu_day_stages.attention_cases import mend_interpreter

    def poisoned(*size: Any, **options: Any) -> Tensor:
        return torch.full(size, float("nan") if options["dtype"].is_floating_point else -(10**6), **options)

    torch.empty = poisoned
    poisoned_empties()
    mend_interpreter()
    round_to_nearest()
    torch.manual_seed(1)
    return dict([*route_cases(DTYPES[dtype][0]), *mix_cases(DTYPES[dtype][0])])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_equals_its_twin(dtype: str) -> None:
    errors = in_a_process(__file__, f"interpreted({dtype!r})", TRITON_INTERPRET="1")
    assert len(errors) == 32 + 6
    assert {name: size for name, size in errors.items() if not size <= DTYPES[dtype][1]} == {}


def resources(model: str) -> dict[str, dict[str, int]]:
    """Bytes of stack and of shared memory of each kernel, compiled for an H100, for passes of 1, 16 and 256 tokens."""
    from paceline.model.torch.kernels.triton import experts as experts_triton

    used: dict[str, dict[str, int]] = {}
    experts._launch = compiling(experts_triton, used)
    hidden, inner, num_experts, per_token, activation = WIDTHS[model]
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    has_biases = activation == "clamped_swiglu"
    biases = [torch.empty(num_experts, size, **kind) if has_biases else None for size in (2 * inner, hidden)]
    gate_up, down = torch.empty(num_experts, 2 * inner, hidden, **kind), torch.empty(num_experts, hidden, inner, **kind)
    stack = ExpertStack(gate_up, down, *biases, activation, 7.0, 1.702)
    for num_tokens in (1, 16, 256):
        live_T = torch.empty(num_tokens, dtype=torch.bool, device="meta")
        weights_TK, chosen_TK = experts.route(torch.empty(num_tokens, num_experts, **kind), per_token, True, live_T)
        experts.mix(torch.empty(num_tokens, hidden, **kind), stack, weights_TK, chosen_TK)
    return used


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("model", WIDTHS)
def test_a_kernel_compiles_for_an_h100(model: str) -> None:
    used = in_a_process(__file__, f"resources({model!r})")
    assert len(used) >= 8
    assert {name: each for name, each in used.items() if each["stack"] or each["shared"] >= MOST_SHARED} == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("has_biases", [True, False])
def test_a_pass_of_fixed_shape_is_an_ordinary_one(is_normed: bool, has_biases: bool) -> None:
    """Tokens that do not count get zeros, and change nothing for the others whatever they are."""
    torch.manual_seed(2)
    config = replace(TINY, has_expert_biases=has_biases)
    _, mlps = drawn(config, torch.float32)
    layer = Experts(PackedLinear(torch.randn(9, 40)), mlps, 3, is_normed)
    inputs_TD, live_T = torch.randn(7, 40), torch.tensor([True, True, False, True, False, True, True])
    expected = layer(inputs_TD[live_T])
    inputs_TD[~live_T] = torch.tensor(float("nan"))
    output = layer(inputs_TD, live_T)
    torch.testing.assert_close(output[live_T], expected, atol=1e-5, rtol=1e-5)
    assert (output[~live_T] == 0.0).all()
    assert layer.chosen_TK is not None and (layer.chosen_TK[~live_T] == -1).all()
    assert (layer.chosen_TK[live_T] >= 0).all()


def test_stacks_hold_what_each_expert_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU, here "meta", matrices are stacked, gates first; each expert is a view of them."""
    config = replace(TINY, has_expert_biases=True, shared_expert_size=8)
    from paceline.model.layout import layer_shapes

    parts = {name: torch.randn(shape) for name, shape in layer_shapes(config, 0).items()}
    original = {name: tensor.clone() for name, tensor in parts.items()}
    monkeypatch.setattr("paceline.model.torch.parts.has_stacks", lambda weight: True)
    monkeypatch.setattr("paceline.model.torch.parts.can_pack", lambda weight: False)
    layer = make_experts(config, parts)
    stack = layer._stack
    assert stack is not None and stack.gate_up_bias_EX is not None and stack.down_bias_ED is not None
    assert not [name for name in parts if ".mlp." in name]
    for expert in range(9):
        own = {
            name.removeprefix(f"mlp.experts.{expert}."): tensor
            for name, tensor in original.items()
            if f".{expert}." in name
        }
        assert torch.equal(stack.gate_up_EXD[expert], torch.cat([own["gate_proj.weight"], own["up_proj.weight"]]))
        assert torch.equal(stack.gate_up_bias_EX[expert], torch.cat([own["gate_proj.bias"], own["up_proj.bias"]]))
        assert torch.equal(stack.down_EDI[expert], own["down_proj.weight"])
        assert torch.equal(stack.down_bias_ED[expert], own["down_proj.bias"])
        mlp = layer._experts[expert]
        assert isinstance(mlp, GatedMLP)
        assert mlp._gate_up._weight.data_ptr() == stack.gate_up_EXD[expert].data_ptr()


def test_kernels_run_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded passes of any size, and small ordinary ones; a long prompt is sorted, as an expert then has many
    tokens."""
    stack, mlps = drawn(TINY, torch.float32)
    launched = list[str]()
    monkeypatch.setattr(available, "can_use", lambda device: True)
    monkeypatch.setattr(experts, "_launch", lambda kernel, *rest, **more: launched.append(kernel))
    layer = Experts(PackedLinear(torch.randn(9, 40)), mlps, 3, True, None, stack)
    layer(torch.randn(16, 40))
    assert launched == ["route", "multiply", "multiply", "combine"]
    launched.clear()
    layer(torch.randn(400, 40), torch.ones(400, dtype=torch.bool))
    assert launched == ["route", "list_pairs", "multiply", "multiply", "combine"]
