"""A drafter on several servers: one first, judged against the others over the same time, then the rest, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapt_requests import HOUR
from fake_servers import Vllm, counted, restarting
from played import NOW, PASSED, Deciding, Played, events, traffic, watcher

from paceline.errors import CacheError, DeployError, UnreachableError
from paceline.loop.adapt.config import CandidateConfig, DeployConfig, WatchConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.rollout.stage import Stage
from paceline.loop.adapt.servers.counted_hours import ALL
from paceline.loop.adapt.servers.counters import Counts
from paceline.loop.adapt.servers.deploy import open_deployment
from paceline.loop.adapt.servers.deployment import Deployment
from paceline.loop.adapt.watch import Watcher

pytestmark = pytest.mark.usefixtures("often")


def drafters(three: list[Vllm]) -> list[list[str]]:
    """Names of the folders that each server was restarted with."""
    return [["old" if name.endswith("old") else "new" for name in server.drafters] for server in three]


def opened(folder: Path, three: list[Vllm], **changes: Any) -> Deployment:
    (folder / "old").mkdir(exist_ok=True)
    config = DeployConfig("vllm", tuple(server.url for server in three), restart=restarting(folder), **changes)
    return open_deployment(config, folder / "old")


class TestDeployment:
    @pytest.mark.slow
    def test_one_first_then_the_others_and_back_the_same_way(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment, saved = opened(tmp_path, three), list[int]()

        def save() -> None:
            saved.append(len(deployment.undo))

        deployment.load("drafter", tmp_path / "new", save)
        assert drafters(three) == [["new"], [], []] and saved == [1, 1]
        deployment.load_others("drafter", tmp_path / "new", save)
        assert drafters(three) == [["new"], ["new"], ["new"]]
        assert saved == [1, 1, 2, 2, 3, 3], "saved before each change, and again when its command runs"
        deployment.roll_back()
        assert drafters(three) == [["new", "old"]] * 3 and deployment.undo == []

    @pytest.mark.slow
    def test_only_those_that_have_it_are_given_the_old_one(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment = opened(tmp_path, three)
        deployment.load("drafter", tmp_path / "new")
        deployment.roll_back()
        assert drafters(three) == [["new", "old"], [], []]

    @pytest.mark.slow
    def test_a_server_that_cannot_get_it_is_left_as_it_was(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment = opened(tmp_path, three)
        deployment.load("drafter", tmp_path / "new")
        replace_one = deployment._replace  # type: ignore[attr-defined]

        def fails(client: Any, folder: Path) -> None:
            replace_one(client, folder)
            if client.url == three[2].url and folder.name == "new":
                raise DeployError("out of memory")

        deployment._replace = fails  # type: ignore[attr-defined]
        with pytest.raises(DeployError, match="out of memory"):
            deployment.load_others("drafter", tmp_path / "new")
        assert drafters(three) == [["new"], ["new"], ["new", "old"]]
        assert [url for _, url, _ in deployment.undo] == [three[0].url, three[1].url]

    @pytest.mark.slow
    def test_a_second_try_begins_where_the_first_one_ended(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment = opened(tmp_path, three)
        deployment.load("drafter", tmp_path / "new")
        replace_one = deployment._replace  # type: ignore[attr-defined]

        def silent(client: Any, folder: Path) -> None:
            replace_one(client, folder)
            if client.url == three[2].url:
                raise UnreachableError("the answer was lost")

        deployment._replace = silent  # type: ignore[attr-defined]
        with pytest.raises(UnreachableError):
            deployment.load_others("drafter", tmp_path / "new")
        deployment._replace = replace_one  # type: ignore[attr-defined]
        deployment.load_others("drafter", tmp_path / "new")
        assert drafters(three) == [["new"], ["new"], ["new", "new"]]

    @pytest.mark.slow
    def test_a_full_disk_restarts_no_server(self, tmp_path: Path, three: list[Vllm]) -> None:
        def full() -> None:
            raise CacheError("no space left")

        deployment = opened(tmp_path, three)
        with pytest.raises(CacheError):
            deployment.load("drafter", tmp_path / "new", full)
        assert drafters(three) == [[], [], []] and deployment.undo == []
        deployment.load("drafter", tmp_path / "new")
        with pytest.raises(CacheError):
            deployment.load_others("drafter", tmp_path / "new", full)
        assert drafters(three) == [["new"], [], []] and len(deployment.undo) == 1

    def test_another_server_that_is_down_is_not_the_canarys_fault(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment = opened(tmp_path, three)
        before = deployment.counts()
        deployment.undo = [["server", three[0].url, str(tmp_path / "old")]]  # the canary alone has the new drafter
        three[1].is_away = three[2].is_away = True
        three[0].count(rounds=40_100, accepted=80_300, tokens=120_400, ended=9401)
        assert deployment.is_well() and deployment.counts().rounds - before.rounds == 100
        three[0].is_away, three[1].is_away = True, False
        for call in (deployment.is_well, deployment.counts):
            with pytest.raises(UnreachableError, match=three[0].url):
                call()
        three[0].is_away = False
        deployment.undo = []
        for call in (deployment.is_well, deployment.counts):
            with pytest.raises(UnreachableError, match=three[2].url):
                call()

    def test_counts_of_the_first_and_of_the_others(self, tmp_path: Path, three: list[Vllm]) -> None:
        deployment = opened(tmp_path, three)
        before = deployment.counts()
        three[0].count(rounds=40_100, accepted=80_300, tokens=120_400, ended=9401)
        three[1].count(rounds=40_010, accepted=80_010, tokens=120_020, ended=9401)
        after = deployment.counts()
        first, others = deployment.counts_apart() or (Counts(), Counts())
        assert (first.rounds, others.rounds) == (40_100, 80_010)
        assert (after.rounds - before.rounds, first.rounds + others.rounds) == (110, after.rounds)
        assert opened(tmp_path, three[:1]).counts_apart() is None


class TestEvidence:
    """A canary's figures compared with those of the others."""

    def stage(self, canary: Counts, others: Counts) -> Stage:
        stage = Stage("retrain", "probation", HOUR, (ALL,))
        stage.begin_counting(Counts(), NOW, (Counts(), Counts()))
        stage.look_apart((canary, others))
        return stage

    @pytest.mark.parametrize(
        ("canary", "others", "words"),
        [
            (
                Counts(rounds=1000, accepted=1000, requests=50),
                Counts(rounds=2000, accepted=4000, requests=100),
                "2.00 tokens a round on the canary",
            ),
            (Counts(rounds=1000, accepted=2100), Counts(rounds=2000, accepted=4000), None),
            (Counts(1, 10000, 19600, requests=10**6), Counts(1, 20000, 40000, requests=10**6), None),  # less than 5%
            (
                Counts(rounds=1000, accepted=1000, requests=2),
                Counts(rounds=2000, accepted=4000, requests=4),
                None,
            ),  # by chance
            (Counts(rounds=150, accepted=0), Counts(rounds=2000, accepted=4000), None),  # too few
            (Counts(rounds=1000, accepted=0), Counts(rounds=150, accepted=300), None),  # nothing to compare with
            (Counts(errors=20, requests=40), Counts(errors=1, requests=4000), "20 of 40 requests ended in an error"),
            (Counts(errors=20, requests=40), Counts(errors=900, requests=2000), None),  # as many elsewhere
        ],
    )
    def test_it_is_compared_with_the_others_at_the_same_time(
        self, canary: Counts, others: Counts, words: str | None
    ) -> None:
        fault = self.stage(canary, others).fault_of_canary(WatchConfig())
        assert fault is None if words is None else words in (fault or "") and "on the other servers" in (fault or "")

    @pytest.mark.parametrize(("mean", "is_worse"), [(3.0, False), (1.8, True)])
    def test_an_equal_drafter_is_seldom_taken_back(self, mean: float, is_worse: bool) -> None:
        """Thirty probations of sixty looks; requests differ by more than their rounds do. A fall of 40% is found within
        ten minutes."""
        draw, taken_back = np.random.default_rng(0), 0
        for _ in range(30):
            stage, counts = self.stage(Counts(), Counts()), [Counts(), Counts()]
            for _ in range(10 if is_worse else 60):
                for at, length in enumerate((mean, 3.0)):
                    rounds = draw.integers(20, 80, 10)
                    accepted = (rounds * (length * np.exp(draw.normal(0, 0.3, 10)) - 1)).clip(0)
                    counts[at] += Counts(0, float(rounds.sum()), float(accepted.sum()), requests=10)
                stage.look_apart((counts[0], counts[1]))
                if stage.fault_of_canary(WatchConfig()):
                    taken_back += 1
                    break
        assert taken_back >= 28 if is_worse else taken_back <= 2

    def test_both_sides_need_rounds(self) -> None:
        config = WatchConfig(probation_minutes=10.0)
        stage = self.stage(Counts(rounds=1000, accepted=1000), Counts(rounds=150, accepted=150))
        assert stage.is_over(NOW + 700, config, None) is None
        assert stage.is_over(NOW + 86400, config, None) == "unproven"
        stage.look_apart((Counts(rounds=1000, accepted=1000), Counts(rounds=250, accepted=250)))
        assert stage.is_over(NOW + 700, config, None) == "proven"


