"""Deletes conversations on request from all files known to a store: its rows and scores, the eval suites made from it,
and the source files.

forget(store, "Jane Doe")            # every conversation with a match, as a whole
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, ConfigError, PromptError, reraised
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.folder import Store, parquet, write_shard
from paceline.loop.store.incoming import Row, digest_of, is_ids, is_utf8, pa, read_shard, rows_with_damage, shards_of
from paceline.loop.store.split import SIDES
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import SILENT
from paceline.runs.folder import whole_file
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

DAMAGED = "damaged line"
CONTENTS = ("labels.jsonl", "card.md", "versions.jsonl")
"""Files of a store in addition to its shards and its store.json."""


@dataclass(slots=True)
class Forgotten:
    """Result of `forget`: numbers of deleted items, and names of files that still contain matching text."""

    rows: int = 0
    conversations: int = 0
    labels: int = 0
    cases: int = 0
    """Deleted test cases of eval suites made from the store."""
    source_rows: int = 0
    """Deleted rows of source files; 0 without `in_sources`."""
    suites_gone: list[str] = field(default_factory=list)
    """Files of eval suites that do not exist any more. If a file was moved, nothing was deleted from it."""
    suites_with_it: list[str] = field(default_factory=list)
    """Eval suites that may still contain matching text, in lines that are not UTF-8."""
    sources_with_it: list[str] = field(default_factory=list)
    """Source files that still contain matching rows."""
    version: int = 0


def forget(store: Store, match: str, *, in_sources: bool = False) -> Forgotten:
    """Delete every conversation in which the regular expression `match` matches a prompt, answer, tag, source or
    sampling settings. Also deletes its labels and eval cases. The deleted answers cannot be added again. `in_sources`:
    also delete the rows from the source files that they were added from.

    Raises ConfigError if the pattern is invalid or matches everything, or if another process changes the store;
    CacheError if a file cannot be written. If the tokenizer cannot be loaded, raises ModelNotFoundError,
    ModelFileError, UnsupportedModelError or DownloadError before any change."""
    pattern = pattern_of(match)
    done, tokenizer = Forgotten(), store.tokenizer()

    def is_gone(digest: str | None) -> bool:
        return bool(digest) and store.salted(digest) in store.forgotten

    with store.changing("forgetting"):
        rows = [row for side in SIDES for row in store.rows(side)]
        conversations = {row["conversation"] for row in rows if has(row, pattern)}
        unfinished = {row["digest"] for row in rows if is_gone(row["digest"])}  # of a killed run
        gone = {row["digest"] for row in rows if row["conversation"] in conversations} | unfinished
        done.conversations, done.rows = len(conversations), len(gone)
        store.forgotten |= {store.salted(digest) for digest in gone}
        store.save()  # first: the same command completes a killed run, whose rows are gone
        for file in store.all_shards():
            without(file, lambda row: is_gone(row["digest"]))
        for file in store.unfinished():
            _without_unfinished(file, is_gone, conversations, pattern)
        labels = store.path / "labels.jsonl"
        done.labels, _ = _without_lines(labels, lambda label: DAMAGED in label or is_gone(label.get("digest")))
        for name in store.suites:
            if not Path(name).is_file():
                done.suites_gone.append(name)
                continue
            num_gone, num_unread = _without_lines(
                Path(name), lambda case: is_gone(_origin_of(case)) or bool(pattern.search(_text(case)))
            )
            done.cases += num_gone
            if num_unread:
                done.suites_with_it.append(f"{name} (lines that are not UTF-8: {num_unread})")
        _sources(store, tokenizer, pattern, in_sources, done)
        counts = {name: getattr(done, name) for name in ("rows", "conversations", "labels", "cases")}
        done.version = store.commit("forget", {"forgot": counts})["version"]
    return done


def renewed(path: Path, model: str, split: SplitConfig) -> Store:
    """Returns an empty store at `path`, as `Store.create` does. Deletes the content of an earlier store there, except
    its list of deleted rows, which cannot be added again, and its list of eval suites. If the folder has no store.json,
    deletes the whole folder.

    Raises ConfigError if another process changes the store, or if its store.json cannot be read; CacheError if it
    cannot be written."""
    if not (path / "store.json").is_file():
        shutil.rmtree(path, ignore_errors=True)  # left by a killed process
        return Store.create(path, model, split)
    with (
        only_run(path, "emptying the store", Ranks(), SILENT.say),
        reraised(CacheError, f"cannot write {path}", "free space, or make it writable", OSError),
    ):
        store = Store.open(path)
        for file in (*store.all_shards(), *store.unfinished(), *(path / name for name in CONTENTS)):
            file.unlink(missing_ok=True)
        store.model, store.split, store.version = model, split, 0
        store.save()
    return store


def pattern_of(match: str) -> re.Pattern[str]:
    """Compiles `match` as a regular expression. Raises ConfigError if it is invalid, or matches the empty string and so
    every text."""
    try:
        pattern = re.compile(match)
    except re.error as error:
        raise ConfigError(f"--match {match!r} is no regular expression ({error}): correct it") from error
    if pattern.search(""):
        raise ConfigError(f"--match {match!r} matches everything: say what is to be forgotten")
    return pattern


def has(row: Row, pattern: re.Pattern[str]) -> bool:
    """True if the pattern matches the row's prompt, answer, tag, source or sampling settings. Sampling settings are
    stored as JSON; they are searched as stored, and also with \\u escapes decoded."""
    texts = [str(row[name]) for name in ("prompt", "text", "tag", "source", "sampling") if row.get(name)]
    if row.get("sampling"):
        texts.append(_text(_parsed(str(row["sampling"]))))
    return any(pattern.search(text) for text in texts)


def without(file: Path, is_gone: Callable[[Row], bool]) -> None:
    """Deletes rows from a Parquet file: those for which `is_gone(row)` returns True. Deletes the file if no row
    remains."""
    rows = read_shard(file)
    left = [row for row in rows if not is_gone(row)]
    if not left:
        file.unlink()
    elif len(left) < len(rows):
        write_shard(file, left)


def _without_unfinished(
    file: Path, is_gone: Callable[[str], bool], conversations: set[str], pattern: re.Pattern[str]
) -> None:
    """Like `without`, for a shard that no version names; an unreadable one is deleted, as its content is unknown."""
    try:
        rows = read_shard(file)
    except PromptError:
        file.unlink()
        return
    matching = conversations | {row["conversation"] for row in rows if has(row, pattern)}
    without(file, lambda row: is_gone(row["digest"]) or row["conversation"] in matching)


def _without_lines(file: Path, is_gone: Callable[[dict[str, Any]], bool]) -> tuple[int, int]:
    """Deletes lines of a JSON Lines file: those for which `is_gone(object)` returns True. The other lines keep their
    bytes. Returns (number of deleted lines, number of kept lines that are not UTF-8)."""
    if not file.exists():
        return 0, 0
    lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    left = [line for line in lines if not is_gone(_parsed(line))]
    if len(left) < len(lines):
        with whole_file(file) as scratch:
            scratch.write_bytes(b"".join(line + b"\n" for line in left))
    return len(lines) - len(left), sum(not is_utf8(line) for line in left)


def _origin_of(case: dict[str, Any]) -> str | None:
    """Digest of the row that a suite's case was made from; None without one."""
    origin = case.get("origin")
    digest = origin.get("digest") if isinstance(origin, dict) else None
    return digest if isinstance(digest, str) else None


