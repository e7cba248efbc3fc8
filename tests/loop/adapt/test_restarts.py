"""What a daemon must not be blind for: servers that are started again, its own end at a bad moment, and clocks that are
set."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from adapt_requests import HOUR
from fake_servers import RESTART, FakeServer, Vllm
from fake_servers import serving as fake_serving
from played import NOW, PASSED, Deciding, Played, events, traffic, watcher

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.loop.adapt import run as adapt_run
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
    WatchConfig,
)
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.gate.retrain import Job
from paceline.loop.adapt.log import AdaptLog, event_line, rebuilt
from paceline.loop.adapt.run import Clock
from paceline.loop.adapt.servers.counted_hours import ALL
from paceline.loop.adapt.servers.counters import Counts, Meter, Reading
from paceline.loop.adapt.servers.vllm_sglang import restart as restarted
from paceline.loop.adapt.watch import Watcher

DAY_S = 86400.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts is asked often whether it is ready."""
    monkeypatch.setattr(restarted, "POLL_S", 0.02)


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with fake_serving(Vllm()) as fake:
        fake.count(rounds=40_000, accepted=80_000, tokens=120_000, errors=600, ended=9400)
        yield fake  # pyright: ignore[reportReturnType]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_serving(FakeServer()) as fake:
        fake.count(rounds=1000, accepted=1000, tokens=2000)
        yield fake


def beside_vllm(folder: Path, vllm: Vllm, incumbent: str, *ends: tuple[int, Any]) -> Watcher:
    (folder / "restart.py").write_text(RESTART)
    deploy = {"engine": "vllm", "restart": f"{sys.executable} {folder / 'restart.py'}"}
    policy = Deciding(Decision("retrain", (ALL,), why="it fell"))
    one = watcher(folder, vllm, Played(*ends), policy=policy, candidate=CandidateConfig(incumbent), deploy=deploy)
    one._next = HOUR
    return one


def swapped(folder: Path, vllm: Vllm) -> Watcher:
    """Trained, gated, and put in by a restart: in probation."""
    traffic(folder, drafted=None, accepted=None, temperature=None, seed=None)
    (folder / "old").mkdir()
    one = beside_vllm(folder, vllm, str(folder / "old"), (0, ""), (0, PASSED))
    for minute in range(4):
        rounds = 40_000 + 6000 * minute
        vllm.count(rounds, 2 * rounds, 3 * rounds, errors=600, ended=9400)
        one.tick(NOW + 60 * minute)
    assert events(one) == ["training", "swapped"] and len(vllm.drafters) == 1
    return one


