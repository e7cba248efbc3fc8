"""The run folder: settings, metrics and results of one run of train, bench, serve or adapt.

    runs/<command>-<timestamp>/
        config.json     settings and provenance        command.txt   the command line
        metrics.jsonl   one line per call of `log`     report.md     for people      *.svg   charts
        results.json    measured values and provenance: processor, versions, commit

Scripts write their results with `write_results`. A file is complete or absent, also after a power cut: `whole_file`
writes a temporary file, syncs it to the disk and renames it. metrics.jsonl is append-only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, ConfigError, reraised
from paceline.hardware import processor
from paceline.runs.masking import masked_command
from paceline.runs.provenance import commit, versions

REMEDY = "choose another folder with --out"
RESUME = "free space and run the same command again"
"""Advice on a full disk for a command that resumes its run."""
RUNS = Path("runs")
"""Folder of the run folders that get a name of their own."""
SCRATCH = re.compile(r".+\.[0-9a-f]{16}\.part")
"""Names of the temporary files that `whole_file` creates: the final name, 16 hex digits, ".part"."""
LEFT_S = 86400.0
"""Age in seconds from which a temporary file counts as abandoned."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder of one run of a command, with its settings, metrics and results. Writing methods raise CacheError if the
    disk cannot be written."""

    path: Path

    @classmethod
    def create(cls, what: str, config: dict[str, Any], out: str | Path | None = None) -> RunFolder:
        """Start a run in the folder `out`; None makes a new folder runs/<what>-<timestamp>. Writes config.json, with
        the settings `config`, and command.txt. `what`: the run's type, such as "regenerate". Deletes the metrics and
        results of an earlier run of this type in `out`: without results.json a run is unfinished. Raises ConfigError
        for a run of another type."""
        check_own(out, what)
        path = Path(out) if out else _unused(RUNS / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}")
        with reraised(CacheError, f"cannot write {path}", REMEDY, OSError):
            path.mkdir(parents=True, exist_ok=True)
            for name in ("results.json", "metrics.jsonl"):
                (path / name).unlink(missing_ok=True)
        run, record = cls(path), record_of({"what": what, **config})
        run.write_json("config.json", record)
        run.write("command.txt", record["command"] + "\n")
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of an earlier run to continue it; removes a truncated last line of its metrics. Raises
        CacheError if `path` is not a run folder."""
        if not (Path(path) / "config.json").is_file():
            raise CacheError(f"{path} is not a run folder (no config.json): check the path")
        drop_cut_line(Path(path) / "metrics.jsonl")
        return cls(Path(path))

    def log(self, **figures: Any) -> None:
        """Append the keyword arguments to metrics.jsonl as one JSON object."""
        with reraised(CacheError, f"cannot write {self.path}", REMEDY, OSError):
            append_lines(self.path / "metrics.jsonl", [plain(figures)])

    def metrics(self) -> list[dict[str, Any]]:
        """Return the objects that `log` has written so far, without a truncated last line."""
        return self.lines("metrics.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of the run's JSON Lines file `name`; [] without this file. Lines that are not a JSON
        object, such as a truncated last one, are left out."""
        file, values = self.path / name, []
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else []:
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
        return [value for value in values if isinstance(value, dict)]

    def results(self, figures: dict[str, Any], name: str = "results.json") -> Path:
        """Write measured values to the run's file `name`, with their provenance (command, date, versions, ...; see
        `record_of`); returns the file's path."""
        return write_results(self.path / name, figures)

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(plain(value), indent=2) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write `text` to the run's file `name` atomically; returns the file's path."""
        path = self.path / name
        write_whole(path, text)
        return path


def drop_cut_line(file: Path) -> None:
    """Remove the last line of a JSON Lines file if it has no newline, because a crash truncated it."""
    with reraised(CacheError, f"cannot write {file}", REMEDY, OSError):
        if not file.exists() or _ends_whole(file):
            return
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        if not opened.seek(0, os.SEEK_END):
            return True
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) == b"\n"


def checked_lines(file: Path, keys: dict[str, type]) -> list[dict[str, Any]]:
    """Return the objects of a JSON Lines file, without a truncated last line; [] without this file. `keys`: key -> type
    of its value, required in every object. Raises ConfigError if a line is not such an object."""
    remedy = "restore it from a copy, or delete the line that is damaged"
    with reraised(ConfigError, f"{file} is damaged", remedy, OSError, ValueError, RecursionError):
        whole = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        lines = [json.loads(line) for line in whole if line.strip()]
        for line in lines:
            if not isinstance(line, dict) or not all(type(line.get(key)) is kind for key, kind in keys.items()):
                raise ValueError(f"{str(line)[:80]} is no line of it")
        return lines


def append_lines(file: Path, lines: Iterable[Any], *, is_synced: bool = False) -> None:
    """Append objects to a JSON Lines file: either all of them or, on an error, none. A truncated last line is removed
    first. `is_synced`: call fsync before returning. Raises OSError if the file cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    drop_cut_line(file)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    size = file.stat().st_size if file.exists() else 0
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            if is_synced:
                os.fsync(opened.fileno())
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.truncate(file, size)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically (see `whole_file`)."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def check_place(out: Path, remedy: str = REMEDY) -> Path | None:
    """Check, before any work, that the file or folder `out` can be written, without creating it. Returns the topmost
    parent folder that would have to be created; None if all exist. Raises CacheError if `out` cannot be written;
    `remedy`: advice at the end of the message."""
    home = out.parts[0] if out.parts else ""
    if home.startswith("~") and (home == "~" or len(out.parts) > 1) and not Path(home).exists():
        raise CacheError(f"cannot write {out}: there is no home folder {home} here: write the path in full")
    parents = [*reversed(out.absolute().parents)]
    nearest = next(path for path in (out.absolute(), *reversed(parents)) if path.exists())
    if nearest != out.absolute() and not nearest.is_dir():
        raise CacheError(f"cannot write {out}: {nearest} is a file: {remedy}")
    _check_regular(out)
    if not os.access(nearest, os.W_OK) or nearest.resolve().is_relative_to("/proc"):
        raise CacheError(f"cannot write {out}: {nearest} may not be written to: {remedy}")
    return next((parent for parent in parents if not parent.exists()), None)


