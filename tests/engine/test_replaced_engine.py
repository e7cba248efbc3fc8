"""An engine that another takes the place of: numbers of requests go on, and suspended streams come to an end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from small_llm import fake_llm

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, EngineReplacedError

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def other_engine(llm: LLM) -> None:
    llm.engine = llm.new_engine(llm.drafter)


def dropped(llm: LLM) -> None:
    """Aborts the request by its number, as any caller can."""
    llm.engine.abort(llm.engine.scheduler.running[0].request_id)


@pytest.mark.parametrize("lose", [LLM.renew, other_engine, dropped])
def test_a_stream_whose_answer_is_lost_ends_with_an_error(lose: Callable[[LLM], None]) -> None:
    llm = fake_llm()
    expected = llm.generate_ids([[4, 5]], PARAMS)[0].token_ids
    stream = llm.stream([1, 2, 3], PARAMS)
    next(stream)
    lose(llm)
    with pytest.raises(EngineReplacedError, match="send the prompt again"):
        list(stream)
    assert not llm._inboxes
    assert llm.generate_ids([[4, 5]], PARAMS)[0].token_ids == expected


def test_a_stream_of_the_engine_before_takes_nothing_from_the_new_one() -> None:
    """Neither its chunks nor its row, also when it is closed later."""
    llm = fake_llm()
    expected = [llm.generate_ids([prompt], PARAMS)[0].token_ids for prompt in ([1, 2, 3], [4, 5])]
    lost = llm.stream([1, 2, 3], PARAMS)
    next(lost)
    llm.renew()
    streams = [llm.stream(prompt, PARAMS) for prompt in ([1, 2, 3], [4, 5])]
    chunks = [[next(stream)] for stream in streams]
    lost.close()
    for place, stream in enumerate(streams):
        chunks[place] += stream
    assert [[token for chunk in each for token in chunk.token_ids] for each in chunks] == expected
    llm.engine.check_integrity()
    assert not llm.engine.has_work and not llm._inboxes


def test_all_drafters_are_not_exchanged_under_an_answer() -> None:
    llm = fake_llm()
    expected = llm.generate_ids([[1, 2, 3]], PARAMS)[0].token_ids
    stream = llm.stream([1, 2, 3], PARAMS)
    chunks = [next(stream)]
    with pytest.raises(ConfigError, match="drafters cannot be exchanged all at once while answers are under way"):
        llm.use_members(llm.members)
    chunks += stream
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    llm.use_members(llm.members)
    assert llm.generate_ids([[1, 2, 3]], PARAMS)[0].token_ids == expected


@pytest.mark.parametrize("replace", [LLM.renew, lambda llm: llm.use_members(llm.members)], ids=["renew", "use_members"])
def test_numbers_of_requests_go_on(replace: Callable[[LLM], None]) -> None:
    llm = fake_llm()
    numbers = [llm.engine.add([1, 2, 3], PARAMS) for _ in range(2)]
    for number in numbers:
        llm.engine.abort(number)
    replace(llm)
    numbers += [llm.engine.add([1, 2, 3], PARAMS) for _ in range(2)]
    assert len(set(numbers)) == 4
