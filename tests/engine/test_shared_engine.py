"""One LLM, several callers: every chunk reaches the request it belongs to, and drafters are swapped while requests
run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from doubles import ByteTokenizer, FakeTarget, ScriptedDrafter
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.data.messages import MessageError
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.engine.engine import Chunk, Engine
from paceline.errors import DrafterMismatchError, NumericsError, PromptError

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def llm(model: Path) -> LLM:
    return LLM(str(model), drafter="ngram", dtype="float32", device="cpu", max_batch=4, max_len=256, speculate="3")


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def alone(llm: LLM, *prompts: list[int]) -> list[list[int]]:
    return [llm.generate_ids([prompt], PARAMS)[0].token_ids for prompt in prompts]


def test_two_streams_read_in_turns(llm: LLM) -> None:
    expected = alone(llm, [1, 2, 3], [4, 5])
    streams, answers = [llm.stream([1, 2, 3], PARAMS), llm.stream([4, 5], PARAMS)], [[], []]
    for _ in range(100):
        for place, stream in enumerate(streams):
            answers[place] += next(stream, Chunk(None, [], "")).token_ids  # pyright: ignore[reportArgumentType]
    assert answers == expected and not llm.engine.has_work


def test_one_stream_read_after_the_other(llm: LLM) -> None:
    expected = alone(llm, [1, 2, 3], [4, 5])
    first, second = llm.stream([1, 2, 3], PARAMS), llm.stream([4, 5], PARAMS)
    begun = [next(first), next(second)]
    rest = list(first)  # its steps make the other's tokens too
    assert [tokens_of([begun[0], *rest]), tokens_of([begun[1], *second])] == expected


def test_answers_made_between_two_chunks_and_inside_a_callback(llm: LLM) -> None:
    expected = alone(llm, [1, 2, 3], [4, 5], [6, 7, 8])
    stream = llm.stream([1, 2, 3], PARAMS)
    chunks = [next(stream)]
    inside: list[list[int]] = []

    def answer_another(chunk: Chunk) -> None:
        if not inside:
            inside.append([])
            inside[0] += llm.generate_ids([[6, 7, 8]], PARAMS)[0].token_ids

    between = llm.generate_ids([[4, 5]], PARAMS, answer_another)[0].token_ids
    assert [tokens_of(chunks + list(stream)), between, *inside] == expected


@pytest.mark.parametrize("prompt", [np.array([1, 2, 3]), [np.int64(1), 2, 3], torch.tensor([1, 2, 3]), (1, 2, 3)])
def test_token_ids_of_arrays_and_tensors_are_read(llm: LLM, prompt: Any) -> None:
    (expected,) = alone(llm, [1, 2, 3])
    assert alone(llm, prompt) == [expected] == [tokens_of([*llm.stream(prompt, PARAMS)])]


@pytest.mark.parametrize("prompt", [[1, 2.5, 3], [1, "2"], ["a", "b"], {"role": "user", "content": "a"}, None])
def test_a_prompt_that_is_neither_text_nor_messages_nor_token_ids_is_refused(llm: LLM, prompt: Any) -> None:
    for call in (lambda: llm.generate_ids([prompt], PARAMS), lambda: [*llm.stream(prompt, PARAMS)]):
        with pytest.raises(PromptError, match="must be a list of token ids"):
            call()
    with pytest.raises(PromptError, match=r"not iterable\): give one prompt as in \[\[1, 2\]\]"):
        llm.generate_ids(cast(Any, [1, 2, 3]), PARAMS)
    assert not llm.engine.has_work


def test_a_stream_leaves_out_no_message(llm: LLM) -> None:
    message: Any = {"role": "user", "content": "a"}
    (expected,) = llm.chat([[message]], PARAMS)
    assert tokens_of([*llm.stream([message], PARAMS)]) == expected.token_ids
    with pytest.raises(MessageError, match=r"messages\[1\]"):
        [*llm.stream([message, "b"], PARAMS)]  # pyright: ignore[reportArgumentType]


def test_a_stream_that_is_dropped_is_aborted_and_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], PARAMS)
    next(stream)
    stream.close()
    assert not llm.engine.has_work and not llm._inboxes


def test_a_drafter_swapped_while_an_answer_runs(llm: LLM) -> None:
    """The answer goes on with the drafter that it began with; the next one has the new one."""
    expected = alone(llm, [1, 2, 3], [4, 5])
    stream = llm.stream([1, 2, 3], PARAMS)
    chunks = [next(stream)]
    llm.use_drafter("random-dflash")
    assert isinstance(llm.drafter, DFlashDrafter) and llm.engine.drafter is llm.drafter
    other = llm.generate_ids([[4, 5]], PARAMS)[0]
    chunks += stream
    assert [tokens_of(chunks), other.token_ids] == expected
    assert {one.source for one in chunks[-1].sequence.rounds} <= {"ngram", "none"}
    assert llm.generate_ids([[4, 5]], PARAMS)[0].token_ids == expected[1] and llm.engine.pool.drafters == [llm.drafter]


def test_a_refused_drafter_changes_nothing(llm: LLM, model: Path) -> None:
    """The target goes on tapping the layers that the drafter in use reads."""
    llm.use_drafter("random-dflash")
    before, taps = llm.drafter, llm.target.tap_layers
    misfit = DFlashDrafter.random(FakeTarget(vocab_size=258, hidden_size=64))
    with pytest.raises(DrafterMismatchError):
        llm.use_drafter(misfit)
    assert llm.drafter is before and llm.engine.drafter is before and llm.target.tap_layers == taps
    expected = LLM(str(model), drafter="none", dtype="float32", device="cpu").generate_ids([[1, 2, 3]], PARAMS)
    assert llm.generate_ids([[1, 2, 3]], PARAMS)[0].token_ids == expected[0].token_ids


def test_what_was_packed_is_kept_when_an_engine_is_made_anew(llm: LLM) -> None:
    drafter = DFlashDrafter.random(llm.target)
    engines = [llm.new_engine(drafter) for _ in range(2)]
    path = drafter._path
    engines.append(llm.new_engine(drafter))
    assert drafter._path is path
    llm.target.allocate_cache(2, 128)
    llm.new_engine(drafter)
    assert drafter._path is not path


class Failing(FakeTarget):
    """Its logits are NaN where the last token in the cache is `bad`."""

    bad = 13

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        logits = super().logits_after(tokens)
        return logits * float("nan") if tokens[-1] == self.bad else logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prompt", [[4, 13], [4, 5, 6]])
def test_a_request_whose_logits_are_no_numbers_ends_with_an_error_and_alone(
    temperature: float, prompt: list[int]
) -> None:
    """In its prompt, or in the middle of its answer; the neighbours' texts are what they would be."""
    target = Failing(vocab_size=16, num_rows=3, is_width_invariant=True)
    engine = Engine(target, ByteTokenizer(), ScriptedDrafter(target, accuracy=0.8))
    params = SamplingParams(max_tokens=400, temperature=temperature, seed=1, ignore_eos=True)
    calm = SamplingParams(max_tokens=8, ignore_eos=True, logit_bias={13: -math.inf})
    others = [engine.add([number, 2], calm) for number in (1, 2)]
    broken = engine.add(prompt, params)
    texts: dict[int, list[int]] = {}
    ends: dict[int, object] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts.setdefault(chunk.sequence.request_id, []).extend(chunk.token_ids)
            if chunk.finish_reason:
                ends[chunk.sequence.request_id] = (chunk.finish_reason, type(chunk.sequence.error))
        engine.check_integrity()
    assert ends == {broken: ("error", NumericsError), **dict.fromkeys(others, ("length", type(None)))}
    assert all(len(texts[number]) == 8 for number in others)
    assert prompt[-1] != 13 or not texts[broken]
    assert target.cache.num_free == 3
