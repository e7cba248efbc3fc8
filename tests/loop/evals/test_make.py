"""Suites from files and stores: what is told by a row's keys, and what must be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.rows import Dropped
from paceline.errors import ConfigError, PromptError
from paceline.loop.evals.config import MakeConfig
from paceline.loop.evals.make import make_suite

TICKET = {"id": "7", "messages": [{"role": "user", "content": "Ann: The bed was damaged.\nPolicy RF-204: refund"}]}


def suite_of(tmp_path: Path, *rows: dict[str, Any], **config: Any) -> Any:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_suite(MakeConfig((str(file),), **config))


def test_published_sets_are_known_by_their_keys(tmp_path: Path) -> None:
    suite = suite_of(
        tmp_path,
        {"question": "How many?", "answer": "Three and four.\n#### 1,007"},
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "entry_point": "f",
            "test": "def check(f):\n    pass",
            "canonical_solution": "",
        },
        {"task_id": 11, "text": "Write g.", "code": "", "test_setup_code": "", "test_list": ["assert g() == 1"]},
        TICKET,
        {"messages": [{"role": "user", "content": "As JSON?"}, {"role": "assistant", "content": '{"a": 1, "b": 2}'}]},
    )
    kinds = [case.scorer["kind"] for case in suite]
    assert kinds == ["numeric", "code", "code", "json", "json"]
    assert suite.cases[0].scorer["answer"] == 1007.0 and "boxed" in suite.cases[0].messages[0]["content"]
    assert (
        suite.cases[3].scorer["fields"] == {"policy_id": "RF-204", "action": "refund"}
        and suite.cases[3].id == "rows.jsonl/7"
    )
    assert suite.cases[4].scorer["fields"] == {"a": 1, "b": 2} and len(suite.cases[4].messages) == 1
    assert suite.runs_code


def test_what_is_not_told_must_be_said(tmp_path: Path) -> None:
    row = {"prompt": "Capital of France?", "answer": "It is Paris."}
    with pytest.raises(PromptError, match="by exact or judge"):
        suite_of(tmp_path, row)
    assert suite_of(tmp_path, row, scorer="exact").cases[0].scorer == {"kind": "exact", "answer": "It is Paris."}
    judged = suite_of(tmp_path, row, scorer="judge", criteria="Shorter is better.").cases[0].scorer
    assert judged == {"kind": "judge", "reference": "It is Paris.", "criteria": "Shorter is better."}
    assert suite_of(tmp_path, {"prompt": "?"}, scorer="regex", pattern="Paris").cases[0].scorer["pattern"] == "Paris"
    with pytest.raises(PromptError, match="line 1: it has no answer"):
        suite_of(tmp_path, {"prompt": "?"})
    with pytest.raises(PromptError, match="no JSON object"):
        suite_of(tmp_path, row, scorer="json")
    with pytest.raises(ConfigError, match="pattern"):
        MakeConfig(("x",), scorer="regex")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"scorer": "exact", "pattern": "a"}, "pattern"),
        ({"criteria": "Shorter is better."}, "criteria"),
        ({"scorer": "json", "tolerance": 0.5}, "tolerance"),
        ({"scorer": "regex", "pattern": "a", "fields": ("n",)}, "fields"),
        ({"scorer": "exact", "schema": Path("schema.json")}, "schema"),
        ({"seed": 3}, "seed"),
    ],
)
def test_settings_of_another_scorer_are_refused(settings: dict[str, Any], name: str) -> None:
    """They were accepted, and had no effect."""
    with pytest.raises(ConfigError, match=f"^{name} means nothing (for scorer|without a limit).*: leave it out"):
        MakeConfig(("x",), **settings)


def test_fields_limits_and_suites_again(tmp_path: Path) -> None:
    rows = [{"prompt": f"Number {at}?", "answer": json.dumps({"n": at, "why": "so"})} for at in range(20)]
    suite = suite_of(tmp_path, *rows, fields=("n",), limit=5, seed=3)
    assert len(suite) == 5 and all(set(case.scorer["fields"]) == {"n"} for case in suite)
    assert suite.cases == suite_of(tmp_path, *rows, fields=("n",), limit=5, seed=3).cases
    with pytest.raises(PromptError, match="no field 'm'"):
        suite_of(tmp_path, *rows, fields=("m",))
    again = tmp_path / "again.jsonl"
    suite.write(again)
    assert [case.scorer for case in make_suite(MakeConfig((str(again),)))] == [case.scorer for case in suite]


def test_keys_that_are_not_read_are_counted_by_row(tmp_path: Path) -> None:
    dropped = Dropped()
    rows = [
        {"question": "Capital of Peru?", "choices": ["Lima", "Cusco"], "answer": "1"},
        {"prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    pass", "context": "a file"},
        {"question": "How many?", "answer": "#### 7", "context": "", "id": 9},
        {"instruction": "Add.", "input": "3 and 4", "output": "7", "choices": ["7"]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(list(make_suite(MakeConfig((str(file),)), dropped=dropped))) == 4
    assert dropped.unread == {"choices": 2, "context": 1, "input": 1}
    assert not dropped


def test_unread_keys_are_logged_where_nobody_counts_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    suite_of(tmp_path, {"question": "How many?", "answer": "7", "context": "Seven."})
    assert "context (1 rows)" in caplog.text


def test_a_row_that_cannot_be_used_is_counted_wherever_it_stands(tmp_path: Path) -> None:
    good, dropped = {"question": "How many?", "answer": "7"}, Dropped()
    file = tmp_path / "rows.jsonl"
    lines = [
        json.dumps({"question": "Why?"}),
        json.dumps(good),
        '{"question": ',
        json.dumps({"other": 1}),
        json.dumps(good),
    ]
    file.write_text("\n".join(lines) + "\n")
    assert len(list(make_suite(MakeConfig((str(file),)), dropped=dropped))) == 2
    assert sum(dropped.counts.values()) == 3 and dropped.counts["that cannot be scored"] == 2
    with pytest.raises(PromptError, match="rows.jsonl, line 1"):
        make_suite(MakeConfig((str(file),)))
