"""Stores answers as Parquet shards: exact token ids, with the boundary between prompt and answer.

    runs/x/answers/answers-r0-00000.parquet     columns: SCHEMA; one row per answer of the assistant
    runs/x/answers/journal-r0-00003.jsonl       deleted, or else ignored, once answers-r0-00003.parquet is written

A shard is written atomically; until then its answers are in a journal, one JSON line each, so that they survive if the
process is killed. Answers of an unfinished conversation are not used for training; the next run continues with the
missing turn. Each process writes files of its own, so no locks are needed. The server's traces (traces-*.parquet) have
the same columns first; further columns are ignored. Used as prompts, the files' token ids (`prompt_ids`) are sent
unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.data.rows import Dropped, RowError
from paceline.data.tags import has_tag
from paceline.errors import CacheError, ConfigError, PromptError, needing, reraised
from paceline.runs.folder import append_lines, whole_file

with needing(ConfigError, "answers are kept as Parquet, which needs pyarrow: pip install 'paceline[train]'"):
    import pyarrow as pa
    from pyarrow import parquet

REMEDY = "free space or choose another --out, then run again"
OVER = "is_over"
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
AS_READ = {field.name: pa.list_(pa.int64()) if pa.types.is_list(field.type) else field.type for field in SCHEMA}
"""Types to which columns are cast when read, as other programs may write others. Token ids are checked row by row."""
TOP = [("top_ids", pa.list_(pa.list_(pa.int32()))), ("top_logprobs", pa.list_(pa.list_(pa.float32())))]
"""Optional columns, written for `regenerate --top-k`: the target's most probable tokens at each position, best first,
and their log-probabilities in nats (temperature 1, before penalties and grammars)."""


@dataclass(slots=True)
class Answer:
    """One answer of the target: its tokens and text, and the tokens of the prompt that it answers."""

    key: str
    """Identifies the conversation (source, prompt, temperature, sample number); all its answers have this key."""
    source: str
    """Name of the prompt's file or data set."""
    turn: int
    """Index of the answer in its conversation, from 0."""
    temperature: float
    """Sampling temperature; NaN if unknown, as for another server's answers."""
    prompt_ids: list[int]
    """All tokens before the answer, including the chat template and earlier turns."""
    answer_ids: list[int]
    """Tokens of the answer, including the end token if the target generated one."""
    finish_reason: str
    """Reason why the answer ended: "stop" (complete), "length" (at the token limit), or "unknown"."""
    text: str
    top_ids: list[list[int]] | None = None
    """The target's most probable tokens at each position of the answer, best first; None if they were not requested."""
    top_logprobs: list[list[float]] | None = None
    """Log-probabilities of `top_ids`, in nats."""


class Kept(Protocol):
    """Interface of the storage to which `Regenerator` writes generated answers. After a crash, the storage shows which
    conversations are finished, so that `Regenerator` continues only the others."""

    folder: Path

    def recover(self) -> dict[str, list[Answer]]: ...
    def keys(self) -> set[str]: ...
    def note(self, answer: Answer, is_over: bool) -> None: ...
    def write(self, answers: list[Answer]) -> object: ...


def _line(answer: Answer, is_over: bool) -> dict[str, Any]:
    return {**{name: value for name, value in asdict(answer).items() if value is not None}, OVER: is_over}