def _parsed(raw: str | bytes) -> dict[str, Any]:
    """Parses an object. A damaged line, which must not block deletion, is returned under DAMAGED; one that is not
    UTF-8, with its invalid bytes replaced by U+FFFD, together with the object if it has one."""
    line = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
    damaged = {} if isinstance(raw, str) or is_utf8(raw) else {DAMAGED: line}
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {DAMAGED: line}
    return value | damaged if isinstance(value, dict) else {DAMAGED: line}


def _text(value: dict[str, Any]) -> str:
    r"""JSON text of the object without \u escapes, so that patterns match the letters themselves."""
    return json.dumps(value, ensure_ascii=False)


def _sources(store: Store, tokenizer: Tokenizer, pattern: re.Pattern[str], in_sources: bool, done: Forgotten) -> None:
    """Counts matching rows in the source files, or deletes them; keeps all other columns."""
    for file in _source_files(store, done):
        try:
            table = parquet.read_table(file)
            names = {"tag", "sampling"} & {*table.column_names}
            rows = rows_with_damage(table.select(["prompt_ids", "answer_ids", "text", *names]))
        except (pa.ArrowException, OSError, ValueError, KeyError):
            done.sources_with_it.append(f"{file}, which cannot be read")
            continue
        keep, num_odd = [], 0
        for row, is_damaged in rows:
            ids = [row[name] or [] for name in ("prompt_ids", "answer_ids")]
            is_known = all(map(is_ids, ids))
            row["prompt"] = tokenizer.decode(ids[0], False) if is_ids(ids[0]) else None
            is_forgotten = is_known and store.salted(digest_of(*ids)) in store.forgotten
            keep.append(not is_forgotten and not has(row, pattern))
            num_odd += keep[-1] and (is_damaged or not is_known)
        if num_odd:
            unread = f"rows with tokens or text that cannot be read, which may have it: {num_odd}"
            done.sources_with_it.append(f"{file} ({unread})")
        num_gone = len(keep) - sum(keep)
        if num_gone and in_sources:
            _rewrite(file, table.filter(pa.array(keep)))
            done.source_rows += num_gone
        elif num_gone:
            done.sources_with_it.append(str(file))


def _source_files(store: Store, done: Forgotten) -> Iterator[Path]:
    """Yields the files that were added to the store and still exist. Of a source without such files, names all others
    as unsearched: they may have been moved."""
    for source in map(Path, dict.fromkeys(name for line in store.versions() for name in line.get("sources", ()))):
        try:
            yield from shards_of(source)
        except PromptError:
            done.sources_with_it += [f"{file}, which was not searched" for file in sorted(source.rglob("*.parquet"))]


def _rewrite(file: Path, table: pa.Table) -> None:
    if not table.num_rows:
        file.unlink()
        return
    with whole_file(file, "make it writable") as scratch:
        parquet.write_table(table, scratch, compression="zstd")
        scratch.chmod(file.stat().st_mode & 0o777)
