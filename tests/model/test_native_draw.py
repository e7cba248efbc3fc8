"""One token of a distribution by the native library: the one that PyTorch's way chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from native_models import ISAS, needs_library, restored, use
from torch import Tensor

from paceline.errors import NumericsError
from paceline.model.sampling.logits import draw, sample, target_probs
from paceline.types import SamplingParams

pytestmark = needs_library


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    with restored():
        yield


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=4.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=3.0, top_k=1000),
]


def by_pytorch(logits_V: Tensor, params: SamplingParams, uniform: float) -> int:
    return sample(target_probs(logits_V.unsqueeze(0), params)[0], uniform)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 5000])
def test_it_is_pytorch_s(size: int, isa: str) -> None:
    use(isa)
    generator = torch.Generator().manual_seed(size)
    differing = 0
    for sharpness in (0.5, 4.0):
        logits_V = sharpness * torch.randn(size, generator=generator) - 100 * (sharpness > 1)
        for params in SETTINGS:
            for uniform in (0.0, 0.1, 0.37, 0.5, 0.83, 0.97, 1 - 2**-53):
                differing += draw(logits_V, params, uniform) != by_pytorch(logits_V, params, uniform)
    assert differing <= 1, "a draw may fall between two roundings of one boundary, hardly ever"


@pytest.mark.parametrize("isa", ISAS)
def test_of_equals_the_lowest_stay(isa: str) -> None:
    use(isa)
    logits_V = torch.zeros(700)
    logits_V[[3, 300, 600]] = 2.0
    for params in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=0.1, top_p=0.5)):
        drawn = {draw(logits_V, params, uniform) for uniform in torch.linspace(0, 0.999, 50).tolist()}
        assert drawn == {3, 300}
    even = {draw(torch.zeros(700), SamplingParams(temperature=1.0, top_k=5), uniform / 50) for uniform in range(50)}
    assert even == {0, 1, 2, 3, 4}


def test_what_is_masked_is_never_drawn() -> None:
    logits_V = torch.full((600,), float("-inf"))
    logits_V[[7, 511]] = torch.tensor([-200.0, -201.0])
    for params in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.99)):
        params = replace(params, temperature=1.0)
        assert {draw(logits_V, params, uniform / 100) for uniform in range(100)} == {7, 511}
        assert draw(logits_V, params, 1 - 2**-53) == 511


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_distribution_is_refused(wrong: float) -> None:
    with pytest.raises(NumericsError, match="no distribution"):
        draw(torch.full((9,), wrong), SamplingParams(temperature=1.0), 0.5)


@pytest.mark.parametrize("isa", ISAS)
def test_one_nan_is_enough_to_refuse(isa: str) -> None:
    use(isa)
    for size in (9, 700):
        for at in (0, 7, size - 1):
            logits_V = torch.zeros(size)
            logits_V[at] = float("nan")
            with pytest.raises(NumericsError, match="no distribution"):
                draw(logits_V, SamplingParams(temperature=1.0), 0.5)
