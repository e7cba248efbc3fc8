"""Commands (`--publish`, `--restart`) that a daemon left running when it was killed, and their process groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployments import opened
from fake_servers import FakeServer

from paceline.errors import CacheError, DeployError
from paceline.loop.adapt.rollout.stage import Stage, read_stage
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.servers.vllm_sglang import commands
from paceline.loop.adapt.servers.vllm_sglang.commands import end_command, identity

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are identified by /proc")
UNTIL_S = 30.0
SLOW_ONCE = """
echo "${PACELINE_DRAFTER##*/} begins" >> log
test -e slow || exit 0
rm slow
sleep 120 &
echo $! > child
wait
echo "${PACELINE_DRAFTER##*/} is late" >> log
"""
"""The first call begins a child process and waits for it; the others end at once."""


def waited_for(is_there: Callable[[], object]) -> None:
    until = time.monotonic() + UNTIL_S
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)


class Slow:
    """Deployments with a restart command whose first call lasts; `undo.json` is what the daemon has saved."""

    def __init__(self, server: FakeServer, folder: Path) -> None:
        self.server, self.folder, self.state = server, folder, folder / "undo.json"
        (folder / "slow").touch()
        (folder / "slow.sh").write_text(f"cd {folder}\n{SLOW_ONCE}")

    def opened(self, **changes: Any) -> Deployment:
        command = f"bash {self.folder / 'slow.sh'}"
        return opened(self.server, self.folder / "old", engine="vllm", restart=command, **changes)

    def save(self, deployment: Deployment) -> Callable[[], None]:
        def written() -> None:
            new = self.state.with_suffix(".new")
            new.write_text(json.dumps(deployment.undo))
            os.replace(new, self.state)

        return written

    def killed(self, work: Callable[[Deployment, Callable[[], None]], None]) -> list[list[str | None]]:
        """Run a daemon that is killed during its command; returns what it has saved."""
        deployment = self.opened()
        if not (daemon := os.fork()):
            try:
                work(deployment, self.save(deployment))
            finally:
                os._exit(1)
        waited_for(lambda: (self.folder / "child").exists() and len(self.saved()[-1]) == 4)
        os.kill(daemon, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1]) == -signal.SIGKILL
        assert self.runs(), "the command outlives its daemon"
        return self.saved()

    def saved(self) -> list[list[str | None]]:
        return json.loads(self.state.read_text())

    def runs(self) -> bool:
        """True while the child process of the command runs."""
        text = (self.folder / "child").read_text()
        return not text or identity(int(text)) is not None

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def slow(server: FakeServer, tmp_path: Path) -> Slow:
    return Slow(server, tmp_path)


def test_a_rollback_ends_the_command_of_a_killed_daemon(slow: Slow, tmp_path: Path) -> None:
    undo = slow.killed(lambda deployment, save: deployment.load("x", tmp_path / "new", save))
    following = slow.opened()
    following.resume(undo)
    waited_for(lambda: not slow.runs())
    assert following.undo == [["server", slow.server.url, str(tmp_path / "old")]]
    following.roll_back()
    assert slow.log == ["new begins", "old begins"]


def test_the_command_of_a_rollback_is_ended_too(slow: Slow, tmp_path: Path) -> None:
    def rolled_back(deployment: Deployment, save: Callable[[], None]) -> None:
        deployment.undo = [["server", slow.server.url, str(tmp_path / "old")]]
        deployment.roll_back(save)

    following = slow.opened()
    following.resume(slow.killed(rolled_back))
    waited_for(lambda: not slow.runs())
    following.roll_back()
    assert slow.log == ["old begins", "old begins"] and not following.undo


def test_another_process_with_the_same_id_goes_on() -> None:
    with subprocess.Popen(["sleep", "120"], start_new_session=True) as process:
        known = identity(process.pid)
        assert known is not None
        pid, start = known.split()
        end_command(f"{pid} {int(start) - 1}")
        assert process.poll() is None
        end_command(known)
        assert process.wait(UNTIL_S) == -signal.SIGKILL
    assert identity(process.pid) is None


def test_a_command_of_another_user_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`--restart "sudo ..."`: the daemon did not start while it ran."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "killpg", refused)
    monkeypatch.setattr(commands, "END_S", 0.2)
    with subprocess.Popen(["sleep", "120"]) as process:
        end_command(str(identity(process.pid)))
        assert process.poll() is None and "did not end within" in caplog.text
        process.kill()


def test_a_process_whose_name_has_spaces_and_brackets(tmp_path: Path) -> None:
    (tmp_path / "a) b 1").symlink_to(sys.executable)
    with (
        subprocess.Popen(["sleep", "120"]) as plain,
        subprocess.Popen([tmp_path / "a) b 1", "-c", "input()"], stdin=subprocess.PIPE) as odd,
    ):
        starts = [int(str(identity(process.pid)).split()[1]) for process in (plain, odd)]
        assert 0 <= starts[1] - starts[0] < UNTIL_S * os.sysconf("SC_CLK_TCK")
        plain.kill()
        odd.kill()


def test_a_command_that_lasts_too_long_ends_with_its_children(slow: Slow, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="did not end within 1 s"):
        slow.opened(patience_s=1.0).load("x", tmp_path / "new")
    waited_for(lambda: not slow.runs())
    assert slow.log == ["new begins", "old begins"]


def test_a_full_disk_does_not_stop_a_rollback(slow: Slow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full() -> None:
        raise CacheError("no space is left")

    (tmp_path / "slow").unlink()
    deployment = slow.opened()
    deployment.undo = [["server", slow.server.url, str(tmp_path / "old")]]
    deployment.roll_back(full)
    assert not deployment.undo and slow.log == ["old begins"]
    assert "would not end the command" in caplog.text and "no space is left" in caplog.text


def test_a_command_without_an_identity_is_not_saved(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").unlink()
    monkeypatch.setattr(commands, "identity", lambda pid: None)
    deployment, saved = slow.opened(), list[int]()
    deployment.load("x", tmp_path / "new", lambda: saved.append(len(deployment.undo[-1])))
    assert saved == [3, 3]


def test_a_saved_command_is_read_and_checked() -> None:
    change = ["server", "http://127.0.0.1:1", "old"]
    stage = Stage("retrain", "swap", 1, ("a",), candidates=["x"], verdicts=[{"reason": "", "passed": True}])
    fields = {name: getattr(stage, name) for name in Stage.__dataclass_fields__}
    assert read_stage({**fields, "undo": [[*change, "12 345"]]}).undo[0][3] == "12 345"
    for odd in ("12", "0 1", "../1 2", "12 345 6", None):
        with pytest.raises(ValueError, match="impossible command"):
            read_stage({**fields, "undo": [[*change, odd]]})
