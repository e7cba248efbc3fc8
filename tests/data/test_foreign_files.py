"""Rows and Parquet files as other programs write them: read, counted as left out, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.data.answers import AnswerShards, read_answers
from paceline.data.messages import MessageError, normalised
from paceline.data.prompts import read_prompts
from paceline.data.rows import Dropped
from paceline.data.tags import check_tags
from paceline.errors import ConfigError, PromptError

DEEP = "[" * 100_000 + "]" * 100_000
ANSWERS: dict[str, Any] = {
    "key": ["a", "b"],
    "source": ["s", "s"],
    "turn": [0, 0],
    "temperature": [0.0, 0.7],
    "prompt_ids": [[1, 2], [3]],
    "answer_ids": [[4], [5]],
    "finish_reason": ["stop", "stop"],
    "text": ["x", "y"],
}
NOT_UTF8 = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))


def stored(folder: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table(columns), folder / "traces-1.parquet")
    return folder / "traces-1.parquet"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": DEEP}]}, "malformed"),
        ({"prompt": "a", "tools": DEEP}, "malformed"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]}, "not text alone"),
    ],
    ids=["nested call", "nested tools", "list as a part's type"],
)
def test_a_row_that_python_cannot_hold_is_left_out(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    file, dropped = tmp_path / "prompts.jsonl", Dropped()
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, {"prompt": "Say hi."})))
    assert [prompt.turns for prompt in read_prompts(file, dropped=dropped)] == [("Say hi.",)]
    assert dropped.counts == {reason: 1}


@pytest.mark.parametrize("kind", [["text"], {"a": 1}, 5])
def test_the_type_of_a_part_must_be_a_known_name(kind: Any) -> None:
    """A server reads the same messages from requests."""
    with pytest.raises(MessageError, match=r"messages\[0\].content\[0\]: content of type"):
        normalised([{"role": "user", "content": [{"type": kind, "text": "a"}]}])


@pytest.mark.parametrize(
    "column", [pa.array([2**62], pa.timestamp("us")), pa.array([2**62], pa.duration("s")), NOT_UTF8]
)
def test_values_of_parquet_that_python_cannot_hold(column: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"traces-1.parquet is not a readable Parquet file \(.*: give a .jsonl file"):
        read_prompts(stored(tmp_path, prompt=["a"], date=column), dropped=Dropped())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prompt_ids", [["a"], ["b"]]),
        ("prompt_ids", [1, 2]),
        ("answer_ids", [[1.5], [2.0]]),
        ("answer_ids", [{"a": 1}, {"a": 2}]),
        ("temperature", ["hot", "cold"]),
        ("turn", ["first", "second"]),
        ("key", [[1], [2]]),
        ("text", [b"\xff", b"a"]),
    ],
)
def test_columns_of_answers_of_another_type(name: str, values: list[Any], tmp_path: Path) -> None:
    path = stored(tmp_path, **ANSWERS | {name: values})
    with pytest.raises(PromptError, match="traces-1.parquet is no file of answers"):
        list(read_answers(path, Dropped()))
    if name == "key":
        with pytest.raises(PromptError, match="traces-1.parquet is no file of answers"):
            AnswerShards(tmp_path).keys()


def test_answers_of_wider_types_are_read(tmp_path: Path) -> None:
    """Python's and pandas' own integers and texts; a number that no token has costs its row alone."""
    wider = {
        "key": pa.array(["a", "b"], pa.large_string()),
        "prompt_ids": [[1, 2**40], [3]],
        "answer_ids": [[4], [5.0]],
    }
    dropped = Dropped()
    (answer,) = read_answers(stored(tmp_path, **ANSWERS | wider), dropped)
    assert (answer.key, answer.prompt_ids, answer.answer_ids, answer.temperature) == ("b", [3], [5], 0.7)
    assert type(answer.answer_ids[0]) is int and dropped.counts == {"without token ids": 1}


def test_tags_that_are_no_text(tmp_path: Path) -> None:
    path = stored(tmp_path, **ANSWERS, tag=pa.array([7, None]))
    assert [answer.key for answer in read_answers(path, tags=("7",))] == ["a"]
    with pytest.raises(ConfigError, match=r"its tags are \(no tag\), 7"):
        check_tags(path, ("8",))
    check_tags(stored(tmp_path, **ANSWERS, tag=[["x"], ["y"]]), ("['x']",))
