"""Limits said at a setting's field: of values, of tuples' values, of choices; with names that are those of the
fields."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_type_hints

import numpy as np
import pytest
import torch

from paceline.bounds import Count, Must, Positive, Rate, Share, Whole, _limits_of, _numbers_of, at_least, check, within
from paceline.config import EngineConfig
from paceline.errors import ConfigError, SamplingError
from paceline.model.sampling.logits import penalise, target_probs
from paceline.sampling import GrammarSpec, SamplingParams
from paceline.serve.settings import ServeConfig
from paceline.train.config import DrafterShape, LoopConfig, TrainConfig


@dataclass(frozen=True)
class Oven:
    trays: Count = 1
    heat: Annotated[float, within("above 0 and at most 300", above=0, most=300)] | None = None
    fuel: Annotated[str, ("gas", "wood")] = "gas"
    mode: Literal["slow", "fast"] = "slow"
    minutes: tuple[Rate, ...] = (10.0,)
    rest: Positive = math.inf
    shares: tuple[Share, ...] | None = None
    guests: Whole = 0
    width: Annotated[int, at_least(2)] = 2
    name: Annotated[str, Must("more than blanks", str.strip)] = "oven"
    free: float = -1.0

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trays": 0}, "trays must be at least 1, not 0"),
        ({"heat": 0.0}, "heat must be above 0 and at most 300, not 0.0"),
        ({"heat": 301.0}, "heat must be above 0 and at most 300, not 301.0"),
        ({"heat": math.nan}, "heat must be above 0 and at most 300, not nan"),
        ({"fuel": "coal"}, "fuel must be one of gas, wood, not 'coal'"),
        ({"mode": "off"}, "mode must be one of slow, fast, not 'off'"),
        ({"minutes": (1.0, 0.0)}, "minutes must be above 0, not 0.0"),
        ({"minutes": (math.inf,)}, "minutes must be above 0, not inf"),
        ({"rest": math.nan}, "rest must be above 0, not nan"),
        ({"shares": (0.5, 1.5)}, "shares must be between 0 and 1, not 1.5"),
        ({"guests": -1}, "guests must be 0 or more, not -1"),
        ({"width": 1}, "width must be at least 2, not 1"),
        ({"name": " "}, "name must be more than blanks, not ' '"),
        ({"trays": None}, "trays must be at least 1, not None"),
        ({"fuel": None}, "fuel must be one of gas, wood, not None"),
        ({"minutes": (10.0, None)}, "minutes must be above 0, not None"),
    ],
)
def test_what_is_beyond_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Oven(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", [EngineConfig, ServeConfig, SamplingParams, TrainConfig, LoopConfig, DrafterShape])
def test_integers_of_more_than_64_bits_are_refused(kind: Any) -> None:
    """They ended in OverflowError, or PyTorch's errors, where they were first used."""
    names = [name for name, hint in get_type_hints(kind, include_extras=True).items() if _numbers_of(hint) == {int}]
    assert names
    for name, number in itertools.product(names, (10**30, -(10**30), 10**5000)):
        is_several = "tuple" in str(get_type_hints(kind)[name])
        with pytest.raises((ConfigError, SamplingError), match=f"^{name} must be"):
            kind(**{name: (number,) if is_several else number})


def test_what_is_within_is_taken() -> None:
    assert Oven(trays=3, heat=300.0, fuel="wood", mode="fast", minutes=(), shares=(0.0, 1.0), guests=7).free == -1.0