class TestRestartedServers:
    @pytest.mark.slow
    def test_a_fall_of_acceptance_after_a_restart_is_seen(self, tmp_path: Path, vllm: Vllm) -> None:
        """3.0 tokens a round before, 1.1 of the new process, which has not counted as many rounds as the old one
        had."""
        one = swapped(tmp_path, vllm)
        vllm.count(rounds=2000, accepted=200, tokens=2200, ended=50)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and Path(vllm.drafters[-1]).name == "old"
        assert "1.10 tokens a round by its metrics, 3.00 before" in one.log.lines()[-1]["why"]

    @pytest.mark.slow
    def test_failures_after_a_restart_are_seen(self, tmp_path: Path, vllm: Vllm) -> None:
        """500 of them, where the old process had had 600 in all its life."""
        one = swapped(tmp_path, vllm)
        vllm.count(rounds=2000, accepted=4000, tokens=6000, errors=500, ended=500)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and Path(vllm.drafters[-1]).name == "old"

    @pytest.mark.slow
    def test_few_rounds_before_a_restart_hide_nothing(self, tmp_path: Path, vllm: Vllm) -> None:
        """The first look after it finds more than was counted before: only a reading right after it tells the two
        apart."""
        traffic(tmp_path, drafted=None, accepted=None, temperature=None, seed=None)
        (tmp_path / "old").mkdir()
        one = beside_vllm(tmp_path, vllm, str(tmp_path / "old"), (0, ""), (0, PASSED))
        for minute in range(4):
            vllm.count(rounds=200 * minute, accepted=600 * minute, tokens=800 * minute)
            one.tick(NOW + 60 * minute)
        assert events(one)[-1] == "swapped"
        vllm.count(rounds=800, accepted=1900, tokens=2700)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and "3.38 tokens a round" in one.log.lines()[-1]["why"]

    @pytest.mark.slow
    def test_what_was_counted_before_a_restart_by_others_counts(self, tmp_path: Path, vllm: Vllm) -> None:
        """Of two failures a time, each before another restart of the server; the daemon is started again meanwhile,
        too."""
        one = swapped(tmp_path, vllm)
        for turn in range(1, 5):
            vllm.count(rounds=150, accepted=300, tokens=450, errors=8, ended=2)
            one.tick(NOW + 180 + 60 * turn)
            if events(one)[-1] == "rolled back":
                break
            vllm.count(0, 0, 0, 0, 0)
            one.tick(NOW + 190 + 60 * turn)
            one = beside_vllm(tmp_path, vllm, str(tmp_path / "old"))
        assert events(one)[-1] == "rolled back" and "of 20 requests ended in an error" in one.log.lines()[-1]["why"]

    @pytest.mark.slow
    def test_a_restart_of_daemon_and_server_together_loses_no_rounds(self, tmp_path: Path, vllm: Vllm) -> None:
        """1.1 tokens a round, 150 of them before both were started again, and 150 since."""
        swapped(tmp_path, vllm)
        looking = beside_vllm(tmp_path, vllm, str(tmp_path / "old"))
        vllm.count(rounds=150, accepted=15, tokens=165, ended=5)
        looking.tick(NOW + 240)
        assert events(looking)[-1] == "swapped"
        again = beside_vllm(tmp_path, vllm, str(tmp_path / "old"))
        vllm.count(rounds=100, accepted=10, tokens=110, ended=5)
        again.tick(NOW + 300)
        assert events(again)[-1] == "rolled back" and "1.10 tokens a round" in again.log.lines()[-1]["why"]

    @pytest.mark.slow
    def test_an_empty_page_after_the_restart_is_read_again(self, tmp_path: Path, vllm: Vllm) -> None:
        """Labelled counters appear with traffic: nothing is known of the drafter, and nothing is wrong with it."""
        traffic(tmp_path, drafted=None, accepted=None, temperature=None, seed=None)
        (tmp_path / "old").mkdir()
        one = beside_vllm(tmp_path, vllm, str(tmp_path / "old"), (0, ""), (0, PASSED))
        vllm.is_empty_at_first = True
        for minute in range(4):
            vllm.count(40_000 + 6000 * minute, 80_000 + 12_000 * minute, 120_000 + 18_000 * minute, ended=9400)
            one.tick(NOW + 60 * minute)
        assert events(one) == ["training", "waiting"] and one.stage is not None and one.stage.name == "swap"
        vllm.is_empty_at_first = False
        vllm.count(rounds=10, accepted=20, tokens=30)
        one.tick(NOW + 300)
        assert events(one) == ["training", "waiting", "swapped", "answers"]


def test_a_meter_sums_over_restarts() -> None:
    meter = Meter()
    readings = [Counts(10, 5), Counts(30, 9), Counts(2, 1), Counts(8, 4), Counts(1, 0)]
    assert [meter.read(Reading(each)).tokens for each in readings] == [10, 30, 32, 38, 39]
    again = Meter.of(json.loads(json.dumps(meter.saved())))
    assert again.read(Reading(Counts(3, 1))) == Counts(41, 14)


class TestNothingToGoBackTo:
    def test_the_daemon_refuses_to_begin(self, tmp_path: Path) -> None:
        deploy = DeployConfig("vllm", ("http://127.0.0.1:9",), restart="true")
        parts = (PolicyConfig(), PriceConfig(), CandidateConfig(), RetrainConfig(), deploy, WatchConfig())

        def begun(text: str) -> None:
            raise AssertionError(text)  # it would watch for ever

        with pytest.raises(ConfigError, match=r"nothing could be rolled back: give --incumbent the folder"):
            adapt_run.run(EngineConfig(), StoreConfig(tmp_path / "traces", tmp_path / "state"), *parts, begun)

    def test_nothing_is_put_in(self, tmp_path: Path, vllm: Vllm) -> None:
        """By a library's caller, who may leave the incumbent out."""
        traffic(tmp_path, drafted=None, accepted=None, temperature=None, seed=None)
        one = beside_vllm(tmp_path, vllm, "default", (0, ""), (0, PASSED))
        for minute in range(5):
            one.tick(NOW + 60 * minute)
        assert events(one) == ["training", "failed"] and vllm.drafters == []
        assert "nothing is known to go back to" in one.log.lines()[-1]["why"]

    @pytest.mark.slow
    def test_a_drafter_that_was_kept_is_what_is_given_back_later(self, tmp_path: Path, vllm: Vllm) -> None:
        """Not the one of the command line, which served before it."""
        one = swapped(tmp_path, vllm)
        vllm.count(rounds=2000, accepted=4000, tokens=6000)
        one.tick(NOW + 900)
        assert events(one)[-1] == "kept"
        kept = vllm.drafters[-1]
        Path(kept).mkdir(parents=True)
        again = beside_vllm(tmp_path, vllm, str(tmp_path / "old"), (0, ""), (0, PASSED))
        again._next = HOUR + 1
        for minute in range(4):
            again.tick(NOW + 3600 + 60 * minute)
        assert again.stage is not None and again.stage.undo == [["server", vllm.url, kept]]


