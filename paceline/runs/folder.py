"""The run folder: what was asked, what was measured, what it means. One writer for train, bench, serve and adapt.

    runs/<what>-<timestamp>/
        config.json     settings, and what made it     command.txt   the command line that made it
        metrics.jsonl   one line per `log` call        report.md     for people      *.svg   figures
        results.json    the figures, and what made them: processor, versions, commit

Scripts write their results with `write_results`, the same way. Files appear whole or not at all, also after a power cut
(`whole_file`: written beside, synced, renamed); metrics.jsonl only grows, line by line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CacheError, reraised
from paceline.hardware import processor

PACKAGES = ("paceline", "torch", "transformers", "tokenizers", "safetensors", "numpy", "llama-cpp-python", "vllm")
"""Those that decide speed or output, ours and peers."""
ELSEWHERE = "choose another folder with --out"
SCRATCH = re.compile(r".+\.[0-9a-f]{16}\.part")
"""Names of files that are being written."""
LEFT_S = 86400.0
"""Nobody writes a file any more that was not changed for so long."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder. Every method raises CacheError when the disk refuses."""

    path: Path

    @classmethod
    def create(cls, what: str, config: dict[str, Any], out: str | Path | None = None) -> RunFolder:
        """A fresh run in `out`, else in runs/<what>-<timestamp>; a folder used before loses its old metrics."""
        path = Path(out) if out else _unused(Path("runs") / f"{what}-{time.strftime('%Y%m%d-%H%M%S')}")
        with reraised(CacheError, f"cannot write {path}", ELSEWHERE, OSError):
            path.mkdir(parents=True, exist_ok=True)
            (path / "metrics.jsonl").unlink(missing_ok=True)
        run, record = cls(path), record_of({"what": what, **config})
        run.write_json("config.json", record)
        run.write("command.txt", record["command"] + "\n")
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Continue a run: its metrics go on where they ended, a last line cut short by a crash is dropped. Raises CacheError
        when there is none."""
        if not (Path(path) / "config.json").is_file():
            raise CacheError(f"{path} is not a run folder (no config.json): check the path")
        drop_cut_line(Path(path) / "metrics.jsonl")
        return cls(Path(path))

    def log(self, **figures: Any) -> None:
        """Append one line to metrics.jsonl."""
        with reraised(CacheError, f"cannot write {self.path}", ELSEWHERE, OSError):
            append_lines(self.path / "metrics.jsonl", [plain(figures)])

    def metrics(self) -> list[dict[str, Any]]:
        """All lines logged so far; one cut short by a crash is left out."""
        return self.lines("metrics.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The objects of a file of JSON Lines; a last one cut short by a crash is left out."""
        file, found = self.path / name, []
        for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict)]

    def results(self, figures: dict[str, Any], name: str = "results.json") -> Path:
        """Write a file of figures that says what made them."""
        return write_results(self.path / name, figures)

    def write_json(self, name: str, value: Any) -> Path:
        return self.write(name, json.dumps(plain(value), indent=2) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of the run at once; returns its path."""
        path = self.path / name
        write_whole(path, text)
        return path


def drop_cut_line(file: Path) -> None:
    """Cut off a last line that a crash left without its end."""
    with reraised(CacheError, f"cannot write {file}", ELSEWHERE, OSError):
        if not file.exists() or _ends_whole(file):
            return
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        if not opened.seek(0, os.SEEK_END):
            return True
        opened.seek(-1, os.SEEK_END)
        return opened.read(1) == b"\n"


def append_lines(file: Path, lines: Iterable[Any], *, is_synced: bool = False) -> None:
    """Append objects as JSON Lines, all or none: a line that a crash cut is dropped first, what a full disk took of these is
    taken back. `is_synced`: they are on the disk on return. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    drop_cut_line(file)
    text, size = "".join(json.dumps(line) + "\n" for line in lines), file.stat().st_size if file.exists() else 0
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
    """Write a text file so that a reader sees the old file or the new one, never half."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def check_place(out: Path, remedy: str = ELSEWHERE) -> Path | None:
    """Returns the first of the folders above `out` that will be made to write there, None if all exist.

    Raises CacheError with the remedy, before any work, when nothing can be written at `out`: a file or a folder, made or not.
    """
    above = [*reversed(out.absolute().parents)]
    found = next(each for each in (out.absolute(), *reversed(above)) if each.exists())
    if found != out.absolute() and not found.is_dir():
        raise CacheError(f"cannot write {out}: {found} is a file: {remedy}")
    if not os.access(found, os.W_OK) or found.resolve().is_relative_to("/proc"):
        raise CacheError(f"cannot write {out}: {found} may not be written to: {remedy}")
    return next((each for each in above if not each.exists()), None)


def check_file(out: Path, remedy: str) -> Path | None:
    """Like `check_place`, for a file alone. Raises CacheError also when `out` is a folder."""
    if out.is_dir():
        raise CacheError(f"{out} is a folder: name a file in it, or {remedy}")
    return check_place(out, remedy)


def check_folder(out: Path) -> None:
    """Raises CacheError, before any work, when `out` cannot be the folder of a run: a file is there, or it is named as one."""
    if out.exists() and not out.is_dir():
        raise CacheError(f"{out} is a file, and a run needs a folder: {ELSEWHERE}")
    if out.suffix in (".html", ".json", ".jsonl", ".md", ".svg"):
        raise CacheError(f"{out} is named as a file, and a run needs a folder: give --out {out.with_suffix('')}")
    check_place(out)


def check_new(out: Path, what: str = "folder") -> None:
    """Raises CacheError when something is there already; an empty folder is nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CacheError(f"{out} is there already: choose another {what}")


@contextlib.contextmanager
def whole_file(path: Path, remedy: str = ELSEWHERE, mode: int = 0o666) -> Iterator[Path]:
    """Yields a new empty file beside `path`, this writer's alone, which takes its place once it is on the disk.

    `mode` is that of the new file, less the umask. Files that killed writers left in the folder are deleted when they
    are a day old. Raises CacheError with the remedy when the disk refuses; then `path` is as it was.
    """
    from safetensors import SafetensorError

    with reraised(CacheError, f"cannot write {path}", remedy, OSError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_leftovers(path.parent.absolute())
        scratch = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
            yield scratch
            sync(scratch)
            scratch.replace(path)
            sync(path.parent)
        finally:
            scratch.unlink(missing_ok=True)


@functools.lru_cache(maxsize=1024)
def _drop_leftovers(folder: Path) -> None:
    """Once a process and folder: a folder of many files takes long to list."""
    for left in folder.glob("*.part"):
        if SCRATCH.fullmatch(left.name):
            # It was renamed, another process deletes it too, or it is another user's in a folder like /tmp: it only
            # takes up room, and what is to be written now does not depend on it.
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > LEFT_S:
                    left.unlink()


def sync(*paths: Path) -> None:
    """Flush files or folders to the disk, so that a rename never comes before the content."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush a folder with all its files to the disk, before it is renamed or marked as whole."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_folder(path)
        else:
            sync(path)
    sync(folder)


def plain(value: Any) -> Any:
    """What JSON can hold: dataclasses become objects, paths text, NaN and infinities null, numpy and torch values Python's."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    to_list = getattr(value, "tolist", None)
    return plain(to_list()) if to_list else str(value)


def write_results(path: Path, figures: dict[str, Any], peers: dict[str, str] | None = None) -> Path:
    """Write a result file, as of `record_of`."""
    write_whole(path, json.dumps(record_of(figures, peers), indent=1) + "\n")
    return path


def record_of(figures: dict[str, Any], peers: dict[str, str] | None = None) -> dict[str, Any]:
    """What figures depend on beside their settings, then the figures. `peers`: versions of other programs that took part."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    made = {
        "command": shlex.join([*words, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": processor(),
        "versions": {**versions(), **(peers or {})},
        "commit": commit(),
    }
    return plain({**made, **figures})


@functools.cache
def versions() -> Mapping[str, str]:
    """Python, paceline and the packages that decide speed or output."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _unused(path: Path) -> Path:
    """Two runs may start within a second."""
    candidate, number = path, 2
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
