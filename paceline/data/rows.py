"""Reads data rows from JSON lines and JSON arrays (both optionally gzipped), Parquet, and hub data sets.

    for where, row in rows_of("chats.jsonl.gz")[1]: ...  # where: "chats.jsonl.gz, line 7"; row: a dict, or a RowError

A hub data set is `owner/name[/config][:split]`. Its Parquet or JSON files are downloaded one by one as they are read;
its code is never run.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from paceline.errors import DownloadError, PromptError, needing, reraised

Row = dict[str, Any]
Rows = Iterator[tuple[str, "Row | RowError"]]

MAX_LINE_BYTES = 64 * 2**20
"""Maximum bytes of a line; a longer one is rejected, since even a small gzip file can contain it."""
MAX_ARRAY_BYTES = 2 * 2**30
"""Maximum bytes of a JSON array, which is held in memory as a whole. JSON lines are streamed."""
JSON_ENDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")
CONVERTED = "refs/convert/parquet"
"""Branch of a data set's repository with the hub's Parquet copy, in files such as <config>/<split>/0000.parquet."""
SPLITS = ("train", "test", "validation", "valid", "dev")


def printable(text: Any) -> str:
    """Return the value as text that can be encoded as UTF-8: an unpaired surrogate becomes its escape sequence."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class RowError(PromptError):
    """Raised for a row that cannot be used; other rows of the file may be valid."""

    def __init__(self, message: str, reason: str = "malformed") -> None:
        """`reason`: short name of the problem; rows are counted under it."""
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Dropped:
    """Counts of skipped rows by reason, with one example (file and line) for each reason. Also counts keys of used rows
    whose values were ignored."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)
    """Key of a row -> number of used rows whose value for it was ignored."""

    def add(self, reason: str, example: str, number: int = 1) -> None:
        self.counts[reason] += number
        self.examples.setdefault(reason, example)

    def update(self, other: Dropped) -> None:
        """Add the counts of `other`, for example those of another file."""
        for reason, number in other.counts.items():
            self.add(reason, other.examples[reason], number)
        self.unread.update(other.unread)

    @property
    def unread_text(self) -> str:
        """Summary of the ignored keys: "not read: context (120 rows), choices (80)"; empty if no key was ignored."""
        if not self.unread:
            return ""
        (first, number), *others = self.unread.most_common()
        return "not read: " + ", ".join([f"{first} ({number} rows)", *(f"{key} ({count})" for key, count in others)])

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        return self.summary("rows")

    def summary(self, unit: str) -> str:
        """Summary of what was skipped: "3 rows left out: 2 not JSON (a.jsonl, line 7: ...), 1 empty (...)". `unit`:
        what is counted, such as "rows"."""
        listed = ", ".join(
            f"{number} {reason} ({self.examples[reason]})" for reason, number in self.counts.most_common()
        )
        return f"{self.counts.total()} {unit} left out: {listed}"


def rows_of(source: str | Path) -> tuple[str, Rows]:
    """Return (short name, rows) of a JSON or Parquet file, a folder of Parquet files, or a hub data set. `rows` is an
    iterator of pairs (file and line, row). For a malformed row, the pair has a RowError in place of the row; the error
    is not raised.

    Raises PromptError if the source is missing or cannot be read, DownloadError if a data set cannot be downloaded.
    Both may also be raised later, while the rows are read."""
    path, name = Path(source), str(source)
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return path.name, _folder_rows(path)
    if os.path.isfile(path):
        return path.name, file_rows(path)
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+){0,2}(:[\w.-]+)?", name) and not name.startswith((".", "/"))
    if not is_id or path.suffix in (".jsonl", ".json", ".parquet", ".txt", ".csv", ".gz"):
        raise PromptError(f"there is no prompt file {path}: check --prompts")
    return name, _hub_rows(name)


def file_rows(path: Path) -> Rows:
    """Yield pairs (file and line, row) of a file: Parquet (by its suffix), JSON lines or a JSON array. For a malformed
    row, the pair has a RowError in place of the row; the error is not raised. Raises PromptError if the file cannot be
    read."""
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(path)) if is_packed else path.open("rb")


def _json_rows(path: Path) -> Rows:
    remedy = "check --prompts"
    with reraised(PromptError, f"cannot read {path}", remedy, OSError, EOFError, zlib.error), _opened(path) as lines:
        first = lines.read(64)
        lines.seek(0)
        if first.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"[") and path.name.endswith((".json", ".json.gz")):
            yield from _array_rows(path, lines)
            return
        number = 0
        while line := lines.readline(MAX_LINE_BYTES):
            number += 1
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (more := lines.readline(MAX_LINE_BYTES)) and not more.endswith(b"\n"):
                    pass
                problem = f"{where}: longer than {MAX_LINE_BYTES >> 20} MiB: write one object per line"
                yield where, RowError(problem, "too long")
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                reason = " ".join(str(error).split())
                yield where, RowError(f"{where}: not a line of JSON ({reason}): write one object per line", "not JSON")
                continue
            yield where, row if isinstance(row, dict) else _no_object(where, row)


def _array_rows(path: Path, file: IO[bytes]) -> Rows:
    """Yield the objects of one JSON array, the format of ShareGPT's files."""
    text = file.read(MAX_ARRAY_BYTES + 1)
    if len(text) > MAX_ARRAY_BYTES:
        raise PromptError(
            f"{path} is an array of more than {MAX_ARRAY_BYTES >> 30} GiB: write one object per line (.jsonl)"
        )
    with reraised(PromptError, f"{path} is no JSON", "write one object per line", ValueError, RecursionError):
        rows = json.loads(text.decode("utf-8-sig"))
    for number, row in enumerate(rows, start=1):
        where = f"{path}, entry {number}"
        yield where, row if isinstance(row, dict) else _no_object(where, row)


