"""Reads tokenised data: token ids, and a mask of the tokens to learn from.

    {"input_ids": [1, 5, 9, 7, 2], "loss_mask": [0, 0, 1, 1, 1]}        as speculators prepares data
    {"input_ids": [1, 5, 9, 7, 2], "labels": [-100, -100, 9, 7, 2]}     as Transformers' trainers take it

Files are JSON lines (also gzip) or Parquet. Every contiguous span of tokens to learn from is one answer, with
everything before it as its prompt: a conversation with three answers becomes three documents, whose common beginning
the target processes once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.answers import Answer, pa, parquet
from paceline.data.rows import Dropped, Row, RowError, file_rows, printable

IGNORED = -100
"""Label of a token that is not learned from, as in Transformers."""


def is_tokenised(path: Path) -> bool:
    """Returns True if a file has tokenised data (token ids with a loss mask) instead of answers. Every file that is not
    Parquet is tokenised data; so is a Parquet file with a column `input_ids` and without a column `answer_ids`."""
    if path.suffix != ".parquet":
        return True
    try:
        names = parquet.read_schema(path).names
    except (pa.ArrowException, OSError):
        return False  # the reader of answers reports what is wrong with the file
    return "input_ids" in names and "answer_ids" not in names


def tokenised_answers(path: Path, dropped: Dropped | None = None) -> Iterator[Answer]:
    """Reads a file of tokenised data; yields an answer for each contiguous span of at least two tokens that the loss
    mask selects. Unusable rows are counted in `dropped`; if `dropped` is None, the first one raises RowError."""
    for number, (where, row) in enumerate(file_rows(path)):
        try:
            if isinstance(row, RowError):
                raise row
            yield from _answers_of(row, where, printable(f"{path.name}/{row.get('id', number)}"), path.name)
        except RowError as error:
            if dropped is None:
                raise
            dropped.add(error.reason, str(error))


def _answers_of(row: Row, where: str, key: str, source: str) -> list[Answer]:
    ids: Any = row.get("input_ids")
    if not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise RowError(f"{where}: 'input_ids' must be a list of token ids, at least one", "without token ids")
    if not all(0 <= token < 2**31 for token in ids):
        raise RowError(f"{where}: 'input_ids' holds a number that is no token id", "with an impossible token id")
    mask = _mask_of(row, ids, where)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    spans = [(max(int(start), 1), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    spans = [(start, end) for start, end in spans if end - start >= 2]
    if not spans:
        raise RowError(f"{where}: no two neighbouring tokens are to be learned from", "with nothing to learn from")
    prompt = ids[: spans[0][0]] if spans[0][0] > 1 else ids  # rows without a prompt are texts of their own
    row_hash, prompt_hash = (f"{zlib.crc32(repr(part).encode()):08x}" for part in ((ids, spans), prompt))
    key += f"-{row_hash}#{prompt_hash}@given"  # files may share a name, and rows an id
    return [
        Answer(key, source, turn, float("nan"), ids[:start], ids[start:end], "unknown", "")
        for turn, (start, end) in enumerate(spans)
    ]


def _mask_of(row: Row, ids: list[int], where: str) -> Any:
    """Returns which tokens are learned from, bool [S]."""
    if row.get("loss_mask") is not None:
        mask, is_learned = row["loss_mask"], lambda value: value != 0
    elif row.get("labels") is not None:
        mask, is_learned = row["labels"], lambda value: value != IGNORED
    else:
        raise RowError(
            f"{where}: 'loss_mask' or 'labels' must say which tokens are learned from", "without a loss mask"
        )
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(type(value) in (int, bool) for value in mask):
        raise RowError(
            f"{where}: the loss mask must have one number for each of the {len(ids)} tokens", "with a wrong loss mask"
        )
    return np.array([is_learned(value) for value in mask])
