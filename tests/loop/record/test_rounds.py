"""Acceptance that vLLM and SGLang report for one answer, as rounds of its trace."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from upstream import completion

from paceline.loop.adapt.traffic.stored import read_hours
from paceline.loop.record.exchange import Exchange
from paceline.loop.record.reader import Reader
from paceline.loop.record.rounds import rounds_of
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.traces import Trace, TraceWriter
from paceline.serve.settings import TraceConfig

HELLO = [{"role": "user", "content": "Say hello."}]
SUMMARY = {
    "mean_acceptance_length": 2.25,
    "draft_acceptance_rate": 5 / 12,
    "acceptance_histogram": [1, 2, 0, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 12,
    "num_spec_tokens": 3,
}
"""All seven keys, as `RequestSpecDecodeMetrics.to_dict` of vLLM 0.32 fills them."""
DETAILED = SUMMARY | {
    "num_draft_tokens": 10,
    "draft_acceptance_rate": 0.5,
    "per_step_accepted": [1, 3, 0, 1],
    "per_step_drafted": [3, 3, 3, 1],
}
SGLANG = {
    "spec_accept_rate": 5 / 12,
    "spec_accept_length": 2.5,
    "spec_num_correct_drafts": 5,
    "spec_num_proposed_drafts": 12,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [1, 2, 0, 1],
}
"""Metrics as `_calculate_spec_decoding_metrics` of SGLang 0.5.23: the mean length is that of the answer's 10 tokens."""


def test_each_engine_s_report() -> None:
    by_accepted = [(3, 0), (3, 1), (3, 1), (3, 3)]
    for report in (SUMMARY, SGLANG):
        assert [each[:2] for each in rounds_of(report, 10)] == by_accepted
    assert [each[:2] for each in rounds_of(DETAILED, 10)] == [(3, 1), (3, 3), (3, 0), (1, 1)]
    assert [each[:2] for each in rounds_of({"completion_tokens": 10, **SGLANG}, None)] == by_accepted


def test_answers_without_rounds(tokenizer: Tokenizer) -> None:
    """A first token needs none; `meta_info` of a server that does not speculate says nothing of them."""
    none = {"acceptance_histogram": [0, 0, 0, 0], "mean_acceptance_length": 1.0}
    none |= dict.fromkeys(("draft_acceptance_rate", "num_spec_steps", "num_accepted_draft_tokens"), 0)
    assert rounds_of(SUMMARY | none | {"num_draft_tokens": 0}, 1) == []
    (trace,) = read(tokenizer, completion(SAID, choice={"meta_info": {"id": "x", "completion_tokens": 10}}, **USAGE))
    assert trace.drafted is None


@pytest.mark.parametrize("name", sorted(SUMMARY))
def test_every_key_of_vllm_is_checked(name: str) -> None:
    value = SUMMARY[name]
    for wrong in ([*value, 1] if isinstance(value, list) else value + 1, None, "3", -1):
        with pytest.raises((ValueError, TypeError)):
            rounds_of(SUMMARY | {name: wrong}, 10)
    with pytest.raises(KeyError):
        rounds_of({key: value for key, value in SUMMARY.items() if key != name}, 10)


@pytest.mark.parametrize(
    ("report", "change"),
    [
        (SUMMARY, {"num_draft_tokens": 10, "draft_acceptance_rate": 0.5}),
        (DETAILED, {"per_step_accepted": [1, 3, 1, 1]}),
        (DETAILED, {"per_step_accepted": [1, 3, 0]}),
        (DETAILED, {"per_step_drafted": [3, 3, 3]}),
        (DETAILED, {"per_step_drafted": [3, 1, 3, 3]}),
        (DETAILED, {"per_step_drafted": [4, 3, 2, 1]}),
        (SGLANG, {"spec_verify_ct": 5}),
        (SGLANG, {"spec_num_correct_drafts": 4}),
        (SGLANG, {"spec_num_proposed_drafts": 13}),
        (SGLANG, {"spec_correct_drafts_histogram": []}),
        (SGLANG, {"spec_accept_rate": 0.9}),
        (SGLANG, {"spec_accept_length": 3.0}),
    ],
)
def test_contradictions_are_no_rounds(report: dict[str, Any], change: dict[str, Any]) -> None:
    """The first has rounds with fewer drafts than the limit, and does not say which."""
    with pytest.raises(ValueError, match=r"differ|does not list|is reported|shorter|longer"):
        rounds_of(report | change, 10)


def test_rounds_that_do_not_fit_the_answer() -> None:
    """Nine tokens were verified; the last round may reach behind the end by its drafts."""
    assert len(rounds_of(SUMMARY, 6)) == 4
    with pytest.raises(ValueError, match="differ"):
        rounds_of(SUMMARY, 5)


