"""Answers on disk: Parquet shards of exact token ids, with the boundary between prompt and answer.

    runs/x/answers/answers-r0-00000.parquet     columns: SCHEMA; one row per assistant turn

Written by `regenerate`, read by `features`. A shard appears whole or not at all; what waits for one stands in a
journal (`journal.py`). Each process writes files of its own, so nothing is locked. The server's traces
(`serve/admin/traces.py`, traces-*.parquet) begin with the same columns: more do no harm. As prompts, such a file asks the
target the very tokens of `prompt_ids` again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from paceline.data.journal import Answer, Journal, read_journals
from paceline.data.rows import Dropped, RowError
from paceline.errors import ConfigError, PromptError, needing, reraised
from paceline.runs.folder import whole_file

__all__ = ["SCHEMA", "Answer", "AnswerShards", "Kept", "read_answers"]

with needing(ConfigError, "answers are kept as Parquet, which needs pyarrow: pip install 'paceline[train]'"):
    import pyarrow as pa
    from pyarrow import parquet

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("source", pa.string()),
        ("turn", pa.int32()),
        ("temperature", pa.float32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
    ]
)
TOP = [("top_ids", pa.list_(pa.list_(pa.int32()))), ("top_logprobs", pa.list_(pa.list_(pa.float32())))]
"""Further columns where `regenerate --top-k` asked for them: by place of the answer, the target's likeliest tokens,
best first, and their log-probabilities (nats) at temperature 1, before penalties and grammars."""


class Kept(Protocol):
    """What a Regenerator needs to know and to have written of answers."""

    folder: Path

    def recover(self) -> dict[str, list[Answer]]: ...
    def keys(self) -> set[str]: ...
    def note(self, answer: Answer, is_over: bool) -> None: ...
    def write(self, answers: list[Answer]) -> object: ...


class AnswerShards:
    """A folder of answer shards; one writer per process."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        written = folder.glob(f"answers-r{rank}-{'[0-9]' * 5}.parquet")
        self._next = 1 + max((int(path.stem[-5:]) for path in written), default=-1)
        self._journal, self._is_recovered = Journal(), False

    def write(self, answers: list[Answer]) -> Path:
        """Write one shard, whole or not at all. Raises CacheError when the disk refuses."""
        path, journal = self.folder / f"answers-r{self._rank}-{self._next:05d}.parquet", self._journal_path(self._next)
        for answer in answers:
            self._journal.begun.pop(answer.key, None)
        self._journal.carry(self._journal_path(self._next + 1))
        with whole_file(path, "free space or choose another --out, then run again") as scratch:
            schema = pa.schema([*SCHEMA, *TOP]) if any(answer.top_ids for answer in answers) else SCHEMA
            parquet.write_table(pa.Table.from_pylist([asdict(answer) for answer in answers], schema), scratch)
        self._next += 1
        journal.unlink(missing_ok=True)
        return path

    def note(self, answer: Answer, is_over: bool) -> None:
        """Write an answer into the journal, which keeps it until a shard holds it.

        `is_over` says that its conversation has ended: pass all its answers to `write` then.
        """
        self._journal.note(self._journal_path(self._next), answer, is_over)

    def recover(self) -> dict[str, list[Answer]]:
        """Answers so far of conversations that this process had begun, by key; those that were over become a shard."""
        if not self._is_recovered:
            self._is_recovered = True
            old = self._journals(f"r{self._rank}-")
            for path in {*self.folder.glob(f"journal-r{self._rank}-*.jsonl")} - {*old}:
                path.unlink()  # its shard is there: a run was killed between the two
            finished, self._journal.begun = read_journals(old)
            if finished:
                self.write(finished)
            else:
                self._journal.carry(self._journal_path(self._next))
            for path in old:
                if path != self._journal_path(self._next) or not self._journal.begun:
                    path.unlink(missing_ok=True)
        return {key: [*answers] for key, answers in self._journal.begun.items()}

    def keys(self) -> set[str]:
        """Keys of every conversation already written, by whichever process. Raises PromptError on a damaged shard."""
        finished, _ = read_journals(self._journals())
        return {key for path in self._paths() for key in _read(path, ["key"])["key"].to_pylist()} | {
            each.key for each in finished
        }

    def __iter__(self) -> Iterator[Answer]:
        """Those of shards, then those of conversations that are over and wait for one."""
        return self.read()

    def read(self, dropped: Dropped | None = None) -> Iterator[Answer]:
        """The same; rows that cannot be used are counted in `dropped`, without it the first one is a PromptError."""
        finished, _ = read_journals(self._journals())
        for path in self._paths():
            if path.exists():  # a server that goes on deletes its oldest traces
                yield from read_answers(path, dropped)
        yield from finished

    def _journal_path(self, number: int) -> Path:
        return self.folder / f"journal-r{self._rank}-{number:05d}.jsonl"

    def _journals(self, of: str = "") -> list[Path]:
        """Those whose shard is not written yet."""
        found = sorted(self.folder.glob(f"journal-{of}*.jsonl"))
        return [path for path in found if not path.with_name(f"{path.stem.replace('journal', 'answers', 1)}.parquet").exists()]

    def _paths(self) -> list[Path]:
        return sorted([*self.folder.glob("answers-*.parquet"), *self.folder.glob("traces-*.parquet")])


def read_answers(path: Path | str, dropped: Dropped | None = None) -> Iterator[Answer]:
    """The answers of one Parquet file. Raises PromptError when it is no such file, and at a row without tokens;
    with `dropped` such rows are counted there."""
    for number, row in enumerate(_read(path, SCHEMA.names).to_pylist(), start=1):
        if row["key"] is None or not _are_ids(row["prompt_ids"]) or not _are_ids(row["answer_ids"]):
            error = RowError(f"{path}, row {number}: no key, or no token ids of prompt and answer", "without token ids")
            if dropped is None:
                raise error
            dropped.add(error.reason, str(error))
            continue
        # float32 in the file: 0.7 comes back as 0.699999988
        temperature = math.nan if row["temperature"] is None else float(f"{row['temperature']:g}")
        yield Answer(**{**row, "temperature": temperature})


def _are_ids(ids: list[int | None] | None) -> bool:
    return ids is not None and all(token is not None and token >= 0 for token in ids)


def has_answers(path: Path) -> bool:
    """True for a Parquet file, or a folder of such files, with the columns of answers; false for any other source."""
    if path.is_dir():
        return any([*path.glob("answers-*.parquet"), *path.glob("traces-*.parquet")])
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return set(SCHEMA.names) <= set(parquet.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False  # whoever reads its rows says what is wrong


def _read(path: Path | str, columns: Sequence[str]) -> pa.Table:
    remedy = "delete it and run regenerate again"
    with reraised(PromptError, f"{path} is no file of answers", remedy, pa.ArrowException, OSError, ValueError):
        file = parquet.ParquetFile(path)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        return file.read(columns)
