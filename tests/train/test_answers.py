"""Answer shards: whole or not at all, exact, and read by whoever needs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.data.answers import SCHEMA, Answer, AnswerShards, read_answers
from paceline.data.prompts import read_prompts
from paceline.errors import CacheError, PromptError


def answer(key: str = "a/0#1@0.7", **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "source": "a",
        "turn": 0,
        "temperature": 0.7,
        "prompt_ids": [1, 2],
        "answer_ids": [3, 257],
    }
    return Answer(key=key, **{**values, "finish_reason": "stop", "text": "né\n\u2028 ✓", **changes})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    shards = AnswerShards(tmp_path / "answers")
    assert not shards.keys()
    written = [answer(), answer(turn=1), answer("b", answer_ids=[])]
    path = shards.write(written)
    assert path.name == "answers-r0-00000.parquet"
    assert list(read_answers(path)) == list(shards) == written
    assert shards.keys() == {"a/0#1@0.7", "b"}


def test_the_columns_stay() -> None:
    """Long runs resume, and the server's traces are read: these names and types are a format."""
    ids = pa.list_(pa.int32())
    columns = {
        "key": pa.string(),
        "source": pa.string(),
        "turn": pa.int32(),
        "temperature": pa.float32(),
        "prompt_ids": ids,
    }
    columns |= {"answer_ids": ids, "finish_reason": pa.string(), "text": pa.string()}
    assert {field.name: field.type for field in SCHEMA} == columns


def test_processes_write_beside_each_other_and_later_runs_after_earlier_ones(tmp_path: Path) -> None:
    first, tenth = AnswerShards(tmp_path, 1), AnswerShards(tmp_path, 10)
    first.write([answer("1")])
    tenth.write([answer("10")])
    again = AnswerShards(tmp_path, 1)
    assert again.write([answer("1 again")]).name == "answers-r1-00001.parquet"
    assert AnswerShards(tmp_path, 10).write([answer("10 again")]).name == "answers-r10-00001.parquet"
    assert again.keys() == {"1", "10", "1 again", "10 again"}


def test_what_a_crash_left_is_ignored(tmp_path: Path) -> None:
    shards = AnswerShards(tmp_path)
    half = tmp_path / f"answers-r0-00000.parquet.{'0' * 16}.part"
    half.write_bytes(b"half")
    os.utime(half, (1, 1))
    assert not shards.keys()
    shards.write([answer()])
    assert [path.name for path in tmp_path.iterdir()] == ["answers-r0-00000.parquet"]


def test_a_damaged_shard_is_named_with_a_remedy(tmp_path: Path) -> None:
    shards = AnswerShards(tmp_path)
    path = shards.write([answer()])
    path.write_bytes(path.read_bytes()[:-20])
    for read in (shards.keys, lambda: list(shards)):
        with pytest.raises(PromptError, match=r"answers-r0-00000.parquet is no file of answers .*: delete it and run"):
            read()
    path.write_bytes(b"")
    with pytest.raises(PromptError, match="delete it"):
        shards.keys()
    parquet.write_table(pa.table({"key": ["a"]}), path)
    assert shards.keys() == {"a"}
    with pytest.raises(PromptError, match="it has no column source"):
        list(shards)


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="free space or choose another --out, then run again"):
        AnswerShards(tmp_path / "file").write([answer()])
    shards = AnswerShards(tmp_path / "full")

    def half(table: pa.Table, path: Path, **options: Any) -> None:
        path.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", half)
    with pytest.raises(CacheError, match=r"No space left on device.*free space"):
        shards.write([answer()])
    assert not list((tmp_path / "full").iterdir())
    monkeypatch.undo()
    assert shards.write([answer()]).name == "answers-r0-00000.parquet"


def test_answers_are_prompts_by_their_tokens(tmp_path: Path) -> None:
    shards = AnswerShards(tmp_path)
    path = shards.write([answer(), answer("b", prompt_ids=[7])])
    assert [prompt.token_ids for prompt in read_prompts(path)] == [(1, 2), (7,)]
    assert [(prompt.messages, prompt.turns) for prompt in read_prompts(tmp_path, limit=1)] == [([], ())]
    assert len({prompt.id for prompt in read_prompts(tmp_path)}) == 2
    shards.write([answer("c", prompt_ids=[])])
    with pytest.raises(
        PromptError, match=r"00001.parquet, row 1: 'prompt_ids' must be a list of token ids, at least one"
    ):
        read_prompts(tmp_path)


def test_messages_come_before_tokens(tmp_path: Path) -> None:
    shards = AnswerShards(tmp_path)
    path = shards.write([answer()])
    messages = pa.array([[{"role": "user", "content": "hi"}]])
    parquet.write_table(parquet.ParquetFile(path).read().append_column("messages", messages), path)
    assert read_prompts(path)[0].turns == ("hi",)
    assert list(shards) == [answer()]
