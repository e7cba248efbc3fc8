"""Dataset store on disk, with versions.

    store/store.json            model whose tokens these are, split settings, current version
    store/versions.jsonl        one line per change: version, time, kind, number of rows, files with their SHA-256
    store/train/*.parquet       rows for training: `paceline train --answers store/train`
    store/evals/*.parquet       rows for evals: `paceline evals make --from store`
    store/labels.jsonl          scores of answers
    store/card.md               summary of the contents
    store/unfinished/           shards of killed changes, which are never read

A new version adds files and changes no existing one. Each row stores the version that added it, so that earlier
versions can still be read. Only `forget` and `split` change existing files. If the process is killed during a change,
the next change first completes it, or reverts it if its files or its line are incomplete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.near_copies import Near, common_pieces, pieces_of
from paceline.data.tags import check_tags
from paceline.errors import CacheError, ConfigError, PromptError, refuse, reraised
from paceline.hub import resolve
from paceline.loop.store.card import write_card
from paceline.loop.store.config import SplitConfig
from paceline.loop.store.incoming import STORED, Incoming, Row, pa, parquet, read_shard
from paceline.loop.store.split import BETWEEN, SIDES, sides
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import SILENT, Progress
from paceline.runs.folder import append_lines, checked_lines, plain, whole_file, write_whole
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

FORMAT = 1
ROWS_PER_SHARD = 2048
ELSEWHERE = "free space, or make it writable"
UNFINISHED = "unfinished"
SHARD = re.compile(r"answers-v(\d+)-\d+\.parquet")
log = logging.getLogger("paceline.loop.store")


@dataclass(slots=True)
class Store:
    """A dataset store: versioned rows (prompt, answer, metadata) on two sides, "train" and "evals". Create one with
    `Store.create` or `Store.open`."""

    path: Path
    model: str
    split: SplitConfig
    version: int
    salt: str
    """Random text that is hashed together with each row, for `forgotten`."""
    suites: list[str] = field(default_factory=list)
    """Files of eval suites made from this store; `forget` deletes from them, too."""
    forgotten: set[str] = field(default_factory=set)
    """Salted hashes of deleted rows, which must not be added again."""

    @classmethod
    def create(cls, path: str | Path, model: str, split: SplitConfig | None = None) -> Store:
        """Create an empty store at `path`, for prompts and answers in the tokens of `model`. Raises ConfigError if
        `path` already contains files of a store, CacheError if it cannot be written."""
        folder = Path(path)
        is_left = (folder / "versions.jsonl").exists() or any(
            any((folder / side).glob("answers-*.parquet")) for side in SIDES
        )
        refuse(
            ConfigError,
            ((folder / "store.json").exists(), f"{folder} is a store already: open it"),
            (is_left, f"{folder} holds a store's files without its store.json: restore that, or choose another folder"),
        )
        with reraised(CacheError, f"cannot write {folder}", ELSEWHERE, OSError):
            for path in (folder, *(folder / side for side in SIDES)):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)  # user data: for the owner only
        store = cls(folder, model, split or SplitConfig(), 0, secrets.token_hex(8))
        store.save()
        return store

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Open a store. Raises ConfigError if `path` is not a store, or its format is unknown."""
        file = Path(path) / "store.json"
        if not file.is_file():
            raise ConfigError(f"{path} is no store: make one with paceline store add {path} TRACES --model M")
        with reraised(ConfigError, f"{file} cannot be read", "restore it", OSError, ValueError, TypeError, KeyError):
            state = json.loads(file.read_text(encoding="utf-8"))
            if state["format"] != FORMAT:
                raise ConfigError(f"{path} is a store of format {state['format']}: this paceline reads {FORMAT}")
            split, forgotten = SplitConfig(**state["split"]), set(state["forgotten"])
            return cls(Path(path), state["model"], split, state["version"], state["salt"], state["suites"], forgotten)

    def save(self) -> None:
        state = {name: getattr(self, name) for name in ("model", "version", "salt", "suites")}
        state |= {"format": FORMAT, "split": asdict(self.split), "forgotten": sorted(self.forgotten)}
        write_whole(self.path / "store.json", json.dumps(state, indent=1) + "\n")

    def tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer. Raises ModelNotFoundError, ModelFileError, UnsupportedModelError or
        DownloadError."""
        return Tokenizer.from_path(resolve(self.model))

    def shards(self, side: str) -> list[Path]:
        return sorted((self.path / side).glob("answers-*.parquet"))

    def rows(self, side: str, version: int | None = None) -> Iterator[Row]:
        """Yield the stored rows of a side ("train" or "evals"). `version`: yield only rows that were added in this
        version or an earlier one [default: all rows]. Rows that `forget` deleted are missing, whatever the version.
        Raises PromptError on a damaged Parquet file, ConfigError if versions.jsonl is damaged."""
        last = self.version if version is None else version
        # Other files are from a killed change.
        named = {name for line in self.versions()[-1:] for name in line["files"]}
        for file in self.shards(side):
            if f"{side}/{file.name}" not in named:
                continue
            for row in read_shard(file):
                if row["version"] <= last:
                    yield row

    @contextlib.contextmanager
    def changing(self, doing: str) -> Iterator[dict[str, Any] | None]:
        """Context manager for a change of the store; holds the store's lock. If an earlier change was killed, the
        earlier change is first completed, if all of its files and its line in versions.jsonl were written, or else
        reverted.

        Yields the line in versions.jsonl of the earlier change if it was completed, else None. `doing`: description of
        the new change; other processes that find the store locked show it in their error message. Raises ConfigError if
        another process holds the lock, or if store.json and versions.jsonl have different versions."""
        with only_run(self.path, doing, Ranks(), SILENT.say):
            current = Store.open(self.path)
            self.version, self.suites = current.version, current.suites
            self.forgotten, self.split = current.forgotten, current.split
            yield self._recover()

    def _recover(self) -> dict[str, Any] | None:
        """Complete a killed change whose files and line are complete, and return its line; else revert it and return
        None."""
        lines, finished = self._version_lines(), None
        newest, highest = max(lines, default=0), max(map(_version_of, self.all_shards()), default=0)
        if newest > self.version + 1:
            raise self._mismatch(newest)
        if highest > self.version + 1:
            raise ConfigError(
                f"{self.path}: store.json is at version {self.version}, but there are shards of version {highest}: "
                "restore the whole folder from one copy; nothing was changed"
            )
        if self._is_whole(lines.get(self.version + 1)):
            finished = lines[self.version + 1]
            self.version, self.split = newest, SplitConfig(**finished["split"]) if "split" in finished else self.split
            self.save()
        whole = lines[self.version]["files"] if self.version else {}
        earlier = {name for number, line in lines.items() if number < self.version for name in line["files"]}
        for file in self.all_shards():
            name = f"{file.parent.name}/{file.name}"
            if name in earlier - whole.keys():
                file.unlink()  # replaced by a later version
            elif name not in whole:
                self._set_aside(file)
        return finished

    def _set_aside(self, file: Path) -> None:
        """Move a shard that no version names into UNFINISHED: after a partial restore it may belong to a later
        version."""
        folder, number = self.path / UNFINISHED, 0
        with reraised(CacheError, f"cannot write {folder}", ELSEWHERE, OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            while (aside := folder / f"{file.parent.name}-{file.stem}-{number}.parquet").exists():
                number += 1
            file.replace(aside)
        log.warning("%s is of no version, as a change that was killed leaves it: moved to %s", file, aside)

    def unfinished(self) -> list[Path]:
        """Returns the Parquet files in the folder unfinished/. They are leftovers of killed changes, moved there
        because no version names them."""
        return sorted((self.path / UNFINISHED).glob("*.parquet"))

    def all_shards(self) -> list[Path]:
        return [file for side in SIDES for file in self.shards(side)]

    def _is_whole(self, line: dict[str, Any] | None) -> bool:
        """True if the line exists and all its files have their recorded hashes."""
        files = {self.path / name: mark for name, mark in line["files"].items()} if line else {}
        return bool(files) and all(file.is_file() and sha256_of(file) == mark for file, mark in files.items())

    def add(
        self,
        sources: Iterable[str | Path],
        tokenizer: Tokenizer | None = None,
        progress: Progress = SILENT,
        tags: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Add answers from these files or folders as a new version. Returns the version's line in versions.jsonl.
        `tokenizer`: tokenizer of the store's model [default: loads it]. `tags`: add only rows with one of these tags
        (empty: all rows). An answer is left out if

        - it is already stored, or was deleted by `forget`;
        - its prompt and answer together nearly equal those of another conversation;
        - its conversation is similar to stored conversations of both sides ("train" and "evals"), so that it fits on
          neither.

        Raises PromptError if a source is invalid, or if the store is empty and no source has a usable answer. Raises
        ConfigError if another process changes the store, or a source has no row with one of `tags`. Raises CacheError
        if a file cannot be written."""
        paths = [Path(source) for source in sources]
        for path in paths:
            check_tags(path, tags)
        incoming = Incoming(tokenizer or self.tokenizer())
        with self.changing("adding to the store") as finished:
            fresh = list(incoming.rows(paths, tags))
            stored = [(side, row) for side in SIDES for row in self.rows(side)]
            if not fresh and not stored:
                raise PromptError(f"nothing in {', '.join(map(str, paths))} can be used: {incoming.left_out_text}")
            left_out, added = incoming.left_out, dict.fromkeys(SIDES, 0)
            new = self._new(stored, fresh, left_out)
            resolved = [str(path.resolve()) for path in paths]
            command = {"sources": resolved} | ({"tags": list(tags)} if tags else {})
            before = {name: finished[name] for name in ("sources", "tags") if name in finished} if finished else {}
            if finished and not new and command == before:
                progress.say(
                    f"version {self.version} was written by the same command, which was stopped: it is whole now"
                )
                return finished
            version = self.version + 1
            for side in SIDES:
                rows = [{**row, "version": version} for where, row in new if where == side]
                self.write(side, rows, version)
                added[side] = len(rows)
            line = self.commit("add", {"added": added, "left_out": dict(left_out), **command})
        counts = f"{added['train']} rows to train on, {added['evals']} for evals"
        progress.say(f"version {self.version}: {counts}; {incoming.left_out_text}")
        return line

    def _new(
        self, stored: Sequence[tuple[str, Row]], fresh: Sequence[Row], left_out: Counter[str]
    ) -> list[tuple[str, Row]]:
        """Returns (side, row) of new rows; counts the others in `left_out`."""
        seen = {row["digest"] for _, row in stored}
        unique: list[Row] = []
        for row in fresh:
            if row["digest"] in seen:
                left_out["there already"] += 1
            elif self.salted(row["digest"]) in self.forgotten:
                left_out["forgotten"] += 1
            else:
                seen.add(row["digest"])
                unique.append(row)
        every = [row for _, row in stored] + unique
        known = [side for side, _ in stored] + [None] * len(unique)
        conversations, chosen = sides([tuple(row["prompt_ids"]) for row in every], known, self.split)
        pieces = [pieces_of([*row["prompt_ids"], *row["answer_ids"]]) for row in every]
        near, new = Near(self.split.max_overlap, common_pieces(pieces)), list[tuple[str, Row]]()
        for number, (row, side) in enumerate(zip(every, chosen, strict=True)):
            if number >= len(stored):
                row["conversation"] = conversations[number]
                is_copy = any(conversations[other] != conversations[number] for other in near.like(pieces[number]))
                if is_copy or side == BETWEEN:
                    left_out["near-copy" if is_copy else "between training and evals"] += 1
                    continue
                new.append((side, row))
            near.add(number, pieces[number])
        return new

    def salted(self, digest: str) -> str:
        return hashlib.blake2b(f"{self.salt}/{digest}".encode(), digest_size=12).hexdigest()

    def write(self, side: str, rows: Sequence[Row], version: int) -> None:
        """Write rows of a side ("train" or "evals") to new Parquet files, at most 2048 rows each. `version`: number of
        the version that the rows belong to, part of the files' names."""
        for number, begin in enumerate(range(0, len(rows), ROWS_PER_SHARD)):
            file = self.path / side / f"answers-v{version:05d}-{number:05d}.parquet"
            write_shard(file, rows[begin : begin + ROWS_PER_SHARD])

    def resplit(self, split: SplitConfig) -> dict[str, Any]:
        """Split all conversations into training and evals anew; returns the new version's line in versions.jsonl.
        Models trained on an earlier version may have seen rows that are now for evals. Raises PromptError if the store
        is empty, ConfigError if another process changes the store."""
        with self.changing("splitting the store") as finished:
            if finished and finished.get("split") == asdict(split):
                return finished
            old = self.all_shards()
            rows = [row for side in SIDES for row in self.rows(side)]
            refuse(PromptError, (not rows, f"{self.path} is empty: add answers first"))
            _, chosen = sides([tuple(row["prompt_ids"]) for row in rows], [None] * len(rows), split)
            for side in SIDES:
                of_side = [row for row, where in zip(rows, chosen, strict=True) if where == side]
                self.write(side, of_side, self.version + 1)
            self.split = split
            return self.commit("split", {"split": asdict(split)}, old)

    def commit(self, what: str, figures: dict[str, Any], replaced: Sequence[Path] = ()) -> dict[str, Any]:
        """Complete the next version, whose files are already written: append its line to versions.jsonl, then delete
        the files in `replaced`, which it no longer needs. `what`: kind of change ("add", "split" or "forget").
        `figures`: further fields of the line. Returns the line."""
        left = {side: [file for file in self.shards(side) if file not in replaced] for side in SIDES}
        files = {f"{side}/{file.name}": sha256_of(file) for side in SIDES for file in left[side]}
        rows = {side: sum(parquet.read_metadata(file).num_rows for file in left[side]) for side in SIDES}
        line = plain({"version": self.version + 1, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "what": what, **figures})
        line |= {"rows": rows, "files": files}
        self._append("versions.jsonl", [line])
        self.version += 1
        self.save()
        for file in replaced:
            file.unlink(missing_ok=True)
        write_card(self)
        return line

    def versions(self) -> list[dict[str, Any]]:
        """Returns the lines of versions.jsonl, one per complete version, oldest first. Raises ConfigError on a damaged
        line, or if the newest version's line is missing."""
        return [line for number, line in self._version_lines().items() if number <= self.version]

    def _version_lines(self) -> dict[int, dict[str, Any]]:
        """Returns {version: line}. Raises ConfigError as `versions` does."""
        keys = {"version": int, "what": str, "rows": dict, "files": dict}
        lines = checked_lines(self.path / "versions.jsonl", keys)
        by_version = {line["version"]: line for line in lines}
        if self.version and self.version not in by_version:
            raise self._mismatch(max(by_version, default=0))
        return by_version

    def _mismatch(self, newest: int) -> ConfigError:
        return ConfigError(
            f"{self.path}: store.json is at version {self.version}, versions.jsonl ends with {newest}: restore the "
            "whole folder from one copy; nothing was changed"
        )

    def note_suite(self, file: str | Path) -> None:
        """Record that the eval suite in `file` was made from this store, so that `forget` also deletes its cases.
        Raises ConfigError if another process changes the store."""
        with self.changing("noting a suite"):
            self.suites = list(dict.fromkeys([*self.suites, str(Path(file).resolve())]))
            self.save()

    def label(self, labels: Iterable[dict[str, Any]]) -> int:
        """Append labels of rows to labels.jsonl; returns how many were appended. A label is a dict of any values, such
        as the score of the row's answer, and `digest`, the row's identifier. Labels of rows that are not in the store
        are ignored. Raises CacheError if the file cannot be written, ConfigError if another process changes the
        store."""
        with self.changing("labelling"):  # `forget` may have deleted rows since the store was opened
            known = {row["digest"] for side in SIDES for row in self.rows(side)}
            matching = [label for label in labels if label.get("digest") in known]
            self._append("labels.jsonl", matching)
        return len(matching)

    def _append(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        with reraised(CacheError, f"cannot write {self.path}", ELSEWHERE, OSError):
            append_lines(self.path / name, map(plain, lines), is_synced=True)

    def labels(self) -> list[dict[str, Any]]:
        """Returns all labels of rows in labels.jsonl, which `label` writes, oldest first. Raises ConfigError on a
        damaged line."""
        return checked_lines(self.path / "labels.jsonl", {})


def _version_of(shard: Path) -> int:
    """Version that wrote the shard; 0 for other names."""
    match = SHARD.fullmatch(shard.name)
    return int(match[1]) if match else 0


def write_shard(file: Path, rows: Sequence[Row]) -> None:
    """Write rows to a Parquet file atomically, readable for its owner only. Raises CacheError on a write error."""
    table = pa.Table.from_pylist([{name: row.get(name) for name in STORED.names} for row in rows], STORED)
    with whole_file(file, ELSEWHERE, mode=0o600) as scratch:
        parquet.write_table(table, scratch, compression="zstd")


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