def _check_regular(path: Path) -> None:
    """Raises CacheError for a device, a pipe or a socket: a renamed file would take its place, for root also that of
    /dev/null."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CacheError(f"cannot write {path}: it is a device, a pipe or a socket: name an ordinary file")


def check_file(out: Path, remedy: str) -> Path | None:
    """Check, before any work, that `out` can be written as a file. Returns and raises as `check_place`; also raises
    CacheError if `out` is a folder."""
    if out.is_dir():
        raise CacheError(f"{out} is a folder: name a file in it, or {remedy}")
    return check_place(out, remedy)


def check_folder(out: Path) -> None:
    """Check, before any work, that `out` can become a run folder. Raises CacheError if it is a file, is named like one
    (.html, .json, .jsonl, .md or .svg), or cannot be written."""
    if out.exists() and not out.is_dir():
        raise CacheError(f"{out} is a file, and a run needs a folder: {REMEDY}")
    if out.suffix in (".html", ".json", ".jsonl", ".md", ".svg"):
        raise CacheError(f"{out} is named as a file, and a run needs a folder: give --out {out.with_suffix('')}")
    check_place(out)


def check_own(out: str | Path | None, what: str, *sources: str | Path | None) -> None:
    """Check, before any work, that a new run of type `what` may overwrite the folder `out`, so that no other run is
    lost. Raises ConfigError if the folder holds a run of another type, or a run that the new one reads, and CacheError
    as `check_folder` does. `out`: None for a new folder in runs/. `sources`: the runs that the new one reads, each
    given as its folder or as a file in it."""
    check_folder(Path(out or RUNS))
    if out is None:
        return
    config, before = Path(out) / "config.json", "of unknown type"
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        before = json.loads(config.read_text(encoding="utf-8"))["what"]
    is_used, folder = config.exists(), config.parent.resolve()
    is_read = any(folder in (Path(each).resolve(), Path(each).resolve().parent) for each in sources if each)
    if is_used and (before != what or is_read):
        raise ConfigError(f"--out {out} is the folder of another run ({before}), which would be lost: {REMEDY}")


def check_new(out: Path, what: str = "folder") -> None:
    """Raises CacheError if `out` is a file or a folder with content. `what`: "folder" or "file", for the message."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CacheError(f"{out} is there already: choose another {what}")


