"""Logits to distributions: every filter against a plain full-sort reference, penalties against one position at a
time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.model.sampling import logits as logits_module
from paceline.model.sampling.logits import logprobs_of, penalise, sample, target_probs
from paceline.types import SamplingParams


def reference_probs(logits_V: Tensor, params: SamplingParams) -> list[float]:
    """The same distribution by hand: one full sort in Python, ties to the lowest id."""
    probs = torch.softmax(logits_V.float() / params.temperature, -1).tolist()
    probs = [prob if prob >= params.min_p * max(probs) else 0.0 for prob in probs]
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = order[: params.top_k or None]
    whole, mass, kept = sum(probs[token] for token in order), 0.0, []
    for token in order:
        kept.append(token)
        mass += probs[token]
        if params.top_p < 1 and mass >= params.top_p * whole:
            break
    return [probs[token] / mass if token in set(kept) else 0.0 for token in range(len(probs))]


def check(logits_JV: Tensor, params: SamplingParams) -> None:
    before = logits_JV.clone()
    result_JV = target_probs(logits_JV, params)
    assert torch.equal(logits_JV, before)
    assert result_JV.dtype == torch.float32
    for logits_V, result_V in zip(logits_JV, result_JV, strict=True):
        expected_V = torch.tensor(reference_probs(logits_V, params))
        assert ((result_V > 0) == (expected_V > 0)).all()
        torch.testing.assert_close(result_V, expected_V, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.6, "min_p": 0.02}]
)
def test_filters_match_the_full_sort(temperature: float, filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    check(torch.randn(6, 300, generator=generator) * 2, SamplingParams(temperature=temperature, **filters))  # pyright: ignore


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=9, max_size=9), min_size=1, max_size=3
    ),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.15, 0.45, 0.77, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_ties_keep_the_lowest_ids(rows: list[list[float]], top_k: int, top_p: float, min_p: float) -> None:
    check(torch.tensor(rows), SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))


def test_top_k_of_one_is_the_argmax_also_of_tied_bfloat16_logits() -> None:
    logits_JV = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs_JV = target_probs(logits_JV, SamplingParams(temperature=0.7, top_k=1))
    assert torch.equal(probs_JV.argmax(-1), logits_JV.argmax(-1))
    assert torch.equal(probs_JV.sum(-1), torch.ones(4))
    assert (probs_JV > 0).sum() == 4


@pytest.mark.parametrize("min_p", [0.0, 1e-3])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_top_p_settled_at_any_size_is_bit_equal(monkeypatch: pytest.MonkeyPatch, top_p: float, min_p: float) -> None:
    scales = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.1, 0.0])  # from a few tokens to thousands, and all tied
    logits_JV = torch.randn(6, 4000, generator=torch.Generator().manual_seed(1)) * scales[:, None]
    params = SamplingParams(temperature=1.0, top_p=top_p, min_p=min_p)
    fast_JV = target_probs(logits_JV, params)
    monkeypatch.setattr(logits_module, "_TOP_P_SIZES", ())
    assert torch.equal(fast_JV, target_probs(logits_JV, params))
    num_kept = (fast_JV > 0).sum(-1).tolist()
    assert num_kept[0] < 64
    if top_p > 0.5 and not min_p:
        assert num_kept[-1] == math.ceil(top_p * 4000)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    scales = torch.tensor([6.0, 0.2, 3.0, 1.0, 2.0])
    logits_JV = torch.randn(5, 3000, generator=torch.Generator().manual_seed(2)) * scales[:, None]
    for params in (SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=1.0, top_k=50, top_p=0.9)):
        together_JV = target_probs(logits_JV, params)
        assert all(torch.equal(together_JV[j], target_probs(logits_JV[j : j + 1], params)[0]) for j in range(5))


def test_extreme_temperatures_and_forbidden_tokens_give_no_nan() -> None:
    logits_JV = torch.tensor([[1e4, 9e3, -math.inf, 0.0]])
    assert target_probs(logits_JV, SamplingParams(temperature=1e-45)).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert target_probs(logits_JV, SamplingParams(temperature=1e9))[0, 2] == 0
    assert target_probs(logits_JV, SamplingParams(temperature=1.0, top_p=0.5, min_p=1.0)).tolist() == [
        [1.0, 0.0, 0.0, 0.0]
    ]


def reference_penalise(
    logits: list[float], params: SamplingParams, context: list[int], answer: list[int]
) -> list[float]:
    logits = [logit + (params.logit_bias or {}).get(token, 0.0) for token, logit in enumerate(logits)]
    for token in set(context):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(answer).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 7), max_size=4),
    answer=st.lists(st.integers(0, 7), max_size=5),
    draft=st.lists(st.integers(0, 7), max_size=5),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.6]),
    frequency=st.sampled_from([0.0, -0.4, 0.9]),
    bias=st.sampled_from([None, {2: 1.5, 5: -math.inf}]),
)
def test_penalties_follow_the_drafted_prefix(
    prompt: list[int],
    answer: list[int],
    draft: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float] | None,
) -> None:
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    logits_JV = torch.randn(len(draft) + 1, 8, generator=torch.Generator().manual_seed(4)) * 3
    before = logits_JV.clone()
    result_JV = penalise(logits_JV, params, prompt + answer, Counter(answer), draft)
    assert torch.equal(logits_JV, before)
    for j in range(len(draft) + 1):
        so_far = answer + draft[:j]
        expected = reference_penalise(logits_JV[j].tolist(), params, prompt + so_far, so_far)
        torch.testing.assert_close(result_JV[j], torch.tensor(expected), rtol=1e-5, atol=1e-6)
        alone_1V = penalise(logits_JV[j : j + 1], params, prompt + so_far, Counter(so_far), [])
        assert torch.equal(result_JV[j], alone_1V[0])  # bit-equal to plain decoding


def test_nothing_to_penalise_costs_nothing() -> None:
    logits_JV = torch.zeros(3, 8)
    assert penalise(logits_JV, SamplingParams(), [1], Counter({1: 1}), [1, 2]) is logits_JV


def test_sample_is_the_inverse_of_the_running_sum() -> None:
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    draws = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, 1 - 2**-53: 4}
    assert {draw: sample(probs_V, draw) for draw in draws} == draws
    assert [sample(probs_V * 7, draw) for draw in draws] == list(draws.values())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 1.0]), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True)
)
def test_sample_never_returns_an_impossible_token(weights: list[float], draw: float) -> None:
    if sum(weights) > 0:
        for number in (draw, 0.0, 1 - 2**-53):
            assert weights[sample(torch.tensor(weights), number)] > 0


def test_logprobs_come_from_the_unmodified_logits() -> None:
    logits_V = torch.tensor([0.0, 2.0, 1.0, -1.0])
    expected = torch.log_softmax(logits_V, -1).tolist()
    result = logprobs_of(logits_V, 3, 2)
    assert result.token_id == 3
    assert result.logprob == pytest.approx(expected[3], abs=1e-6)
    assert [token for token, _ in result.top] == [1, 2]
    assert [value for _, value in result.top] == pytest.approx([expected[1], expected[2]], abs=1e-6)
    assert logprobs_of(logits_V, 0, 0).top == ()