@pytest.mark.slow
def test_a_daemon_killed_while_the_server_loads_gives_the_old_drafter_back(tmp_path: Path, server: FakeServer) -> None:
    """The server has taken it, the daemon has not heard so."""

    class Killed(BaseException):
        pass

    traffic(tmp_path)
    one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)))
    for minute in range(3):
        one.tick(NOW + 60 * minute)
    assert one.deployment is not None
    load: Callable[..., None] = one.deployment.load

    def killed(*arguments: Any) -> None:
        load(*arguments)
        raise Killed

    one.deployment.load = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        one.tick(NOW + 180)
    assert server.members != {"general": "default"}
    again = watcher(tmp_path, server, Played())
    again.tick(NOW + 240)
    assert again.stage is not None and again.stage.name == "probation"
    server.count(rounds=3000, accepted=1000, tokens=9000, errors=90)
    again.tick(NOW + 300)
    assert events(again)[-1] == "rolled back" and server.members == {"general": "default"}


@pytest.mark.slow
def test_a_full_disk_loads_nothing_that_could_not_be_taken_back(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic(tmp_path)
    one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)))
    for minute in range(3):
        one.tick(NOW + 60 * minute)
    state = tmp_path / "state"
    os.rename(state / "state.json", state / "kept.json")
    (state / "state.json").mkdir()
    one.tick(NOW + 180)
    assert server.members == {"general": "default"} and one.deployment is not None and one.deployment.undo == []
    (state / "state.json").rmdir()
    one.tick(NOW + 240)
    assert events(one)[-1] == "swapped" and server.members != {"general": "default"}


class TestClocks:
    @pytest.mark.slow
    def test_a_clock_that_ran_ahead_stops_no_decisions(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        one.tick(NOW)
        one.tick(NOW + 30 * DAY_S)
        messages: list[str] = []
        one.say = messages.append
        for hour in range(1, 4):
            one.tick(NOW + 3600 * hour)
        assert any("the clock went back" in each for each in messages)
        assert [line["hour"] for line in one.log.lines()][-2:] == [HOUR + 2, HOUR + 3]

    @pytest.mark.slow
    def test_a_probation_lasts_as_long_as_it_lasts(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)))
        for minute in range(4):
            server.count(rounds=500 * minute, accepted=500 * minute, tokens=1000 * minute)
            one.tick(NOW + 60 * minute)
        server.count(rounds=3000, accepted=3000, tokens=6000)
        clock = Clock(NOW + 180, 0.0)
        for passed, jump in ((60, 30 * DAY_S), (120, 30 * DAY_S), (180, -DAY_S), (540, -DAY_S)):
            if by := clock.moved(NOW + 180 + passed + jump, passed):
                one.clock_moved(by)
            one.tick(NOW + 180 + passed + jump)
            assert events(one)[-1] != "kept"
        one.tick(NOW + 180 + 660 - DAY_S)
        assert "kept" in events(one)

    def test_an_event_of_1970_costs_nothing(self, tmp_path: Path) -> None:
        log, hours = AdaptLog(tmp_path), list[int]()
        log.append(event_line(3, "told"))
        log.append(event_line(HOUR, "refused", clusters=["tickets"]))

        class Noted(SeasonalPolicy):
            def hour(self, number: int, seen: Any) -> Any:
                hours.append(number)
                return super().hour(number, seen)

        rebuilt(Noted(), {}, log, HOUR + 2)
        assert hours == [HOUR, HOUR + 1] and log.num_odd() == 1


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

    @pytest.mark.slow
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

    @pytest.mark.slow
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

    @pytest.mark.slow
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
