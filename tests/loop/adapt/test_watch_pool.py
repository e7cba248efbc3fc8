"""The daemon with a pool of drafters: a cluster goes to another member, a second one is trained and added.
Beside a server that only looks like one; `test_real_pool.py` has the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from adapt_requests import HOUR
from fake_servers import FakeServer
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher

from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.decide.decide import Alarm, Decision, View, decide
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.rollout.stage import Stage
from paceline.loop.adapt.watch import Watcher
from paceline.plan.clusters import label

TICKETS = label("tag:tickets")


@pytest.mark.slow
class TestRoute:
    def scored(self, folder: Path, server: FakeServer, *verdicts: dict[str, Any], **changes: Any) -> Watcher:
        """A pool of three; what the other two would do was asked for, and the cluster then goes to "old"."""
        traffic(folder)
        server.members |= {"old": "runs/old", "new": "runs/new"}
        decisions = Decision("score", ("tickets",)), Decision("route", ("tickets",), "old", "it is good enough")
        jobs = Played(*((0 if verdict["passed"] else 3, verdict) for verdict in verdicts))
        one = watcher(folder, server, jobs, policy=Deciding(*decisions), **changes)
        ticked(one, 0)
        assert events(one) == ["scored"] and one.stage is None
        assert [command[command.index("gate") + 1] for command in jobs.commands] == ["runs/old", "runs/new"]
        return one

    REFUSED: ClassVar[dict[str, Any]] = {"passed": False, "reason": "it may be none", "gains": {}}

    def test_members_are_judged_and_a_cluster_goes_to_one(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.scored(tmp_path, server, PASSED, self.REFUSED)
        jobs = cast(Played, one.start)
        assert "--most-loss" in jobs.commands[0] and "--ood" not in jobs.commands[0]
        assert jobs.commands[0][jobs.commands[0].index("--shares") + 1] == "1", "a member is judged as it is"
        usual = one.policy.clusters["tickets"].last_day.tokens_per_round
        assert one._scores("tickets") == {"old": pytest.approx(2 * usual)}  # those that were refused are no choice
        ticked(one, 1, 1)
        assert events(one)[-1] == "routed" and server.clusters == {"tickets": "old"}
        [entry] = one.lineage.entries()
        assert (entry["drafter"], entry["state"], entry["member"]) == ("runs/old", "routed", "old") and entry[
            "gate"
        ] == PASSED
        server.count(rounds=3000, accepted=3000, tokens=6000)
        ticked(one, 2, 1)
        assert events(one)[-1] == "kept" and server.clusters == {"tickets": "old"} and one.incumbent == "default"

    def test_it_is_taken_back_when_acceptance_falls(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.scored(tmp_path, server, PASSED, PASSED)
        server.count(rounds=2000, accepted=2000, tokens=4000)
        ticked(one, 1, 1)
        server.count(rounds=3000, accepted=2100, tokens=5100)
        one.tick(NOW + 3660)
        assert events(one)[-1] == "rolled back" and server.clusters == {"tickets": None}
        assert set(server.members) == {"general", "old", "new"} and not server.drained
        assert one.lineage.entries()[-1]["state"] == "routed back"
        assert list(one._scored["tickets"]["members"]) == ["new"], "it is not sent there again"

    def test_a_daemon_that_was_stopped_takes_it_back_too(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.scored(tmp_path, server, PASSED, PASSED)
        ticked(one, 1, 1)
        again = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        server.is_well = False
        again.tick(NOW + 3660)
        assert events(again)[-1] == "rolled back" and server.clusters == {"tickets": None}

    def test_scores_are_asked_for_once_an_alarm(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.scored(tmp_path, server, self.REFUSED, self.REFUSED)
        assert one._scores("tickets") == {}
        one.policy.clusters["tickets"].series.raised_at = HOUR + 5
        assert one._scores("tickets") is None
        server.clusters.clear()
        assert one._scores("tickets") == {}, "a server that does not route cannot be asked to"

    def test_a_member_that_is_gone_is_told(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.scored(tmp_path, server, PASSED, PASSED)
        server.clusters.clear()
        ticked(one, 1, 1)
        assert events(one)[-1] == "reported" and "not done" in one.log.lines()[-1]["why"] and one.stage is None


class TestPropose:
    def proposed(self, folder: Path, server: FakeServer, *ends: tuple[int, Any]) -> Watcher:
        traffic(folder)
        one = watcher(
            folder, server, Played(*ends), policy=Deciding(Decision("propose", ("tickets",), why="it returns"))
        )
        ticked(one, 0, 5)
        return one

    @pytest.mark.slow
    def test_a_second_member_is_trained_and_added(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.proposed(tmp_path, server, (0, ""), (0, PASSED))
        assert events(one) == ["training", "swapped"]
        [entry] = one.lineage.entries()
        (name,) = set(server.members) - {"general"}
        assert server.members == {"general": "default", name: entry["drafter"]} and name.startswith("tickets-")
        assert server.clusters == {"tickets": name}
        assert entry["parents"] == ["default"] and entry["state"] == "serving" and entry["window"]["requests"] > 50
        jobs = cast(Played, one.start)
        assert "train" in jobs.commands[0] and "gate" in jobs.commands[1] and "--ood" not in jobs.commands[1]
        server.count(rounds=3000, accepted=7000, tokens=9000)
        one.tick(NOW + 60 * 30)
        assert events(one)[-1] == "kept" and one.incumbent == "default" and name in server.members

    @pytest.mark.slow
    def test_a_cluster_with_a_member_of_its_own_has_that_retrained(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        server.members["mine"], server.clusters["tickets"] = "runs/mine", "mine"
        jobs = Played((0, ""), (0, PASSED))
        one = watcher(tmp_path, server, jobs, policy=Deciding(Decision("retrain", ("tickets",))))
        ticked(one, 0, 5)
        [entry] = one.lineage.entries()
        assert server.members == {"general": "default", "mine": entry["drafter"]} and entry["parents"] == ["runs/mine"]
        assert jobs.commands[0][jobs.commands[0].index("--init") + 1] == "runs/mine"
        server.count(rounds=3000, accepted=3000, tokens=6000)
        one.tick(NOW + 60 * 30)
        assert events(one)[-1] == "kept" and one.incumbent == "default"

    @pytest.mark.slow
    def test_it_leaves_again_when_acceptance_falls(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.proposed(tmp_path, server, (0, ""), (0, PASSED))
        server.is_well = False
        one.tick(NOW + 400)
        assert events(one)[-1] == "rolled back" and server.clusters == {"tickets": None}
        server.is_well = True
        one.tick(NOW + 460)
        assert server.members == {"general": "default"}, "its memory is free"

    @pytest.mark.slow
    def test_a_refused_one_never_reaches_the_server(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.proposed(tmp_path, server, (0, ""), (3, TestRoute.REFUSED))
        assert events(one) == ["training", "refused"] and server.members == {"general": "default"}

    @pytest.mark.slow
    def test_a_server_that_loads_it_but_does_not_route_to_it(self, tmp_path: Path, server: FakeServer) -> None:
        """Nothing has judged its weights: they are not turned away when they come again."""
        server.refuses["/admin/clusters/tickets"] = 500, {}
        one = self.proposed(tmp_path, server, (0, ""), (0, PASSED))
        assert events(one) == ["training", "failed"] and server.members == {"general": "default"} and one.stage is None
        assert one.lineage.entries()[-1]["state"] == "passed" and not one.policy.is_training

    @pytest.mark.slow
    def test_a_restarted_server_that_knows_no_requests_yet(self, tmp_path: Path, server: FakeServer) -> None:
        one = self.proposed(tmp_path, server, (0, ""), (0, PASSED))
        server.is_well = False
        one.tick(NOW + 400)  # it is taken back
        [entry] = one.lineage.entries()
        one.stage = Stage("route", "swap", HOUR, ("tickets",), "general", drafter=entry["drafter"])
        one.lineage.mark(entry["drafter"], "serving", "as if it had stayed")
        server.is_well = True
        server.clusters.clear()
        one.tick(NOW + 460)
        assert events(one)[-1] == "reported" and "knows no requests" in one.log.lines()[-1]["why"]
        assert one.lineage.entries()[-1]["state"] == "passed"

    def test_without_a_server_that_routes_it_is_told(self, tmp_path: Path, server: FakeServer) -> None:
        server.clusters.clear()
        one = self.proposed(tmp_path, server)
        assert events(one) == ["reported"] and "--route auto" in one.log.lines()[-1]["why"]

    @pytest.mark.parametrize("is_saved", [False, True])
    def test_a_proposal_is_not_lost_when_the_daemon_is_killed(
        self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, is_saved: bool
    ) -> None:
        """Killed between log and state, it had been proposed for ever, and nothing trained."""

        class Killed(BaseException):
            """Stands for SIGKILL."""

        def killed(self: Watcher, now: float) -> None:
            raise Killed

        traffic(tmp_path)
        one = watcher(tmp_path, server, Played(), policy=Deciding(Decision("propose", ("tickets",))))
        monkeypatch.setattr(Watcher, "_advance" if is_saved else "_look", killed)
        with pytest.raises(Killed):
            one.tick(NOW)
        assert events(one) == ["training"] and one.policy.proposed == {"tickets"}
        monkeypatch.undo()
        again = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        again._next = None
        again._hours(NOW)
        assert again.policy.proposed == ({"tickets"} if is_saved else set())
        assert again.policy.is_training == (again.stage is not None) == is_saved

    @pytest.mark.slow
    def test_what_comes_while_another_runs_is_decided_again(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        decisions = Decision("retrain", ("tickets",)), Decision("propose", ("tickets",))
        one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)), policy=Deciding(*decisions))
        ticked(one, 0, 5)
        one.watch = WatchConfig(probation_minutes=600.0)
        ticked(one, 1, 1)
        assert events(one) == ["training", "swapped"] and not one.policy.proposed


def test_the_policy_asks_before_it_routes() -> None:
    policy, alarm = SeasonalPolicy(), Alarm("tickets", 0.3, 2.1, 60_000, None)
    decision = decide(View(1, [alarm]), policy.config, policy.prices)
    assert (decision.action, decision.clusters) == ("score", ("tickets",))