def beside(folder: Path, three: list[Vllm], *ends: tuple[int, Any]) -> Watcher:
    (folder / "old").mkdir(exist_ok=True)
    servers = tuple(server.url for server in three)
    deploy = {"engine": "vllm", "restart": restarting(folder), "servers": servers}
    policy = Deciding(Decision("retrain", (ALL,), why="it fell"))
    incumbent = CandidateConfig(str(folder / "old"))
    one = watcher(folder, three[0], Played(*ends), policy=policy, candidate=incumbent, deploy=deploy)
    one._next = HOUR
    return one


def since(three: list[Vllm], canary: tuple[int, int], others: tuple[int, int]) -> None:
    """Rounds and accepted drafts since the canary was restarted: of it, and of each of the others."""
    three[0].count(*canary, sum(canary), ended=canary[0] // 20)
    for server in three[1:]:
        rounds, accepted = 51_500 + others[0], 103_000 + others[1]
        server.count(rounds, accepted, rounds + accepted, ended=2060 + others[0] // 20)


def on_canary(folder: Path, three: list[Vllm]) -> Watcher:
    """Trained, gated, and on the first server."""
    traffic(folder, drafted=None, accepted=None, temperature=None, seed=None)
    one = beside(folder, three, (0, ""), (0, PASSED))
    for minute in range(4):
        counted(three, 100 + minute, 2, 2, 2)
        one.tick(NOW + 60 * minute)
    assert events(one) == ["training", "swapped"] and drafters(three) == [["new"], [], []]
    return one


@pytest.mark.slow
class TestDaemon:
    def test_a_good_canary_goes_to_the_others(self, tmp_path: Path, three: list[Vllm]) -> None:
        one = on_canary(tmp_path, three)
        for minute in range(1, 13):
            since(three, (500 * minute, 1500 * minute), (500 * minute, 500 * minute))
            if minute < 10:
                assert drafters(three) == [["new"], [], []]
            one.tick(NOW + 180 + 60 * minute)
        assert events(one) == ["training", "swapped", "spread", "kept"] and drafters(three) == [["new"]] * 3
        assert "4.00 tokens a round in" in one.log.lines()[-1]["why"]
        assert "2.00 tokens a round on the other servers" in one.log.lines()[-1]["why"]
        assert one.lineage.entries()[-1]["state"] == "serving" and one.stage is None

    def test_a_fall_of_all_servers_is_not_the_canarys(self, tmp_path: Path, three: list[Vllm]) -> None:
        """Other traffic since the swap: 3.0 tokens a round before, 1.5 everywhere now."""
        one = on_canary(tmp_path, three)
        since(three, (2000, 1000), (2000, 1000))
        one.tick(NOW + 240)
        assert events(one)[-1] == "swapped"

    def test_a_bad_canary_is_taken_back_alone(self, tmp_path: Path, three: list[Vllm]) -> None:
        one = on_canary(tmp_path, three)
        since(three, (2000, 200), (2000, 4000))
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and drafters(three) == [["new", "old"], [], []]
        assert "on the canary" in one.log.lines()[-1]["why"] and one.lineage.entries()[-1]["state"] == "rolled back"

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_daemon_killed_at_any_server_goes_on_there(self, tmp_path: Path, three: list[Vllm], number: int) -> None:
        """The server has the new drafter, the daemon has not heard so."""

        class Killed(BaseException):
            pass

        one = on_canary(tmp_path, three)
        deployment: Any = one.deployment
        replace_one = deployment._replace

        def killed(client: Any, folder: Path) -> None:
            replace_one(client, folder)
            if client.url == three[number].url:
                raise Killed

        deployment._replace = killed
        since(three, (2000, 4000), (2000, 4000))
        with pytest.raises(Killed):
            one.tick(NOW + 900)
        state = json.loads((tmp_path / "state" / "state.json").read_text())["stage"]
        assert state["name"] == "spread" and len(state["undo"]) == number + 1
        again = beside(tmp_path, three)
        again.tick(NOW + 960)
        assert events(again)[-1] == "kept" and [names[-1] for names in drafters(three)] == ["new"] * 3
        assert drafters(three)[0] == ["new"], "the canary is left alone"
        if number == 2:
            assert drafters(three)[1] == ["new"], "so is the server that had it for sure"

    def test_a_daemon_killed_in_the_canarys_restart_judges_it(self, tmp_path: Path, three: list[Vllm]) -> None:
        on_canary(tmp_path, three)
        again = beside(tmp_path, three)
        assert again.stage is not None and again.stage.others
        since(three, (2000, 200), (2000, 4000))
        again.tick(NOW + 240)
        assert events(again)[-1] == "rolled back" and drafters(three) == [["new", "old"], [], []]

    def test_a_server_that_cannot_get_it_takes_it_from_all(self, tmp_path: Path, three: list[Vllm]) -> None:
        one = on_canary(tmp_path, three)
        three[2].refuses["/restart"] = 500, {}
        three[2].answer = lambda method, path, body: (
            (500, "{}")
            if path == "/restart"
            else Vllm.answer(  # type: ignore[method-assign]
                three[2], method, path, body
            )
        )
        since(three, (2000, 4000), (2000, 4000))
        one.tick(NOW + 900)
        assert one.stage is not None and one.stage.name == "undo", "the old one could not be given back there yet"
        three[2].answer = lambda method, path, body: Vllm.answer(three[2], method, path, body)  # type: ignore[method-assign]
        one.tick(NOW + 2000)
        assert "rolled back" in events(one) and [names[-1] for names in drafters(three)] == ["old"] * 3
        assert one.lineage.entries()[-1]["state"] == "unproven"

    def test_a_canary_that_dies_is_taken_back(self, tmp_path: Path, three: list[Vllm]) -> None:
        one = on_canary(tmp_path, three)
        three[0].is_away = True
        for minute in range(4, 20):
            one.tick(NOW + 60 * minute)
        assert one.stage is not None and one.stage.name == "undo"
        three[0].is_away = False
        one.tick(NOW + 4 * 3600)
        assert "rolled back" in events(one) and drafters(three) == [["new", "old"], [], []]
