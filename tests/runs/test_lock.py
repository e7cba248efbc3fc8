"""Two runs in one folder: the second is refused and told what to do; a run that died does not stand in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, paceline

from paceline.errors import CacheError, ConfigError
from paceline.runs import lock
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lock, "PATIENCE_S", 0.2)


def held(folder: Path, ranks: Ranks | None = None, doing: str = "training") -> contextlib.AbstractContextManager[None]:
    return only_run(folder, doing, ranks or Ranks(), lambda text: None)


HOLDING = """
import sys
from pathlib import Path
from paceline.runs.lock import only_run
from paceline.runs.ranks import Ranks

with only_run(Path(sys.argv[1]), "training", Ranks(), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_full_disk_is_not_taken_for_one_without_locks(tmp_path: Path) -> None:
    """Closing the lock's file then ended the command with a traceback."""
    (tmp_path / ".lock").symlink_to("/dev/full")
    notes = list[str]()
    with (
        pytest.raises(CacheError, match="cannot write .*choose another folder"),
        only_run(tmp_path, "training", Ranks(), notes.append),
    ):
        pass
    assert notes == []


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """By the command, beside a first one in a process of its own, which is killed."""
    run = tmp_path / "run"
    words = [sys.executable, "-c", HOLDING, str(run)]
    first = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=rf"another run is training here: .*run \(pid {first.pid}\): wait until it ends"
        ):
            paceline(*TINY, "--features", "online", "--out", run, "--max-steps", "1")
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with held(run):
        pass


def test_answering_is_kept_apart_too(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    words = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "run", "--device", "cpu")
    with (
        held(tmp_path / "run", doing="answering"),
        pytest.raises(ConfigError, match=rf"another run is answering here: .*run \(pid {os.getpid()}\)"),
    ):
        paceline("regenerate", *words)


def test_processes_of_one_torchrun_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with held(tmp_path, Ranks(1, 2)):
        with held(tmp_path, Ranks(0, 2)):
            with pytest.raises(ConfigError, match="another run is training here"), held(tmp_path):
                pass
            monkeypatch.setenv("MASTER_PORT", "29501")
            with pytest.raises(ConfigError, match="another run is training here"), held(tmp_path, Ranks(0, 2)):
                pass
        with pytest.raises(ConfigError, match="another run is training here"), held(tmp_path):
            pass
    with held(tmp_path), pytest.raises(ConfigError, match="another run"), held(tmp_path, Ranks(0, 2)):
        pass
    with held(tmp_path, Ranks(0, 2)):
        pass


def test_a_disk_without_locks_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    notes: list[str] = []
    with only_run(tmp_path, "training", Ranks(), notes.append):
        assert len(notes) == 1 and "knows no locks" in notes[0]
