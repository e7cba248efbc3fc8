"""A process that is killed, or a disk that refuses, at the n-th change of a file: `every_fault` tries all n, in this
process.

    for fault in every_fault(folder, lambda: command(folder), prepare):
        ...    # the command was broken off by `fault`: run it again, and compare

Changes are opening a file to write, each write (half of it is done), flush to the disk, rename, deletion, cut, new and
deleted folders, and files that pyarrow and safetensors write themselves. A killed process changes nothing any more,
also not in its `finally`. A full disk refuses one change and frees nothing: deletions and cuts work on it.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
from pyarrow import parquet

from paceline.draft.dflash import checkpoint as draft_checkpoint
from paceline.errors import PacelineError
from paceline.train.learn import checkpoint as train_checkpoint

KINDS = ("kill", "full")
FREES = ("unlink", "truncate", "rmdir")
EVERY = 1 if os.environ.get("PACELINE_NIGHTLY") else 9
"""How many changes of files a loop goes on before it breaks the next one."""
MOST = 2000
"""Changes of one command: more are a loop that never ends."""


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class Fault:
    """Counts changes of files below a folder, and breaks the n-th, counted from 1; 0: none."""

    def __init__(self, folder: Path, kind: str, at: int) -> None:
        self.folder, self.kind, self.at = folder.resolve(), kind, at
        self.num, self.what, self.error = 0, "", None
        self.is_dead = False
        self.error: BaseException | None = None
        """Exception raised by the command."""
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.kind} at change {self.at}: {self.what}"

    @property
    def has_struck(self) -> bool:
        return bool(self.what)

    def before(self, what: str, path: Any) -> bool:
        """Count a change that is about to be made. Returns whether it is the one to break; raises Killed in a dead
        process."""
        if self.is_dead:
            raise Killed
        if not self._is_below(path) or (self.kind == "full" and what in FREES):
            return False
        with self._lock:
            self.num += 1
            if self.num != self.at:
                return False
        self.what = f"{what} {path}"
        return True

    def strike(self, path: Any) -> None:
        if self.kind == "kill":
            self.is_dead = True
            raise Killed(self.what)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _is_below(self, path: Any) -> bool:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return False
        try:
            return Path(os.fspath(path)).absolute().is_relative_to(self.folder)
        except (TypeError, ValueError):
            return False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, changes of files are counted."""
        with contextlib.ExitStack() as stack:
            for name in ("replace", "rename", "unlink", "remove", "truncate", "fsync", "mkdir", "rmdir"):
                kind = "unlink" if name == "remove" else name
                stack.enter_context(mock.patch.object(os, name, self._wrapped(kind, getattr(os, name))))
            stack.enter_context(mock.patch.object(os, "open", self._os_open(os.open)))
            opened = self._opened(io.open)
            stack.enter_context(mock.patch.object(io, "open", opened))
            stack.enter_context(mock.patch.object(builtins, "open", opened))
            stack.enter_context(mock.patch.object(parquet, "write_table", self._whole(parquet.write_table, 1)))
            save_file = self._whole(safetensors.torch.save_file, 1)
            for module in (safetensors.torch, train_checkpoint, draft_checkpoint):  # by name: two bound it at import
                stack.enter_context(mock.patch.object(module, "save_file", save_file))
            stack.enter_context(mock.patch.object(threading, "excepthook"))
            yield

    def _wrapped(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **more: Any) -> Any:
            folder = more.get("dir_fd")
            if folder is not None:
                with contextlib.suppress(OSError):
                    where = os.readlink(f"/proc/self/fd/{folder}")
                    if self.before(what, Path(where, path)):
                        self.strike(path)
            elif self.before(what, path):
                self.strike(path)
            return real(path, *rest, **more)

        return call

    def _os_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *rest: Any, **more: Any) -> Any:
            if flags & (os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR) and self.before("create", path):
                self.strike(path)
            return real(path, flags, *rest, **more)

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+") or isinstance(path, int):
                return real(path, mode, *rest, **more)
            if self.before("open", path):
                self.strike(path)
            return (
                _Watched(self, path, real(path, mode, *rest, **more))
                if self._is_below(path)
                else real(path, mode, *rest, **more)
            )

        return call

    def _whole(self, real: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Wrap a function that writes a whole file."""

        def call(*arguments: Any, **more: Any) -> Any:
            where = arguments[place]
            file = where.file if isinstance(where, _Watched) else where
            path = where.path if isinstance(where, _Watched) else where
            is_struck = self.before("write", path)
            result = real(*arguments[:place], file, *arguments[place + 1 :], **more)
            if is_struck:
                if not isinstance(where, _Watched):
                    with io.FileIO(os.fspath(path), "r+") as cut:
                        cut.truncate(Path(path).stat().st_size // 2)
                self.strike(path)
            return result

        return call


class _Watched:
    """A file that is open for writing."""

    def __init__(self, fault: Fault, path: Any, file: Any) -> None:
        self.fault, self.path, self.file = fault, path, file

    def write(self, data: Any) -> int:
        if self.fault.before("write", self.path):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            self.fault.strike(self.path)
        return self.file.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def every_fault(
    folder: Path, command: Callable[[], object], prepare: Callable[[], object], kinds: tuple[str, ...] = KINDS
) -> Iterator[Fault]:
    """Break the command off at each of its changes of files below `folder`, in turn; `prepare` makes the folder anew.

    Every EVERY-th change of each kind, the first included; all of them in .ci/nightly, which takes many minutes.
    A full disk may only raise an error of ours, and nothing else may be raised by the command. What is played here
    loses nothing that is on its way to the disk, so until the loop ends nobody waits for it.
    """
    with mock.patch.object(os, "fsync", return_value=None):
        yield from _every_fault(folder, command, prepare, kinds)


def _every_fault(
    folder: Path, command: Callable[[], object], prepare: Callable[[], object], kinds: tuple[str, ...]
) -> Iterator[Fault]:
    for kind in kinds:
        for number, at in enumerate(range(1, MOST, EVERY)):
            prepare()
            fault = Fault(folder, kind, at)
            with fault.installed():
                try:
                    command()
                except (Killed, PacelineError) as error:
                    fault.error = error
            if not fault.has_struck:
                assert number > 0, "the command changes no file"
                print(f" {kind}: {number} changes tried;", end="")
                break
            assert kind == "full" or fault.error is not None or fault.is_dead
            if isinstance(fault.error, PacelineError):
                assert "\n" not in str(fault.error), "one line"
            yield fault
        else:
            raise AssertionError(f"more than {MOST} changes")


def copied(template: Path, folder: Path) -> Callable[[], None]:
    """Makes a folder a copy of another; for `prepare`."""

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)

    return prepare


def emptied(folder: Path) -> Callable[[], None]:
    """Makes an empty folder; for `prepare`."""

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    return prepare
