"""Rows of token ids with a loss mask become documents; what cannot be used is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from paceline.errors import PromptError
from paceline.train.documents.dataset import check_answers, read_corpus
from paceline.train.documents.tokenised import tokenised_answers


def write(folder: Path, *rows: Any) -> Path:
    file = folder / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_every_stretch_is_an_answer(tmp_path: Path) -> None:
    row = {"id": "c", "input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "loss_mask": [0, 0, 1, 1, 0, 0, 1, 1]}
    first, second = tokenised_answers(write(tmp_path, row))
    assert (first.prompt_ids, first.answer_ids, first.turn) == ([1, 2], [3, 4], 0)
    assert (second.prompt_ids, second.answer_ids, second.turn) == ([1, 2, 3, 4, 5, 6], [7, 8], 1)
    assert first.key == second.key and first.key.startswith("given.jsonl/c-")
    labels = {"id": "c", "input_ids": row["input_ids"], "labels": [-100, -100, 3, 4, -100, -100, 7, 8]}
    assert [each.answer_ids for each in tokenised_answers(write(tmp_path, labels))] == [[3, 4], [7, 8]]
    whole = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}
    assert [each.prompt_ids for each in tokenised_answers(write(tmp_path, whole))] == [[1]], (
        "something stands before an anchor"
    )


def test_they_are_learned_from(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, number, 2, number + 1, number + 2], "loss_mask": [0, 0, 1, 1, 1]} for number in range(5, 25)
    ]
    corpus = read_corpus(
        [write(tmp_path, *rows, {"input_ids": [1]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1]})], 64, 0.1
    )
    assert (len(corpus.train), len(corpus.heldout)) == (18, 2)
    assert corpus.dropped.counts == {"without a loss mask": 1, "with a wrong loss mask": 1}
    assert "2 rows left out" in corpus.left_out_text and "line 21" in corpus.left_out_text
    check_answers([tmp_path / "given.jsonl"])
    with pytest.raises(PromptError, match="line 21: 'loss_mask' or 'labels' must say"):
        read_corpus([tmp_path / "given.jsonl"], 64, strict=True)


def test_rows_of_one_id_and_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    row = {"id": "c", "input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]}
    (tmp_path / "a").mkdir()
    files = [
        write(tmp_path / "a", row, row | {"input_ids": [1, 2, 6, 7, 8]}, row),
        write(tmp_path, row | {"input_ids": [9, 2, 3, 4, 5]}),
    ]
    corpus = read_corpus(files, 64)
    assert (len(corpus.train), corpus.num_prompts, corpus.num_repeated) == (3, 2, 1)


def test_answers_to_one_prompt_are_held_out_together(tmp_path: Path) -> None:
    answers = [{"input_ids": [1, n % 20, 50, 60 + n], "loss_mask": [0, 0, 1, 1]} for n in range(40)]
    corpus = read_corpus([write(tmp_path, *answers)], 64, 0.1)
    assert len(corpus.heldout) == 4 and corpus.num_prompts == 18
    assert not {each.tokens[1] for each in corpus.heldout} & {each.tokens[1] for each in corpus.train}
    whole = [{"input_ids": [1, 2, 3, n], "loss_mask": [1, 1, 1, 1]} for n in range(4)]
    assert read_corpus([write(tmp_path, *whole)], 64).num_prompts == 4


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"input_ids": [[1, 2, 3, 4]], "loss_mask": [[0, 0, 1, 1]]})
    parquet.write_table(table, tmp_path / "given.parquet")
    assert [each.answer_start for each in read_corpus([tmp_path / "given.parquet"], 64).train] == [2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": "1 2"}, "'input_ids' must be a list of token ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1, 1]}, "one number for each of the 2 tokens"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, "no two neighbouring tokens"),
    ],
)
def test_bad_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(PromptError, match=f"line 1: .*{message}"):
        list(tokenised_answers(write(tmp_path, row)))
