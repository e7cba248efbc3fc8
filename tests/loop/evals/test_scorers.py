"""How answers are scored, and what of a case cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import PromptError
from paceline.loop.evals.scorers import SCORERS, check_scorer, object_in, program_of

SCHEMA = {"type": "object", "required": ["action"], "properties": {"action": {"enum": ["refund", "trace"]}}}


@pytest.mark.parametrize(
    ("scorer", "text", "score"),
    [
        ({"kind": "exact", "answer": "Paris"}, " Paris\n", 1.0),
        ({"kind": "exact", "answer": "Paris"}, "paris", 0.0),
        ({"kind": "exact", "answer": "Paris", "ignore_case": True}, "paris", 1.0),
        ({"kind": "numeric", "answer": 1234}, "First 7, so it is 1,234.", 1.0),
        ({"kind": "numeric", "answer": 1234}, "1,234 it is, or 5", 0.0),
        ({"kind": "numeric", "answer": 0.5, "tolerance": 0.01}, "about 0.505", 1.0),
        ({"kind": "numeric", "answer": 3}, "none", 0.0),
        ({"kind": "numeric", "answer": 0.5}, "The answer is .5", 1.0),
        ({"kind": "numeric", "answer": -0.5}, "$-.5$", 1.0),
        ({"kind": "numeric", "answer": 2024}, "It ran in 2023-2024.", 1.0),
        ({"kind": "numeric", "answer": -7}, "x=-7.", 1.0),
        ({"kind": "numeric", "answer": 5}, "so...5", 1.0),
        ({"kind": "regex", "pattern": r"\bRF-\d+"}, "use RF-204 here", 1.0),
        ({"kind": "regex", "pattern": r"RF-\d+", "full": True}, "use RF-204 here", 0.0),
        (
            {"kind": "json", "fields": {"action": "refund", "n": 1}},
            'Sure: ```json\n{"action": "refund", "n": 1}\n```',
            1.0,
        ),
        ({"kind": "json", "fields": {"action": "refund", "n": 1}}, '{"action": "refund", "n": true}', 0.5),
        ({"kind": "json", "fields": {"of": [{"n": 1}, 2.0]}}, '{"of": [{"n": 1}, 2]}', 1.0),
        ({"kind": "json", "fields": {"of": [{"n": 1}, 2.0]}}, '{"of": [{"n": true}, 2]}', 0.0),
        ({"kind": "json", "fields": {"of": [{"n": 1}, 2.0]}}, '{"of": [{"n": 1}]}', 0.0),
        ({"kind": "json", "fields": {"of": [{"n": 1}, 2.0]}}, '{"of": [{"n": 1, "m": 0}, 2]}', 0.0),
        ({"kind": "json", "fields": {"action": "refund"}}, '["refund"]', 0.0),
        ({"kind": "json", "fields": {"action": "refund"}, "schema": SCHEMA}, '{"action": "refund"}', 1.0),
        ({"kind": "json", "fields": {"action": "refund"}, "schema": SCHEMA}, '{"action": "burn"}', 0.0),
        ({"kind": "json", "schema": SCHEMA}, '{"action": "refund"}', 1.0),
        ({"kind": "json", "schema": SCHEMA}, '{"action": "burn"}', 0.0),
        ({"kind": "json", "schema": SCHEMA}, '{"other": 1}', 0.0),
    ],
)
def test_scores(scorer: dict[str, Any], text: str, score: float) -> None:
    check_scorer(scorer, "here")
    actual, why = SCORERS[scorer["kind"]](scorer, text)
    assert actual == score
    assert bool(why) == (score < 1)


@pytest.mark.slow
def test_an_object_is_found_within_text_and_depth_does_no_harm() -> None:
    assert object_in('{no} then {"a": {"b": 1}} and more') == {"a": {"b": 1}}
    assert object_in('{"a":' * 5000) is None


@pytest.mark.parametrize(
    "scorer",
    [
        {"kind": "none"},
        {"kind": "exact"},
        {"kind": "numeric", "answer": "many"},
        {"kind": "regex", "pattern": "("},
        {"kind": "json"},
        {"kind": "json", "schema": {"type": "nothing"}},
        {"kind": "json", "fields": ["action"]},
        {"kind": ["json"]},
        {"kind": "numeric", "answer": 1, "tolerance": "small"},
        {"kind": "code", "tests": 5},
        {"kind": "judge", "reference": "x", "criteria": ["short"]},
    ],
)
def test_what_cannot_be_scored_is_refused_with_its_place(scorer: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match="line 3"):
        check_scorer(scorer, "suite.jsonl, line 3")


def test_programs_of_humaneval_and_of_plain_tests() -> None:
    head = {
        "prompt": "def add(a, b):\n    '''Sum.'''\n",
        "entry_point": "add",
        "tests": "def check(f):\n    assert f(1, 2) == 3",
    }
    whole = program_of(head, "```python\ndef add(a, b):\n    return a + b\n```")
    exec(whole, {})  # the published form: prompt, answer, tests, call
    assert "check(add)" in whole
    assert program_of({"tests": "assert x == 1"}, "x = 1") == "x = 1\n\nassert x == 1\n"
