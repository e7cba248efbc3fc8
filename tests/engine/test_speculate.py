"""`LLM(speculate=...)`: how many drafts a drafter makes and a round verifies, also of drafters that come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from paceline import LLM, SamplingParams
from paceline.draft.ngram import NgramDrafter
from paceline.errors import ConfigError, PromptError
from paceline.plan.planner import AdaptivePlanner

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 1, "max_len": 64}


def most_verified(llm: LLM) -> int:
    most = 0
    for _ in llm.stream([7] * 12, SamplingParams(max_tokens=16, ignore_eos=True)):
        most = max([most, *(count for stats in llm.engine.rounds for count in stats.num_checked_B)])
    return most


@pytest.mark.slow
def test_a_number_is_that_of_every_drafter(model: Path) -> None:
    llm = LLM(str(model), drafter="random-dflash", speculate=2, **SETTINGS)
    assert llm.drafter.num_drafted == most_verified(llm) == 2
    assert llm.make_drafter("ngram").num_drafted == 2 and llm.make_drafter("ngram", num_drafted=5).num_drafted == 5
    llm.use_drafter(llm.make_drafter("random-dflash", num_drafted=5))
    assert llm.drafter.num_drafted == 5 and most_verified(llm) == 2, "the first ones of a ready drafter"
    with pytest.raises(ConfigError, match="speculate 2 and num_drafted both set"):
        LLM(str(model), speculate=2, num_drafted=3, **SETTINGS)


@pytest.mark.slow
def test_drafter_and_drafters_exclude_each_other(model: Path) -> None:
    with pytest.raises(ConfigError, match="drafter and drafters both set"):
        LLM(str(model), drafter="none", drafters={"a": "ngram"}, **SETTINGS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"drafter": 5}, "drafter must be of type str or Path or Drafter or None, not 5"),
        ({"drafters": {"a": 5}}, "drafters must be of type Mapping[str, str or Path or Drafter] or None, not {'a': 5}"),
        ({"drafter": ""}, "drafter must be a name, not empty, not ''"),
        ({"drafters": {"a": ""}}, "drafter must be a name, not empty, not ''"),
        (
            {"drafters": {"a": None}},
            "drafters must be of type Mapping[str, str or Path or Drafter] or None, not {'a': None}",
        ),
        ({"drafters": 5}, "drafters must be of type Mapping[str, str or Path or Drafter] or None, not 5"),
        ({"router": "auto"}, "router must be of type Router or None, not 'auto'"),
        ({"allow_lossy": "false"}, "allow_lossy must be of type bool, not 'false'"),
        ({"max_tv": -1}, "max_tv must be between 0 and 1, not -1"),
        ({"loaded_drafters": 0}, "loaded_drafters must be at least 1, not 0"),
        ({"model": None}, "model must be of type str or Path, not None"),
    ],
)
def test_an_invalid_argument_is_named_before_the_model_is_loaded(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": "no-such-model"} | wrong)
    assert str(caught.value) == message


def test_paths_are_taken_as_their_names(model: Path) -> None:
    llm = LLM(model, drafter=Path("ngram"), **SETTINGS)
    assert (llm.config.model, llm.config.drafter, llm.drafter.name) == (str(model), "ngram", "ngram")
    with pytest.raises(ConfigError, match="a drafter must be a name, a path or a Drafter, not 5"):
        llm.use_drafter(cast(Any, 5))
    with pytest.raises(ConfigError, match="a drafter must be a name, a path or a Drafter, not ''"):
        llm.use_drafter("")  # it was the working folder
    with pytest.raises(ConfigError, match="a drafter must be a Drafter, not 'ngram': make one with make_drafter"):
        llm.put_drafter("mine", cast(Any, "ngram"))
    with pytest.raises(PromptError, match="token one of more than 4300 digits is outside the vocabulary of"):
        llm.generate_ids([[10**5000]])


def test_a_drafter_of_ones_own_needs_no_name(model: Path) -> None:
    class Mine(NgramDrafter):
        name = ""

    mine = Mine()
    one, several = LLM(model, drafter=mine, **SETTINGS), LLM(model, drafters={"mine": Mine()}, **SETTINGS)
    assert one.drafter is mine and one.config.drafter == several.config.drafter == "Mine"
    assert isinstance(several.drafter, Mine) and most_verified(one) > 0


@pytest.mark.slow
def test_full_is_all_that_the_drafter_makes(model: Path) -> None:
    llm = LLM(str(model), drafter="random-dflash", speculate="full", num_drafted=3, **SETTINGS)
    assert llm.drafter.num_drafted == most_verified(llm) == 3
    assert llm.make_drafter("ngram").num_drafted == 3


@pytest.mark.slow
def test_off_loads_no_drafter(model: Path) -> None:
    for more in ({"drafters": {"a": "no-such", "b": "ngram"}}, {"drafter": "no-such"}, {"drafter": NgramDrafter()}):
        llm = LLM(str(model), speculate="off", **more, **SETTINGS)
        assert llm.drafter.name == llm.config.drafter == "none" and isinstance(llm.engine.planner, AdaptivePlanner)
    assert most_verified(llm) == 0