def read_journals(paths: Iterable[Path]) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Read answers from journals: JSON Lines files of answers that are not yet in Parquet. Returns (answers of finished
    conversations, conversation key -> answers so far of each unfinished one). Truncated lines are skipped. If an
    earlier answer of a conversation is missing, its other answers are left out too."""
    turns: dict[str, dict[int, Answer]] = {}
    over: set[str] = set()
    for path in paths:
        for answer, is_over in _journaled(path):
            turns.setdefault(answer.key, {})[answer.turn] = answer
            if is_over:
                over.add(answer.key)
    whole = {
        key: [answers[turn] for turn in range(len(answers))]
        for key, answers in turns.items()
        if answers.keys() == {*range(len(answers))}
    }
    finished = [answer for key, answers in whole.items() if key in over for answer in answers]
    return finished, {key: answers for key, answers in whole.items() if key not in over}


def _journaled(path: Path) -> Iterator[tuple[Answer, bool]]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # its process has just written the shard
        return
    for line in lines:
        try:
            record = json.loads(line)
            is_over = bool(record.pop(OVER))
            yield Answer(**record), is_over
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # truncated by a crash, then appended to


class AnswerShards:
    """A folder of generated answers in shards: Parquet files of many answers each. Answers that are not yet in a shard
    are in a journal, so that a crash does not lose them. Several processes can share the folder: process number `rank`
    reads the files of all processes, and writes only its own."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        written = folder.glob(f"answers-r{rank}-{'[0-9]' * 5}.parquet")
        self._next = 1 + max((int(path.stem[-5:]) for path in written), default=-1)
        self._begun: dict[str, list[Answer]] = {}
        """Key -> answers so far, for unfinished conversations of this process."""
        self._is_recovered = False

    def write(self, answers: list[Answer]) -> Path:
        """Write the answers as one new shard, atomically, and return its path. Raises CacheError if the disk cannot be
        written to."""
        path, journal = self.folder / f"answers-r{self._rank}-{self._next:05d}.parquet", self._journal_path(self._next)
        for answer in answers:
            self._begun.pop(answer.key, None)
        self._carry(self._journal_path(self._next + 1))
        with whole_file(path, REMEDY) as scratch:
            schema = pa.schema([*SCHEMA, *TOP]) if any(answer.top_ids for answer in answers) else SCHEMA
            table = pa.Table.from_pylist([asdict(answer) for answer in answers], schema)
            # Two thirds of the size by Arrow's defaults: token ids repeat too little for a dictionary.
            parquet.write_table(table, scratch, compression="zstd", use_dictionary=False)
        self._next += 1
        journal.unlink(missing_ok=True)
        return path

    def note(self, answer: Answer, is_over: bool) -> None:
        """Append an answer to this process's journal, which keeps it safe until it is in a shard. `is_over`: True for
        the last answer of its conversation; the caller then passes all the conversation's answers to `write`. Raises
        CacheError if the disk cannot be written to."""
        path = self._journal_path(self._next)
        if is_over:
            self._begun.pop(answer.key, None)
        else:
            self._begun.setdefault(answer.key, []).append(answer)
        with reraised(CacheError, f"cannot write {path}", REMEDY, OSError):
            append_lines(path, [_line(answer, is_over)])

    def _carry(self, path: Path) -> None:
        """Write the answers of all unfinished conversations to a new journal at `path`, so that the old one can be
        deleted."""
        if self._begun:
            with whole_file(path, REMEDY) as scratch:
                append_lines(scratch, (_line(answer, False) for answers in self._begun.values() for answer in answers))

    def recover(self) -> dict[str, list[Answer]]:
        """Return the answers of unfinished conversations that a killed run left in this process's journals, by
        conversation key. The first call also moves finished conversations from the journals to a shard."""
        if not self._is_recovered:
            self._is_recovered = True
            old = self._journals(f"r{self._rank}-")
            for path in {*self.folder.glob(f"journal-r{self._rank}-*.jsonl")} - {*old}:
                path.unlink()  # its shard exists: the run was killed before deleting the journal
            finished, self._begun = read_journals(old)
            if finished:
                self.write(finished)
            else:
                self._carry(self._journal_path(self._next))
            for path in old:
                if path != self._journal_path(self._next) or not self._begun:
                    path.unlink(missing_ok=True)
        return {key: [*answers] for key, answers in self._begun.items()}

    def keys(self) -> set[str]:
        """Return the keys of all finished conversations of all processes. Raises PromptError on a damaged shard."""
        finished, _ = read_journals(self._journals())
        written = {row["key"] for path in self._paths() for row in _read(path, ["key"])}
        return written | {answer.key for answer in finished}

    def __iter__(self) -> Iterator[Answer]:
        """Yield the answers as `read` does."""
        return self.read()

    def read(self, dropped: Dropped | None = None, tags: Sequence[str] = ()) -> Iterator[Answer]:
        """Yield the answers of all shards, then of finished conversations that are only in a journal. `dropped`, `tags`
        and errors: as for `read_answers`; answers in a journal count as "(no tag)"."""
        finished, _ = read_journals(self._journals())
        for path in self._paths():
            if path.exists():  # a running server deletes its oldest traces
                yield from read_answers(path, dropped, tags)
        yield from finished if has_tag({}, tags) else ()  # journals have no tags

    def _journal_path(self, number: int) -> Path:
        return self.folder / f"journal-r{self._rank}-{number:05d}.jsonl"

    def _journals(self, process: str = "") -> list[Path]:
        """Return the paths of the journals whose shard is not written yet."""

        def shard(journal: Path) -> Path:
            return journal.with_name(f"{journal.stem.replace('journal', 'answers', 1)}.parquet")

        return [path for path in sorted(self.folder.glob(f"journal-{process}*.jsonl")) if not shard(path).exists()]

    def _paths(self) -> list[Path]:
        return sorted([*self.folder.glob("answers-*.parquet"), *self.folder.glob("traces-*.parquet")])


def read_answers(path: Path | str, dropped: Dropped | None = None, tags: Sequence[str] = ()) -> Iterator[Answer]:
    """Yield the answers of a Parquet file. A row without a key or token ids is counted in `dropped`, or raises
    PromptError if `dropped` is None. `tags`: yield only rows with one of these; empty: all. Raises PromptError if the
    file cannot be read."""
    for number, row in enumerate(_read(path, SCHEMA.names, optional=("tag",) if tags else ()), start=1):
        if not has_tag(row, tags):
            continue
        row.pop("tag", None)
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
    return ids is not None and all(token is not None and 0 <= token < 2**31 for token in ids)


def has_answers(path: Path) -> bool:
    """Return True for a Parquet file with all columns of answers. Also returns True for a folder with files named
    answers-*.parquet or traces-*.parquet, whose columns are not checked."""
    if path.is_dir():
        return any([*path.glob("answers-*.parquet"), *path.glob("traces-*.parquet")])
    if path.suffix != ".parquet" or not path.is_file():
        return False
    try:
        return set(SCHEMA.names) <= set(parquet.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False  # the error is reported when its rows are read


def _read(path: Path | str, columns: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, Any]]:
    remedy = "delete it and run regenerate again"
    with reraised(PromptError, f"{path} is no file of answers", remedy, pa.ArrowException, OSError, ValueError):
        file = parquet.ParquetFile(path)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ValueError(f"it has no column {missing[0]}")
        table = file.read([*columns, *(name for name in optional if name in file.schema_arrow.names)])
        schema = pa.schema([(field.name, AS_READ.get(field.name, field.type)) for field in table.schema])
        return table.cast(schema).to_pylist()
