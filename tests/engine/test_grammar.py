"""Answers that keep to a grammar: the same with and without drafts, of the right distribution, ended where they may
end."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import ByteTokenizer, FakeTarget
from engine_runs import byte_target, check_logprobs, run
from grammar_engines import (
    DATE,
    EOS,
    OBJECT,
    PROMPTS,
    SCHEMA,
    SPECS,
    Knowing,
    byte_engine,
    constrained_greedy,
    drafters,
    greedy_answers,
    matcher_of,
)

from paceline import LLM
from paceline.engine.engine import Engine
from paceline.errors import SamplingError
from paceline.types import GrammarSpec, SamplingParams

NAMES = list(drafters(FakeTarget()))
GREEDY = [(name, list(SPECS)[number % 3], 0.8 * (number % 2)) for number, name in enumerate(NAMES)]
"""Every drafter with one grammar, and every grammar with penalised answers and with others."""


def is_right(spec: GrammarSpec, text: str) -> bool:
    if spec.kind == "regex":
        return re.fullmatch(spec.text, text) is not None
    parsed = json.loads(text)
    if spec == OBJECT:
        return isinstance(parsed, dict)
    return (
        list(parsed) == ["name", "age", "langs"]
        and 0 <= parsed["age"] <= 120
        and set(parsed["langs"]) <= {"de", "en", "fr"}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "grammar", "penalty"), GREEDY)
def test_greedy_answers_are_constrained_plain_decodings(name: str, grammar: str, penalty: float) -> None:
    spec = SPECS[grammar]
    target = byte_target(num_rows=3)
    params = SamplingParams(max_tokens=120, grammar=spec, frequency_penalty=penalty)
    expected = greedy_answers(spec, penalty)
    drafter = drafters(target)[name]
    if isinstance(drafter, Knowing):
        drafter.answers = dict(zip(map(tuple, PROMPTS), expected, strict=True))
    engine = byte_engine(target, drafter)
    answers = run(engine, PROMPTS, params)
    assert [seq.output_ids for seq in answers] == expected
    ended = [seq for seq in answers if seq.finish_reason == "stop"]
    assert ended or spec == OBJECT, "a bounded grammar comes to its end"
    for seq in ended:
        assert seq.output_ids[-1] == EOS
        assert is_right(spec, ByteTokenizer().decode(seq.output_ids))
    if name == "the answer":
        assert sum(len(seq.rounds) for seq in answers) < 0.6 * sum(seq.num_output for seq in answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["always", "never", "sometimes"])
def test_with_certain_drafts_a_seed_gives_constrained_plain_decodings_text(name: str) -> None:
    target = byte_target(sharpness=1.5)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=80, grammar=SCHEMA)
    plain = run(byte_engine(target), PROMPTS, params)
    drafted = run(byte_engine(target, drafters(target)[name]), PROMPTS, params)
    assert [seq.output_ids for seq in drafted] == [seq.output_ids for seq in plain]
    assert all(is_right(SCHEMA, ByteTokenizer().decode(seq.output_ids)) for seq in plain if seq.finish_reason == "stop")


@pytest.mark.parametrize(("most", "is_allowed"), [(0, True), (1, True), (16, True), (17, False)])
@pytest.mark.parametrize("spec", [OBJECT, SCHEMA], ids=["object", "schema"])
def test_json_has_at_most_sixteen_characters_of_white_space_in_a_row(
    spec: GrammarSpec, most: int, is_allowed: bool
) -> None:
    space = (" \t\r\n" * 5)[:most]
    text = f'{{{space}"name"{space}:{space}"Ada",{space}"age":{space}36,"langs":[{space}"de"{space}]{space}}}'
    matcher, tokens = matcher_of(spec), list(text.encode())
    assert json.loads(text)["age"] == 36
    num_taken = matcher.validate_tokens([*tokens, EOS])
    assert num_taken == (len(tokens) + 1 if is_allowed else text.index(space) + 16)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec("json_schema", '{"type": "strin"}'), "json schema cannot be used .Invalid type: strin"),
        (GrammarSpec("json_schema", "{"), "json schema cannot be used"),
        (GrammarSpec("json_schema", ""), "json schema cannot be used"),
        (GrammarSpec("json_schema", "[1]"), "Expecting object schema"),
        (GrammarSpec("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}'), "Unsatisfiable"),
        (GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "Default retriever does not fetch"),
        (GrammarSpec("regex", "([a"), "regex cannot be used"),
        (GrammarSpec("regex", "(?=a)b"), "look-around"),
        (GrammarSpec("regex", "\ud800"), "half a surrogate pair"),
        (GrammarSpec("json_schema", '{"const": "\ud800"}'), "half a surrogate pair"),
        (GrammarSpec("regex", "a" * 65_537), "65,537 characters are too long"),
        (GrammarSpec("json_schema", '{"$ref": "#"}'), "json schema cannot be used"),
        (GrammarSpec("yaml"), "kind must be one of"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_grammars_are_refused_at_the_door(spec: GrammarSpec, message: str) -> None:
    engine = byte_engine(byte_target())
    with pytest.raises(SamplingError, match=message):
        engine.add([1], SamplingParams(max_tokens=4, grammar=spec))
    assert not engine.has_work
    engine.check_integrity()


def test_a_grammar_needs_an_end_token() -> None:
    with pytest.raises(SamplingError, match="end token"):
        Engine(byte_target(), ByteTokenizer()).add([1], SamplingParams(max_tokens=4, grammar=OBJECT))


def test_a_vocabulary_is_read_once_and_only_for_a_grammar() -> None:
    engine = byte_engine(byte_target())
    run(engine, [[1]], SamplingParams(max_tokens=4))
    assert engine.grammars._vocabulary is None
    run(engine, [[1]], SamplingParams(max_tokens=4, grammar=DATE))
    vocabulary = engine.grammars._vocabulary
    run(engine, [[1]], SamplingParams(max_tokens=4, grammar=OBJECT))
    assert vocabulary is not None and engine.grammars._vocabulary is vocabulary


@pytest.mark.slow
def test_what_is_over_or_aborted_keeps_nothing() -> None:
    engine = byte_engine(byte_target(num_rows=1))
    params = SamplingParams(max_tokens=60, grammar=SCHEMA)
    ids = [
        engine.add([1, 2], params),
        engine.add([3, 4], params),
        engine.add([5], SamplingParams(max_tokens=5, grammar=DATE)),
    ]
    sequences = [seq for seq, _ in engine._requests.values()]
    states = [weakref.ref(seq.constraint) for seq in sequences]  # pyright: ignore[reportArgumentType]
    for _ in range(4):
        engine.step()
    assert engine.abort(ids[1]) is not None and engine.abort(ids[0]) is not None
    assert [seq.constraint is None for seq in sequences] == [True, True, False]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    gc.collect()
    assert all(seq.constraint is None for seq in sequences) and all(state() is None for state in states)


def test_the_target_never_sees_a_refused_draft() -> None:
    target = byte_target()
    engine = byte_engine(target, drafters(target)["never"])
    (seq,) = run(engine, [[1, 2]], SamplingParams(max_tokens=60, grammar=SCHEMA))
    matcher, begin = matcher_of(SCHEMA), 2
    for call in target.calls[1:]:
        drafts = call.tokens[1:]
        matcher.reset()
        assert matcher.consume_tokens(seq.tokens[begin : call.starts[0] + 1])
        assert matcher.validate_tokens(drafts) == len(drafts)
    num_drafted = sum(one.num_drafted for one in seq.rounds)
    assert num_drafted > 2 * sum(len(call.tokens) - 1 for call in target.calls[1:]), "few wrong drafts are good JSON"


def test_a_refused_draft_gives_way_to_the_only_token_there_is() -> None:
    """Wrong at every third place, and yet whole rounds of a fixed text stand."""
    spec, prompt = GrammarSpec("regex", "the quick brown fox"), [1, 2]
    target = byte_target()
    answer = [*b"the quick brown fox", EOS]
    (seq,) = run(
        byte_engine(target, Knowing({tuple(prompt): answer})), [prompt], SamplingParams(max_tokens=40, grammar=spec)
    )
    assert seq.output_ids == answer
    assert len(seq.rounds) == 3  # 1 + 8 + 8 + 3 tokens


def test_a_grammar_that_grows_too_large_cuts_its_own_answer_short() -> None:
    """The library gives up in the middle; the neighbour does not notice, and nobody is told that this was the
    answer."""
    target = byte_target()
    params = [
        SamplingParams(max_tokens=80, grammar=spec)
        for spec in (GrammarSpec("regex", "((a{30,1000}){30,1000}){30,1000}"), None)
    ]
    (grown, neighbour) = run(byte_engine(target, drafters(target)["sometimes"]), PROMPTS[:2], params)
    assert grown.finish_reason == "length" and set(grown.output_ids[:-1]) == {ord("a")} and grown.output_ids[-1] == EOS
    assert neighbour.output_ids == target.greedy(PROMPTS[1], 80)


@pytest.mark.parametrize("name", ["none", "sometimes"])
def test_the_end_ends_it_whatever_the_request_ignores(name: str) -> None:
    target = byte_target()
    params = SamplingParams(max_tokens=60, ignore_eos=True, grammar=GrammarSpec("regex", "yes|no"))
    (seq,) = run(byte_engine(target, drafters(target)[name]), [[1]], params)
    assert bytes(seq.output_ids[:-1]) in (b"yes", b"no")
    assert seq.output_ids[-1] == EOS and seq.finish_reason == "stop"


def test_the_grammar_has_the_last_word_over_a_bias() -> None:
    """y is forbidden, and so is every other way to begin."""
    params = SamplingParams(max_tokens=9, grammar=GrammarSpec("regex", "yes"), logit_bias={ord("y"): -torch.inf})
    for temperature in (0.0, 1.0):
        sampled = SamplingParams(
            max_tokens=9, grammar=params.grammar, logit_bias=params.logit_bias, temperature=temperature
        )
        (seq,) = run(byte_engine(byte_target()), [[1]], sampled)
        assert bytes(seq.output_ids[:-1]) == b"yes"
    either = SamplingParams(max_tokens=9, grammar=GrammarSpec("regex", "yes|no"), logit_bias=params.logit_bias)
    (seq,) = run(byte_engine(byte_target()), [[1]], either)
    assert bytes(seq.output_ids[:-1]) == b"no"


@pytest.mark.parametrize("name", ["none", "sometimes"])
def test_logprobs_stay_the_targets_own(name: str) -> None:
    target = byte_target(sharpness=1.0)
    (seq,) = run(
        byte_engine(target, drafters(target)[name]), [[1, 2]], SamplingParams(max_tokens=9, logprobs=2, grammar=SCHEMA)
    )
    assert len(seq.output_ids) == 9
    check_logprobs(target, seq, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "always", "sometimes, with probabilities", "ngram"])
def test_neighbours_without_a_grammar_say_what_they_would(name: str) -> None:
    target = byte_target(num_rows=4)
    params = [SamplingParams(max_tokens=30, grammar=spec) for spec in (None, SCHEMA, None, DATE)]
    answers = run(byte_engine(target, drafters(target)[name]), PROMPTS, params)
    for prompt, seq, own in zip(PROMPTS, answers, params, strict=True):
        expected = constrained_greedy(target, own.grammar, prompt, own) if own.grammar else target.greedy(prompt, 30)
        assert seq.output_ids == expected[: expected.index(EOS) + 1 if EOS in expected else None]


@pytest.mark.parametrize("shape", [{"min_tokens": 3}, {"bad_words": ("b",)}])
def test_a_grammar_and_other_masks_go_together_in_float16(shape: dict[str, Any]) -> None:
    """Float16 has no number as low as the one below all logits."""

    class Half(FakeTarget):
        def logits_after(self, tokens: Sequence[int]) -> torch.Tensor:
            return super().logits_after(tokens).half()

    params = SamplingParams(max_tokens=9, grammar=GrammarSpec("regex", "[a-c]{3,9}"), **shape)
    for temperature in (0.0, 1.0):
        [seq] = run(byte_engine(Half(vocab_size=258)), [[1, 2]], replace(params, temperature=temperature, seed=1))
        assert seq.error is None and re.fullmatch("[a-c]{3,9}.?", ByteTokenizer().decode(seq.output_ids))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_built_in_model_answers_a_schema() -> None:
    """Batched, drafted by what ships, in float32: the tokens of constrained plain decoding, and JSON."""
    llm = LLM("smollm2-135m", dtype="float32", max_batch=2, max_len=192, speculate="full")
    names = ("Marie Curie", "Alan Turing")
    prompts = [
        llm.encode_chat([{"role": "user", "content": f"Describe {name} as JSON: name, age, langs."}]) for name in names
    ]
    params = SamplingParams(max_tokens=64, grammar=SCHEMA)
    drafted = llm.generate_ids(prompts, params)
    llm.use_drafter("none")
    plain = llm.generate_ids(prompts, params)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert all(answer.finish_reason == "stop" and is_right(SCHEMA, answer.text) for answer in plain)
    assert sum(answer.stats.num_accepted for answer in drafted) > 0
