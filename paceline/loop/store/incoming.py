"""Reads answers that are added to a store: from folders of traces or of `paceline regenerate`, from other stores, or
from single Parquet files."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.answers import SCHEMA, TOP
from paceline.data.tags import has_tag
from paceline.errors import ConfigError, PromptError, needing, reraised
from paceline.model.text.tokenizer import Tokenizer

with needing(ConfigError, "a store is Parquet, which needs pyarrow: pip install 'paceline[evals]'"):
    import pyarrow as pa
    from pyarrow import parquet

Row = dict[str, Any]
STORED = pa.schema(
    [
        *SCHEMA,
        *((name, pa.string()) for name in ("model", "tag")),
        ("ended", pa.timestamp("ms", "UTC")),
        ("sampling", pa.string()),
        ("seed", pa.int64()),
        *((name, pa.string()) for name in ("cluster", "conversation", "prompt", "digest")),
        ("version", pa.int32()),
        *TOP,
    ]
)
"""Columns of a store's Parquet files. `paceline train --answers` can read them, since those of the answer format come
first. `prompt`: text with special tokens; `digest`: hash of the row's tokens; `version`: the one that added the row;
`top_ids` and `top_logprobs`: those of `regenerate --top-k`."""


def digest_of(prompt_ids: Iterable[int], answer_ids: Iterable[int]) -> str:
    """Returns the identifier of a row: a hash of its prompt and answer tokens."""
    named = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=12)
    named.update(b"|" + array("i", answer_ids).tobytes())
    return named.hexdigest()


def is_ids(value: Any) -> bool:
    """True if `value` is a list of token ids that a store can hold: integers from 0 to 2^31 - 1."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def shards_of(source: Path) -> list[Path]:
    """Returns the Parquet files that `source` consists of. `source`: a Parquet file, a folder of traces or answers, or
    a run folder of `paceline regenerate`. Raises PromptError if a folder contains no Parquet files of answers or
    traces."""
    if source.is_file():
        return [source]
    folder = source / "answers" if (source / "answers").is_dir() else source
    files = sorted([*folder.glob("answers-*.parquet"), *folder.glob("traces-*.parquet")])
    if not files:
        raise PromptError(
            f"{source} holds no answers: give a folder of traces, of regenerate, or a Parquet file of one"
        )
    return files


def read_shard(file: Path) -> list[Row]:
    """Reads a Parquet file of answers or traces as dicts with all columns of a store; missing columns are None. Raises
    PromptError if it is damaged or another file, or if a text is not UTF-8."""
    rows = _read(file)
    if num_damaged := sum(is_damaged for _, is_damaged in rows):
        raise PromptError(f"{file} is no file of answers (rows with text that is not UTF-8: {num_damaged})")
    return [row for row, _ in rows]


def readable_rows(file: Path) -> list[Row]:
    """Reads a Parquet file of answers or traces as dicts with all columns of a store; missing columns are None. Leaves
    out rows with a text that is not UTF-8. Raises PromptError if the file is damaged or another file."""
    return [row for row, is_damaged in _read(file) if not is_damaged]


def _read(file: Path) -> list[tuple[Row, bool]]:
    """Reads as `read_shard`; also returns, for each row, True if one of its texts is not UTF-8."""
    with reraised(
        PromptError, f"{file} is no file of answers", "give whole files", pa.ArrowException, OSError, ValueError
    ):
        table = parquet.read_table(file)
        missing = [name for name in ("prompt_ids", "answer_ids", "text") if name not in table.column_names]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        columns = [name for name in STORED.names if name in table.column_names]
        empty: Row = dict.fromkeys(STORED.names)
        return [(empty | row, is_damaged) for row, is_damaged in rows_with_damage(table.select(columns))]


def rows_with_damage(table: pa.Table) -> list[tuple[Row, bool]]:
    """Returns all rows of a table as dicts, each with True if one of its texts is not UTF-8. Invalid bytes of a text
    are replaced by U+FFFD."""
    columns, is_damaged = dict[str, list[Any]](), [False] * table.num_rows
    for name in table.column_names:
        column = table[name]
        try:
            columns[name] = column.to_pylist()
        except UnicodeDecodeError:
            kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
            raw = column.cast(kind).cast(pa.large_binary()).to_pylist()
            columns[name] = [None if value is None else value.decode("utf-8", "replace") for value in raw]
            for place, value in enumerate(raw):
                is_damaged[place] |= value is not None and not is_utf8(value)
    rows = [{name: values[place] for name, values in columns.items()} for place in range(table.num_rows)]
    return list(zip(rows, is_damaged, strict=True))


def is_utf8(raw: bytes) -> bool:
    """True if the bytes are valid UTF-8."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@dataclass(slots=True)
class Incoming:
    """Reads rows from source files and completes them for a store: adds the prompt's text, the row's identifier, and
    defaults for missing values."""

    tokenizer: Tokenizer
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rows left out, by reason."""

    @property
    def left_out_text(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common())
        return f"left out: {counts}" if counts else "nothing left out"

    def rows(self, sources: Iterable[Path], tags: Sequence[str] = ()) -> Iterator[Row]:
        """Yield the usable rows of these files or folders, completed for the store; count the others in `left_out`.
        `tags`: yield only rows with one of these tags (empty: all rows)."""
        vocab = self.tokenizer.vocab_size
        for file in (file for source in sources for file in shards_of(source)):
            for row, is_damaged in _read(file):
                if is_damaged:
                    self.left_out["with text that is not UTF-8"] += 1
                elif not has_tag(row, tags):
                    self.left_out["with other tags"] += 1
                elif not all(is_ids(row[name] or []) for name in ("prompt_ids", "answer_ids")):
                    self.left_out["of which the tokens are no ids"] += 1
                elif not row["prompt_ids"]:
                    self.left_out["without a prompt"] += 1
                elif not row["answer_ids"]:
                    self.left_out["of which the answer's tokens are not known"] += 1
                elif not all(0 <= token < vocab for token in (*row["prompt_ids"], *row["answer_ids"])):
                    self.left_out["of another vocabulary"] += 1
                else:
                    yield self._completed(row, file)

    def _completed(self, row: Row, file: Path) -> Row:
        digest = digest_of(row["prompt_ids"], row["answer_ids"])
        prompt = self.tokenizer.decode(row["prompt_ids"], False)
        defaults = {"source": file.stem, "turn": 0, "finish_reason": "unknown", "key": f"{file.stem}/{digest}"}
        missing = {name: value for name, value in defaults.items() if row[name] is None}
        return {**row, **missing, "prompt": prompt, "digest": digest}