def _no_object(where: str, row: Any) -> RowError:
    return RowError(f"{where}: expected an object, not {type(row).__name__}", "not an object")


def _parquet_rows(path: Path) -> Rows:
    with needing(PromptError, f"reading {path} needs pyarrow: pip install pyarrow, or give a .jsonl file"):
        from pyarrow import ArrowException, parquet
    remedy = "give a .jsonl file, or a whole Parquet file"
    unreadable = (ArrowException, OSError, ValueError, OverflowError)  # the last two: texts and dates beyond Python's
    with reraised(PromptError, f"{path} is not a readable Parquet file", remedy, *unreadable):
        batches = parquet.ParquetFile(path).iter_batches(batch_size=256)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
            yield f"{path}, row {number}", row


def _folder_rows(folder: Path) -> Rows:
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise PromptError(
            f"{folder} is a folder without .parquet files: name a .jsonl file in it, or a folder of traces"
        )
    for file in files:
        if file.exists():  # a running server deletes its oldest traces
            yield from _parquet_rows(file)


def _hub_rows(name: str) -> Rows:
    """Yield the rows of a hub data set; each file is downloaded when its rows are needed."""
    repo, _, split = name.partition(":")
    parts = repo.split("/")
    config = parts.pop() if len(parts) == 3 else None
    for file in _hub_files("/".join(parts), config, split, name):
        yield from file_rows(file)


def _hub_files(repo_id: str, config: str | None, split: str, name: str) -> Iterator[Path]:
    import huggingface_hub
    from huggingface_hub import errors

    unknown = (
        errors.RepositoryNotFoundError,
        errors.RevisionNotFoundError,
        errors.HFValidationError,
        errors.EntryNotFoundError,
    )
    unreached = (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError, TimeoutError)
    try:
        api, revision = huggingface_hub.HfApi(), None
        listed = api.list_repo_files(repo_id, repo_type="dataset")
        if not any(path.endswith((".parquet", *JSON_ENDS[:2])) for path in listed):
            revision = CONVERTED
            listed = api.list_repo_files(repo_id, repo_type="dataset", revision=revision)
        for file in choose_files(listed, config, split, name):
            yield Path(huggingface_hub.hf_hub_download(repo_id, file, repo_type="dataset", revision=revision))
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} asks for permission: accept its terms on the hub, then run `hf auth login`"
        ) from error
    except unreached as error:
        if isinstance(error, unknown):
            raise PromptError(
                f"there is no file {name!r}, and no data set {repo_id!r} with readable files on the hub: check the "
                "spelling, or give a .jsonl or .parquet file"
            ) from error
        raise DownloadError(
            f"the data set {repo_id} cannot be fetched: check the network and HF_HUB_OFFLINE, or give a .jsonl file"
        ) from error
    except unknown as error:
        raise PromptError(f"{name!r} is no file and no data set's id: write owner/name[/config][:split]") from error


def choose_files(listed: list[str], config: str | None, split: str, name: str) -> list[str]:
    """Return the data files of one split of a hub data set. `listed`: all files of its repository. `config`: name of
    the subset; None if there is only one. `split`: name of the split. If it is "", the split "train" is used; without
    such files, all that are not named after a known split. `name`: the data set, for error messages.

    Raises PromptError if no file matches, or if `config` is None and files of several subsets match."""
    endings = (".parquet",) if any(file.endswith(".parquet") for file in listed) else JSON_ENDS
    files = [
        file
        for file in sorted(listed)
        if file.endswith(endings) and not Path(file).name.startswith((".", "dataset_info"))
    ]
    if config:
        files = [
            file for file in files if config in re.split(r"[/.]", file) or Path(file).name.startswith(f"{config}-")
        ]
    chosen = [file for file in files if _names(split or "train", file)]
    if not chosen and not split:
        chosen = [file for file in files if not any(_names(other, file) for other in SPLITS)]
    if not chosen:
        available = ", ".join(sorted(listed)[:12]) or "nothing"
        raise PromptError(f"{name} has no Parquet or JSON files of this config and split: choose among {available}")
    configs = sorted({_config_of(file) for file in chosen})
    if len(configs) > 1 and not config:
        raise PromptError(f"{name} has several configs ({', '.join(configs)}): name one, as owner/name/config:split")
    return chosen


def _names(split: str, file: str) -> bool:
    return re.search(rf"(^|[/._-]){re.escape(split)}([/._-]|$)", file) is not None


def _config_of(file: str) -> str:
    """Return the folder of a config's files; folders named `data` or after a split are not configs."""
    folders = [part for part in Path(file).parent.parts if part != "data" and part not in SPLITS]
    return "/".join(folders)