def read(tokenizer: Tokenizer, *chunks: dict[str, Any], lost: Counter[str] | None = None) -> list[Trace]:
    lost = Counter[str]() if lost is None else lost
    reader = Reader(tokenizer, lose=lambda reason: lost.update([reason]))
    return list(reader.traces(Exchange(True, {"messages": HELLO, "n": len(chunks[0]["choices"])}, list(chunks))))


USAGE = {"usage": {"completion_tokens": 10}}
SAID = "Hi there."


@pytest.mark.parametrize(
    "chunks",
    [
        [completion(SAID, metrics={"speculative_decoding": SUMMARY}, **USAGE)],
        [completion(SAID, is_delta=True), {"choices": [], "metrics": {"speculative_decoding": SUMMARY}, **USAGE}],
        [completion(SAID, sglext={"spec_tokens_details": SGLANG}, **USAGE)],
        [
            completion(SAID, is_delta=True),
            {"choices": [], "sglext": {"spec_tokens_details": SGLANG}},
            {"choices": [], **USAGE},
        ],
        [completion(SAID, choice={"meta_info": {"completion_tokens": 10, **SGLANG}}, **USAGE)],
    ],
    ids=["vllm", "vllm stream", "sglang", "sglang stream", "sglang meta_info"],
)
def test_where_each_engine_puts_it(tokenizer: Tokenizer, chunks: list[dict[str, Any]]) -> None:
    (trace,) = read(tokenizer, *chunks)
    assert (trace.drafted, trace.accepted) == ([3, 3, 3, 3], [0, 1, 1, 3])
    assert tokenizer.decode(trace.answer_ids) == SAID


def test_ids_and_acceptance_of_several_answers(tokenizer: Tokenizer) -> None:
    """SGLang's extension: token ids and acceptance, one for each answer; three reports for two answers are wrong."""
    answer = completion("Hi.")
    answer["choices"].append({**answer["choices"][0], "index": 1})
    ids = [[*tokenizer.encode("Hi."), *tokenizer.eos_token_ids]] * 2
    more = {"input_ids": [1, 2], "output_ids": ids}
    first, second = read(tokenizer, answer | {"sglext": {**more, "spec_tokens_details": [SGLANG, SGLANG]}})
    assert first.prompt_ids == [1, 2] and [first.answer_ids, second.answer_ids] == ids
    assert first.accepted == second.accepted == [0, 1, 1, 3]
    lost = Counter[str]()
    for trace in read(tokenizer, answer | {"sglext": {**more, "spec_tokens_details": [SGLANG] * 3}}, lost=lost):
        assert trace.drafted is trace.accepted is None
    assert lost == {"rounds": 2}


@pytest.mark.parametrize("odd", [{}, [], 3, "much", SUMMARY | {"num_spec_steps": 3}])
def test_a_wrong_report_is_counted_and_the_answer_stays(tokenizer: Tokenizer, odd: Any) -> None:
    lost = Counter[str]()
    (trace,) = read(tokenizer, completion(SAID, metrics={"speculative_decoding": odd}, **USAGE), lost=lost)
    assert trace.drafted is trace.accepted is None and tokenizer.decode(trace.answer_ids) == SAID
    assert lost == {"rounds": 1}


def test_customers_are_seen_by_their_tags(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The input of `adapt check`: acceptance length by customer, from two customers' answers of vLLM."""
    writer = TraceWriter(TraceConfig(tmp_path), "tiny")
    reader = Reader(tokenizer, lose=writer.lose)
    writer.begin(tokenizer)
    worse = SUMMARY | {"acceptance_histogram": [4, 0, 0, 0], "mean_acceptance_length": 1.0}
    worse |= {"draft_acceptance_rate": 0.0, "num_accepted_draft_tokens": 0}
    for tag, report in (("bank", SUMMARY), ("shop", worse), ("shop", SUMMARY | {"num_spec_steps": 9})):
        answer = completion(SAID, metrics={"speculative_decoding": report}, **USAGE)
        exchange = Exchange(True, {"messages": HELLO}, [answer], ended=time.time(), tag=tag)
        writer.put(lambda exchange=exchange: reader.traces(exchange))
    writer.close()
    hours, left_out = read_hours(tmp_path)
    clusters = {name: sums.tokens_per_round for by in hours.values() for name, sums in by.items()}
    assert clusters == {"bank": 2.25, "shop": 1.0} and left_out == {"no rounds": 1}
    assert (writer.written, writer.dropped["rounds"]) == (3, 1)
