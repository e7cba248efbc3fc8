"""Trainings that outlive their daemon: the next one waits for them, takes them up, or ends them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from played import NOW, PASSED, Played, events, traffic, watcher

from paceline.loop.adapt.config import RetrainConfig
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.watch import Watcher

pytestmark = pytest.mark.slow
SLOW = """
import sys
open(sys.argv[1]).read()
print("done")
"""


class TestOrphans:
    """A job outlives the daemon that was killed; the one that follows waits for it, then does the same again."""

    def begun(self, folder: Path) -> list[str]:
        os.mkfifo(folder / "end")
        script = folder / "slow.py"
        script.write_text(SLOW)
        return [sys.executable, str(script), str(folder / "end")]

    def orphan(self, folder: Path, command: list[str]) -> None:
        """Start the job in a daemon that ends at once, without a word to it."""
        if not (daemon := os.fork()):
            try:
                Job(command, folder / "job")
            finally:
                os._exit(9)
        assert os.waitpid(daemon, 0)[0] == daemon

    def test_it_is_waited_for(self, tmp_path: Path) -> None:
        command = self.begun(tmp_path)
        self.orphan(tmp_path, command)
        job = Job(command, tmp_path / "job")
        assert job.is_waiting and job.poll() is None
        with open(tmp_path / "end", "w"):  # both ends open: the orphan reads its end
            pass
        ended = time.monotonic() + 60
        while job.is_waiting and time.monotonic() < ended:
            job.poll()
        assert not job.is_waiting, "its own command runs now"
        with open(tmp_path / "end", "w"):
            pass
        assert job._process is not None and job._process.wait(60) == 0 and job.poll() == 0 and job.last_line == "done"

    def test_a_daemon_that_is_stopped_ends_it(self, tmp_path: Path) -> None:
        command = self.begun(tmp_path)
        self.orphan(tmp_path, command)
        job = Job(command, tmp_path / "job")
        job.stop()
        ended = time.monotonic() + 60
        while job.is_waiting and time.monotonic() < ended:
            job.poll()
        assert not job.is_waiting
        job.stop()


class Training:
    """Trainings that last until they are let go; gates end at once, with a verdict that passed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rates, self.gates = folder, list[str](), Played((0, PASSED), (0, PASSED))

    def __call__(self, command: list[str], log: Path) -> Job:
        if "train" not in command:
            return self.gates(command, log)
        rate = command[command.index("--lr") + 1]
        self.rates.append(rate)
        return Job([sys.executable, "-c", LASTING, str(self.folder / rate), str(self.folder / "begun")], log)

    @property
    def begun(self) -> list[str]:
        """The rate of each training that has begun, also of a daemon that was killed."""
        file = self.folder / "begun"
        return [Path(line).name for line in file.read_text().splitlines()] if file.exists() else []

    def let_go(self, rate: str) -> None:
        """Ends the training under way; waits until it has begun."""
        with open(self.folder / rate, "w"):
            pass


LASTING = """
import signal, sys
signal.alarm(300)
open(sys.argv[2], "a").write(sys.argv[1] + "\\n")
open(sys.argv[1]).read()
"""


class TestOrphansOfAWatcher:
    """A daemon that was killed while it trained, and the next one, which meets its training."""

    def killed(self, folder: Path, rates: tuple[float, ...]) -> Training:
        """Run a daemon in a process of its own until its first training has begun, and end it without a word."""
        traffic(folder)
        for rate in rates:
            os.mkfifo(folder / f"{rate:g}")
        training = Training(folder)
        if not (daemon := os.fork()):
            try:
                self.begun_again(folder, training, rates).tick(NOW)
            finally:
                os._exit(9)
        assert os.waitpid(daemon, 0)[0] == daemon
        return training

    def begun_again(self, folder: Path, training: Training, rates: tuple[float, ...]) -> Watcher:
        return watcher(folder, None, cast(Any, training), retrain=RetrainConfig(learning_rates=rates))

    def ticked_until(self, one: Watcher, is_over: Callable[[], bool]) -> None:
        ended, at = time.monotonic() + 60, 0
        while not is_over():
            assert time.monotonic() < ended, events(one)
            at += 1
            one.tick(NOW + 60 + at * 1e-3)

    @pytest.mark.parametrize("rates", [(1e-4,), (1e-4, 3e-4)], ids=["one rate", "two rates"])
    def test_it_is_waited_for_and_taken_up(self, tmp_path: Path, rates: tuple[float, ...]) -> None:
        """Nothing is refused for it, and no second rate is trained while it goes on."""
        training, names = self.killed(tmp_path, rates), [f"{each:g}" for each in rates]
        one, messages = self.begun_again(tmp_path, training, rates), list[str]()
        one.say = messages.append
        for minute in range(1, 6):
            one.tick(NOW + 60 * minute)
        assert one.stage is not None and (one.stage.name, one.stage.at, one.stage.verdicts) == ("training", 0, [])
        assert events(one) == ["training"] and training.rates == ["0.0001"]
        assert [each for each in messages if "of an earlier daemon goes on here" in each]
        training.let_go("0.0001")
        self.ticked_until(one, lambda: one._job is not None and not one._job.is_waiting)
        assert events(one) == ["training"] and one.stage.at == 0, "the same training is run once more"
        for at, rate in enumerate(names):
            self.ticked_until(one, lambda at=at: len(training.begun) == at + 2)
            training.let_go(rate)
        self.ticked_until(one, lambda: one.stage is None)
        assert training.begun == ["0.0001", *names] and training.rates == names
        assert [event for event in events(one) if event != "training"] == ["refused"]
        assert "no server was named" in one.log.lines()[-1]["why"], "all that is refused: there is nothing to put it in"