def test_the_kind_of_error_is_the_callers() -> None:
    class Late(Oven):
        def __post_init__(self) -> None:
            check(self, SamplingError)

    with pytest.raises(SamplingError, match="trays must be"):
        Late(trays=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "1"}, "temperature must be of type float, not '1'"),
        ({"max_tokens": 2.0}, "max_tokens must be of type int, not 2.0"),
        ({"logprobs": True}, "logprobs must be of type int or None, not True"),
        ({"ignore_eos": "no"}, "ignore_eos must be of type bool, not 'no'"),
        ({"stop": None}, "stop must be of type tuple[str, ...], not None"),
        ({"stop": [1]}, "stop must be of type tuple[str, ...], not (1,)"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be of type tuple[int, ...], not (1.5,)"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must be of type dict[int, float] or None, not {'5': 1.0}"),
        ({"prediction": ["a"]}, "prediction must be of type str or tuple[int, ...], not ('a',)"),
        ({"grammar": "json"}, "grammar must be of type GrammarSpec or None, not 'json'"),
        ({"lossy": 5}, "lossy must be of type Lossy or None, not 5"),
        ({"stop_token_ids": [1, 2, "3", 4]}, "stop_token_ids must be of type tuple[int, ...], not (1, 2, '3', 4)"),
        ({"stop_token_ids": torch.tensor(5)}, "stop_token_ids must be of type tuple[int, ...], not 5"),
        ({"stop_token_ids": torch.tensor([1.5])}, "stop_token_ids must be of type tuple[int, ...], not (1.5,)"),
        ({"temperature": 1e46}, "temperature must be between 0 (greedy) and 1e9, not 1e+46"),
        ({"top_k": -(10**5000)}, "top_k must be 0 (off) or more, not one of more than 4300 digits"),
        ({"stop": [10**5000]}, "stop must be of type tuple[str, ...], not a tuple that has one"),
        ({"max_tokens": 10**30}, f"max_tokens must be a 64-bit integer, not {10**30}"),
        ({"temperature": 10**5000}, "temperature must be between 0 (greedy) and 1e9, not one of more than 4300 digits"),
        ({"temperature": math.nan}, "temperature must be between 0 (greedy) and 1e9, not nan"),
        ({"logit_bias": {5: 1e308}}, "logit_bias must be numbers up to 1e9, or -inf, not {5: 1e+308}"),
        ({"logit_bias": {5: -(10**400)}}, f"logit_bias must be numbers up to 1e9, or -inf, not {{5: -1{'0' * 74}"),
        ({"presence_penalty": -1e308}, "presence_penalty must be between -1e9 and 1e9, not -1e+308"),
        ({"frequency_penalty": 1e39}, "frequency_penalty must be between -1e9 and 1e9, not 1e+39"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be between 1e-9 and 1e9, not 1e-46"),
        ({"bad_words": "\ud800"}, r"bad_words must be valid Unicode, without lone surrogates, not '\ud800'"),
        ({"stop": ["a", "\udfff"]}, r"stop must be valid Unicode, without lone surrogates, not '\udfff'"),
        ({"prediction": "\ud800"}, r"prediction must be valid Unicode, without lone surrogates, not '\ud800'"),
    ],
)
def test_an_invalid_sampling_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**values)
    assert (str(caught.value), caught.value.field) == (message, next(iter(values)))


def test_a_schema_that_is_no_text_is_refused() -> None:
    """A dict ended in an AttributeError when the grammar was compiled."""
    schema: Any = {"type": "object"}
    with pytest.raises(SamplingError, match="grammar: text must be of type str, not .*: give a schema as JSON text"):
        GrammarSpec("json_schema", schema)


def test_lists_tensors_and_their_numbers_are_sampling_values() -> None:
    values: Any = {
        "temperature": np.float32(0.5),
        "top_p": torch.tensor(0.5),
        "seed": np.int64(3),
        "stop_token_ids": [torch.tensor(4), np.int64(5)],
        "prediction": torch.tensor([6, 7]),
        "stop": ["a"],
    }
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == {
        "temperature": 0.5, "top_p": 0.5, "seed": 3, "stop_token_ids": (4, 5), "prediction": (6, 7), "stop": ("a",)
    }  # fmt: skip
    assert type(params.seed) is int  # NumPy's 64 bits overflow in a seed's hash


def test_token_ids_of_a_prediction_are_checked_for_their_type_only() -> None:
    """Each of 32,000 ids was searched for surrogates, for each of a request's answers."""
    ids = tuple(range(32_000))
    assert SamplingParams(prediction=ids).prediction is ids and "prediction" not in _limits_of(SamplingParams)
    assert [type(token) for token in SamplingParams(prediction=(5, cast(Any, np.int64(6)))).prediction] == [int, int]
    assert SamplingParams(logit_bias={5: -sys.float_info.max, 6: -math.inf}).logit_bias


def test_the_largest_sampling_values_fit_in_float32() -> None:
    params = SamplingParams(
        temperature=1e-300, logit_bias={1: 1e9}, repetition_penalty=1e9, presence_penalty=-1e9, frequency_penalty=-1e9
    )
    logits_JV = penalise(torch.tensor([[0.0, 50.0, -50.0]]), params, [1, 2], {1: 100_000, 2: 1}, [])
    assert target_probs(logits_JV, params).tolist() == [[0.0, 1.0, 0.0]]
    hot = SamplingParams(temperature=1e9)
    assert target_probs(torch.tensor([[0.0, 50.0]]), hot)[0].tolist() == pytest.approx([0.5, 0.5])