@contextlib.contextmanager
def whole_file(path: Path, remedy: str = REMEDY, mode: int = 0o666) -> Iterator[Path]:
    """Context manager to write the file `path` atomically: yields the path of a new temporary file in the same folder.
    At the end of the block that file is synced to the disk and renamed to `path`; on an error it is deleted. `mode`:
    permissions of the file, less the umask. Temporary files left by killed processes are deleted after a day. Raises
    CacheError if the disk cannot be written; `remedy`: advice at the end of the message."""
    from safetensors import SafetensorError

    with reraised(CacheError, f"cannot write {path}", remedy, OSError, SafetensorError):
        _check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_leftovers(path.parent.absolute())
        scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            created = scratch.stat()
            yield scratch
            if scratch.stat().st_ino != created.st_ino:  # safetensors puts a file of mode 0600 in its place
                scratch.chmod(created.st_mode & 0o777)
            sync(scratch)
            scratch.replace(path)
            sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(folder: Path, remedy: str = REMEDY) -> Iterator[Path]:
    """Context manager to write a folder so that it is complete or absent: yields a new temporary folder with all
    permissions that the umask allows. At the end of the block it is synced to the disk and replaces `folder`, or the
    folder that this links to; on an error it is deleted, and `folder` stays as it was. Only one process may write
    `folder` at a time. Raises CacheError if the disk cannot be written; `remedy`: advice at the end of the message."""
    from safetensors import SafetensorError

    with reraised(CacheError, f"cannot write {folder}", remedy, OSError, SafetensorError):
        folder = folder.resolve()
        scratch, before = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "before"))
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed process
        _recover(folder, before)
        try:
            scratch.mkdir(parents=True)
            yield scratch
            sync_folder(scratch)
            _replace_folder(folder, scratch, before)
            sync(folder.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _recover(folder: Path, before: Path) -> None:
    """Give an old folder, which a killed process had moved to `before`, its name back; delete it if the new one is
    there."""
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
    elif before.is_dir():
        before.rename(folder)


def _replace_folder(folder: Path, new: Path, before: Path) -> None:
    """Rename the folder `new` to `folder`. An old one is moved to `before` until then, since it may be impossible to
    delete all of it."""
    shutil.rmtree(before, ignore_errors=True)
    if is_old := folder.is_dir():
        folder.rename(before)
    try:
        new.rename(folder)
    except OSError:
        if is_old:
            before.rename(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


@functools.lru_cache(maxsize=1024)
def _drop_leftovers(folder: Path) -> None:
    """Delete abandoned temporary files, once per process and folder, because listing a large folder is slow."""
    for left in folder.glob("*.part"):
        if SCRATCH.fullmatch(left.name):
            # An error is harmless: the file was renamed, another process deletes it too, or it is another user's in
            # /tmp.
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_S:
                    left.unlink()


def sync(*paths: Path) -> None:
    """Flush files or folders to the disk (fsync). Sync a file before renaming it: else it may be incomplete after a
    power cut."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush a folder with all its files to the disk (fsync)."""
    sync(*folder.rglob("*"), folder)


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Dataclasses become objects; tuples, sets, arrays and tensors lists; paths text;
    NaN and infinities null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    to_list = getattr(value, "tolist", None)
    return plain(to_list()) if to_list else str(value)


def write_results(path: Path, figures: dict[str, Any], peers: dict[str, str] | None = None) -> Path:
    """Write measured values to `path` as JSON, with their provenance (command, date, versions, ...). Returns the path.
    `peers`: as for `record_of`."""
    write_whole(path, json.dumps(record_of(figures, peers), indent=1) + "\n")
    return path


def record_of(figures: dict[str, Any], peers: dict[str, str] | None = None) -> dict[str, Any]:
    """Return `figures` (measured values) with their provenance: "command" (without API keys), "date", "processor",
    "versions", "commit". `peers`: name -> version of other programs in the measurement, such as compared servers."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    provenance = {
        "command": masked_command([*words, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": processor(),
        "versions": {**versions(), **(peers or {})},
        "commit": commit(),
    }
    return plain({**provenance, **figures})


def _unused(path: Path) -> Path:
    """Returns the path with the first free number appended if it exists: two runs may start within a second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
