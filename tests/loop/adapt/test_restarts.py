"""A daemon notices servers that are started again, its own end at a bad moment, and clocks that are set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapt_requests import HOUR
from fake_servers import FakeServer, Vllm, restarting
from fake_servers import serving as fake_serving
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher

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
from paceline.loop.adapt.log import AdaptLog, event_line, rebuilt
from paceline.loop.adapt.run import Clock
from paceline.loop.adapt.servers.counted_hours import ALL
from paceline.loop.adapt.servers.counters import Counts, Meter, Reading
from paceline.loop.adapt.watch import Watcher

DAY_S = 86400.0


pytestmark = pytest.mark.usefixtures("often")


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with fake_serving(Vllm()) as fake:
        fake.count(rounds=40_000, accepted=80_000, tokens=120_000, errors=600, ended=9400)
        yield fake  # pyright: ignore[reportReturnType]


def beside_vllm(folder: Path, vllm: Vllm, incumbent: str, *ends: tuple[int, Any]) -> Watcher:
    deploy = {"engine": "vllm", "restart": restarting(folder)}
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


@pytest.mark.slow
class TestRestartedServers:
    def test_a_fall_of_acceptance_after_a_restart_is_seen(self, tmp_path: Path, vllm: Vllm) -> None:
        """3.0 tokens a round before, 1.1 of the new process, which has not counted as many rounds as the old one
        had."""
        one = swapped(tmp_path, vllm)
        vllm.count(rounds=2000, accepted=200, tokens=2200, ended=50)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and Path(vllm.drafters[-1]).name == "old"
        assert "1.10 tokens a round by its metrics, 3.00 before" in one.log.lines()[-1]["why"]

    def test_failures_after_a_restart_are_seen(self, tmp_path: Path, vllm: Vllm) -> None:
        """500 of them, where the old process had had 600 in all its life."""
        one = swapped(tmp_path, vllm)
        vllm.count(rounds=2000, accepted=4000, tokens=6000, errors=500, ended=500)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and Path(vllm.drafters[-1]).name == "old"

    def test_few_rounds_before_a_restart_hide_nothing(self, tmp_path: Path, vllm: Vllm) -> None:
        """The first look after it finds more than was counted before: only a reading right after it tells the two
        apart."""
        traffic(tmp_path, drafted=None, accepted=None, temperature=None, seed=None)
        (tmp_path / "old").mkdir()
        one = beside_vllm(tmp_path, vllm, str(tmp_path / "old"), (0, ""), (0, PASSED))
        for minute in range(4):
            vllm.count(200 * minute, 600 * minute, 800 * minute, ended=200 * minute)
            one.tick(NOW + 60 * minute)
        assert events(one)[-1] == "swapped"
        vllm.count(rounds=800, accepted=1900, tokens=2700, ended=800)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and "3.38 tokens a round" in one.log.lines()[-1]["why"]

    def test_what_was_counted_before_a_restart_by_others_counts(self, tmp_path: Path, vllm: Vllm) -> None:
        """Counts two failures before each restart of the server; the daemon is started again meanwhile, too."""
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
        ticked(one, 0, 5)
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
        ticked(again, 1, 4)
        assert again.stage is not None and again.stage.undo == [["server", vllm.url, kept]]


@pytest.mark.slow
def test_a_daemon_killed_while_the_server_loads_gives_the_old_drafter_back(tmp_path: Path, server: FakeServer) -> None:
    """The server has taken it, the daemon has not heard so."""

    class Killed(BaseException):
        pass

    traffic(tmp_path)
    one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)))
    ticked(one, 0, 3)
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
    ticked(one, 0, 3)
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
        log.append(event_line(3, "reported"))
        log.append(event_line(HOUR, "refused", clusters=["tickets"]))

        class Noted(SeasonalPolicy):
            def hour(self, number: int, seen: Any) -> Any:
                hours.append(number)
                return super().hour(number, seen)

        rebuilt(Noted(), {}, log, HOUR + 2)
        assert hours == [HOUR, HOUR + 1] and log.num_odd() == 1
