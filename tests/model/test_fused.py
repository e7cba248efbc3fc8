"""Operations with hand-written gradients against their plain spelling and autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.model.torch.fused import autocast_dtype, rms_norm, rotate, swiglu

EPS = 1e-6


def plain_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    return inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + EPS) * weight


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def plain_rotate(heads_THD: Tensor, angles_TD: Tensor) -> Tensor:
    """Half-split rotary embedding, pair by pair."""
    first, second = heads_THD.chunk(2, -1)
    cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def tables(angles_TD: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles_TD.cos()[:, None], angles_TD.sin()[:, None]
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


def with_gradients(compute: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    out = compute(*inputs)
    upstream = values(*out.shape, seed=9).detach().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def assert_same(fused: list[Tensor], plain: list[Tensor], tolerance: float) -> None:
    for own, theirs in zip(fused, plain, strict=True):
        assert (own.double() - theirs.double()).abs().max() <= tolerance * theirs.double().abs().max().clamp(min=1.0)


ANGLES = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def norm_at_1e6(inputs: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(inputs, weight, EPS)


CASES = {
    "norm": (norm_at_1e6, plain_norm, ((5, 3, 8), (8,))),
    "swiglu": (swiglu, plain_swiglu, ((5, 8), (5, 8))),
    "rotate": (lambda heads: rotate(heads, *(t.to(heads.dtype) for t in tables(ANGLES))), None, ((5, 3, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_the_plain_spelling_and_its_gradients(name: str) -> None:
    fused, plain, shapes = CASES[name]
    inputs = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    reference = plain or (lambda heads: plain_rotate(heads, ANGLES.to(heads.dtype)))
    assert_same(with_gradients(fused, *inputs), with_gradients(reference, *inputs), 2e-6)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_as_bfloat16_can_be(name: str) -> None:
    """Against the plain spelling in float64 of the same rounded inputs: a few roundings of 2^-9 each."""
    fused, plain, shapes = CASES[name]
    inputs = [values(*shape, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    reference = plain or (lambda heads: plain_rotate(heads, ANGLES))
    actual = with_gradients(fused, *inputs)
    assert all(each.dtype is torch.bfloat16 for each in actual)
    assert_same(actual, with_gradients(reference, *exact), 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["swiglu", "rotate"]
)  # the norm computes in float32: too coarse for finite differences
def test_gradients_by_finite_differences(name: str) -> None:
    fused, _, shapes = CASES[name]
    inputs = [values(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(fused, inputs)


def test_norm_of_large_small_and_zero_rows() -> None:
    inputs = values(4, 8) * torch.tensor([[1e4], [1e-5], [1.0], [0.0]])
    inputs = inputs.detach().requires_grad_()
    weight = values(8, seed=1)
    assert_same(with_gradients(norm_at_1e6, inputs, weight), with_gradients(plain_norm, inputs, weight), 1e-5)


def test_norm_gives_what_the_next_product_wants() -> None:
    inputs, weight = values(3, 8), values(8, seed=1)
    assert rms_norm(inputs, weight, EPS).dtype is torch.float32 is autocast_dtype(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        lowered = rms_norm(inputs, weight, EPS)
        assert autocast_dtype(inputs) is torch.bfloat16
    assert lowered.dtype is torch.bfloat16
    grads = torch.autograd.grad(lowered.float().sum(), (inputs, weight))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    assert_same(list(grads), list(torch.autograd.grad(plain_norm(inputs, weight).sum(), (inputs, weight))), 0.02)


def test_swiglu_keeps_its_inputs() -> None:
    gate, up = values(4, 8), values(4, 8, seed=1)
    before = gate.detach().clone(), up.detach().clone()
    swiglu(gate, up).sum().backward()
    assert torch.equal(gate.detach(), before[0]) and torch.equal(up.detach(), before[1])
