"""Weights swapped in a model that runs: afterwards it says what a model says that was made of them, whatever was
cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import FakeTarget
from native_models import BASE, SHAPES, needs_library, random_weights, same_bits, tell
from safetensors.torch import load_file
from small_llm import tiny_model
from torch import Tensor

from paceline.engine.llm import LLM
from paceline.errors import ConfigError, ModelFileError, UnsupportedModelError
from paceline.model.native.decoder import NativeDecoder
from paceline.model.sampling.logits import logprobs_of
from paceline.model.torch.decoder import Decoder
from paceline.types import SamplingParams

KINDS = [pytest.param(Decoder, id="torch"), pytest.param(NativeDecoder, id="native", marks=needs_library)]
PROMPT = list(range(40, 80))


def decoder_with(kind: Any, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32, shape: Any = BASE) -> Any:
    return kind(shape, weights.items(), num_rows=4, max_len=128, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["llama", "qwen2-biases"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_as_one_made_of_them(kind: Any, shape: str, dtype: torch.dtype) -> None:
    config = SHAPES[shape]
    old, new = random_weights(config, 0), random_weights(config, 1)
    target, fresh = decoder_with(kind, old, dtype, config), decoder_with(kind, new, dtype, config)
    tell(target)
    target.load_weights(new.items())
    for ours, theirs in zip(tell(target), tell(fresh), strict=True):
        assert same_bits(ours.logits_TV, theirs.logits_TV) and ours.argmax_T == theirs.argmax_T


@pytest.mark.parametrize("kind", KINDS)
def test_the_owner_may_go_on_changing_them(kind: Any) -> None:
    weights = random_weights(BASE, 1)
    target = decoder_with(kind, random_weights(BASE, 0))
    target.load_weights(weights.items())
    before = [each.logits_TV for each in tell(target)]
    for tensor in weights.values():
        tensor.mul_(-3.0)
    target.allocate_cache(4, 128)
    assert all(same_bits(ours, theirs.logits_TV) for ours, theirs in zip(before, tell(target), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", ["missing", "unknown", "shape", "nan"])
def test_wrong_weights_change_nothing(kind: Any, spoil: str) -> None:
    target, weights = decoder_with(kind, random_weights(BASE, 0)), random_weights(BASE, 1)
    before = [each.logits_TV for each in tell(target)]
    if spoil == "missing":
        del weights["model.norm.weight"]
    elif spoil == "unknown":
        weights["model.layers.0.lora"] = torch.ones(2)
    elif spoil == "shape":
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    else:
        weights["model.norm.weight"][3] = float("nan")
    with pytest.raises(ModelFileError):
        target.load_weights(weights.items())
    assert all(same_bits(ours, theirs.logits_TV) for ours, theirs in zip(before, tell(target), strict=True))


def test_other_implementations_say_that_they_cannot() -> None:
    with pytest.raises(UnsupportedModelError, match="FakeTarget keeps the weights"):
        FakeTarget().load_weights([])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "drafter"),
    [
        ("torch", "random-dflash"),
        pytest.param("native", "none", marks=needs_library),
        pytest.param("native", "random-dflash", marks=needs_library),
    ],
)
def test_nothing_cached_is_used_again(tmp_path: Path, backend: str, drafter: str) -> None:
    folder = tiny_model(tmp_path)
    weights = {name: 2.0 * tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "backend": backend, "max_batch": 2, "max_len": 128}
    llm, fresh = (LLM(str(folder), drafter=drafter, **settings) for _ in range(2))
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    before = llm.generate_ids([PROMPT, PROMPT], params)[0].token_ids
    llm.load_weights(weights)
    fresh.target.load_weights(weights.items())
    fresh.renew()
    after = llm.generate_ids([PROMPT, PROMPT], params)
    assert [each.token_ids for each in after] == [
        each.token_ids for each in fresh.generate_ids([PROMPT, PROMPT], params)
    ]
    assert after[0].token_ids != before
    assert list(llm.members) == [drafter.removeprefix("random-")]


def test_answers_under_way_keep_the_weights(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model(tmp_path)), drafter="none", device="cpu", dtype="float32", max_len=64)
    number = llm.engine.add(PROMPT, SamplingParams(max_tokens=4))
    with pytest.raises(ConfigError, match="under way"):
        llm.load_weights({})
    llm.engine.abort(number)


@pytest.mark.slow
def test_log_probabilities_at_the_temperature(tmp_path: Path) -> None:
    """Log-probabilities of the sampled distribution, with and without drafts; unmodified ones by default."""
    logits_V = torch.tensor([1.0, 3.0, -2.0])
    assert logprobs_of(logits_V, 0, 0, 0.5).logprob == pytest.approx(float((2 * logits_V).log_softmax(-1)[0]))
    llm = LLM(str(tiny_model(tmp_path)), drafter="random-dflash", device="cpu", dtype="float32", max_len=128)
    logprobs = []
    for scaled in (False, True):
        for most in (0, None):
            params = SamplingParams(
                max_tokens=12,
                temperature=0.5,
                seed=3,
                logprobs=0,
                scaled_logprobs=scaled,
                max_drafted=most,
                ignore_eos=True,
            )
            (answer,) = llm.generate_ids([PROMPT], params)
            logprobs.append([each.logprob for each in answer.logprobs])
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5) and logprobs[2] == pytest.approx(logprobs[3], abs=1e-5)
    assert logprobs[0] != pytest.approx(logprobs[2], abs=1e-3)
