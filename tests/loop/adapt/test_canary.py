"""A canary is judged by evidence: one failure, a silent server, no traffic, somebody's hands and a full disk beside it.

On a virtual clock, beside a server that only looks like one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from canaries import begun, is_condemned, swapped, why
from fake_servers import FakeServer
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher

from paceline.errors import CacheError, ConfigError
from paceline.loop.adapt import log
from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.decide.policy import SeasonalPolicy
from paceline.loop.adapt.gate import lineage
from paceline.loop.adapt.rollout.evidence import Failures, more_failures

DAY_S = 24 * 3600


class TestFailures:
    @pytest.mark.parametrize(
        ("before", "now", "is_wrong"),
        [
            ((0, 1_000_000), (1, 20), False),
            ((0, 1_000_000), (2, 40), False),
            ((0, 9000), (9, 40), True),
            ((0, 0), (1, 1), False),
            ((0, 0), (3, 20), False),
            ((0, 0), (15, 20), True),
            ((0, 9000), (15, 15), False),  # too few to say
            ((900, 9000), (4, 40), False),  # as usual there
            ((900, 9000), (20, 40), True),
            ((0, 9_000_000), (900, 90_000), False),  # certain, but no more than is allowed
        ],
    )
    def test_shares_are_compared(self, before: tuple[int, int], now: tuple[int, int], is_wrong: bool) -> None:
        assert (more_failures(Failures(*before), Failures(*now), 0.02) is not None) is is_wrong

    @pytest.mark.slow
    def test_one_failed_request_condemns_nothing(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=3000, accepted=3000, tokens=6000, errors=1, ended=199)
        one.tick(NOW + 240)
        assert events(one)[-1] == "swapped"
        one.tick(NOW + 900)
        assert events(one)[-1] == "kept" and not is_condemned(one)

    @pytest.mark.slow
    def test_many_do(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=3000, accepted=3000, tokens=6000, errors=30, ended=155)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and is_condemned(one)
        assert why(one) == "30 of 60 requests ended in an error, 0.00% before"

    @pytest.mark.slow
    def test_as_many_as_before_do_not(self, tmp_path: Path, server: FakeServer) -> None:
        """A server whose clients send what fails in every tenth request, also after the swap."""
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)))
        for minute in range(4):
            failed, ended = 100 * minute, 900 * minute
            server.count(rounds=1000 + 500 * minute, accepted=1000, tokens=2000, errors=failed, ended=ended)
            one.tick(NOW + 60 * minute)
        server.count(rounds=2600, accepted=1100, tokens=2200, errors=310, ended=2790)
        one.tick(NOW + 240)
        assert events(one)[-1] == "swapped"
        server.count(rounds=2600, accepted=1100, tokens=2200, errors=360, ended=2840)
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and "10.00% before" in why(one)


class TestTraffic:
    @pytest.mark.slow
    def test_without_any_nothing_is_proven(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        for hour in range(24):
            one.tick(NOW + 3600 * hour + 900)
        assert events(one)[-1] == "swapped"
        one.tick(NOW + DAY_S + 900)
        assert events(one)[-1] == "rolled back" and server.members == {"general": "default"}
        assert "not enough traffic" in why(one) and "0 rounds in" in why(one)
        assert one.lineage.entries()[-1]["state"] == "unproven" and not is_condemned(one)

    @pytest.mark.slow
    def test_it_may_be_kept_by_choice(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server, unproven="keep")
        one.tick(NOW + DAY_S + 900)
        assert events(one)[-1] == "kept" and "not enough traffic" in why(one) and one.incumbent != "default"

    @pytest.mark.slow
    def test_it_may_come_late(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        one.tick(NOW + 3600)
        server.count(rounds=3500, accepted=3500, tokens=7000)
        one.tick(NOW + 7200)
        assert events(one)[-1] == "kept" and why(one) == "nothing fell in 1000 rounds"

    @pytest.mark.slow
    def test_that_of_other_members_is_none(self, tmp_path: Path, server: FakeServer) -> None:
        """Where the server counts by member, those of the new one must be there."""
        one = begun(tmp_path, server, 3)
        member = 'paceline:drafter_drafts_total{model_name="m",drafter="general"}'
        server.count(rounds=2500, accepted=2500, tokens=5000)
        server.metrics += f"{member} 700\n"
        one.tick(NOW + 180)
        assert events(one)[-1] == "swapped"
        server.count(rounds=9500, accepted=9500, tokens=19000)
        server.metrics += f"{member} 800\n"
        one.tick(NOW + 900)
        assert events(one)[-1] == "swapped"
        server.metrics = server.metrics.replace(f"{member} 800", f"{member} 900")
        one.tick(NOW + 960)
        assert events(one)[-1] == "kept" and why(one) == "nothing fell in 200 rounds"

    @pytest.mark.slow
    def test_what_somebody_loaded_stays(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        one.tick(NOW)
        server.members["mine"] = "runs/mine"
        one.tick(NOW + 60)
        one.tick(NOW + DAY_S + 900)
        assert events(one) == ["reported", "kept"] and "mine" in server.members

    @pytest.mark.slow
    def test_what_somebody_loaded_goes_where_the_server_is_not_well(self, tmp_path: Path, server: FakeServer) -> None:
        """The help of --unproven said that it always stays; the log says from the start that it may not."""
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played(), policy=SeasonalPolicy(), unproven="keep")
        one.tick(NOW)
        server.members["mine"] = "runs/mine"
        one.tick(NOW + 60)
        assert "taken back if the server gets worse" in why(one)
        server.is_well = False
        one.tick(NOW + 120)
        assert events(one) == ["reported", "rolled back"] and server.members == {"general": "default"}
        assert why(one) == "the server is not well"

    def test_the_longest_is_not_the_shorter(self) -> None:
        with pytest.raises(ConfigError, match="most_probation_hours"):
            WatchConfig(probation_minutes=120.0, most_probation_hours=1.0)


@pytest.mark.slow
class TestHands:
    def test_what_is_loaded_during_a_training_is_watched(self, tmp_path: Path, server: FakeServer) -> None:
        one = begun(tmp_path, server, 2)
        server.members["mine"] = "poisoned"
        server.count(rounds=2000, accepted=2000, tokens=4000)
        one.tick(NOW + 120)
        assert events(one) == ["training", "reported"] and one.by_hand is not None
        server.count(rounds=3000, accepted=2100, tokens=5100)
        one.tick(NOW + 180)
        assert events(one)[2:] == ["rolled back", "swapped"], "the training went on beside it"
        assert set(server.members) == {"general"}

    def test_a_swap_waits_for_its_end(self, tmp_path: Path, server: FakeServer) -> None:
        one = begun(tmp_path, server, 2)
        server.members["mine"] = "runs/mine"
        for minute in range(2, 10):
            one.tick(NOW + 60 * minute)
        assert one.stage is not None and one.stage.name == "swap" and server.members["general"] == "default"
        again = watcher(tmp_path, server, Played())
        assert again.by_hand is not None and again.by_hand.member == "mine"
        server.count(rounds=9000, accepted=9000, tokens=18000)
        again.tick(NOW + 900)
        again.tick(NOW + 960)
        assert events(again) == ["training", "reported", "kept", "swapped"]

    def test_one_after_the_other(self, tmp_path: Path, server: FakeServer) -> None:
        """Two at once, one of them while a drafter of ours is on probation."""
        one = swapped(tmp_path, server)
        server.members |= {"mine": "runs/mine", "yours": "runs/yours"}
        server.count(rounds=9000, accepted=9000, tokens=18000)
        one.tick(NOW + 900)
        assert events(one)[-1] == "kept"
        watched = []
        for turn in range(1, 3):
            one.tick(NOW + 3600 * turn)
            assert one.by_hand is not None
            watched.append(one.by_hand.member)
            server.count(rounds=9000 + 1000 * turn, accepted=9000 + 1000 * turn, tokens=18000 + 2000 * turn)
            one.tick(NOW + 3600 * turn + 900)
        assert watched == ["mine", "yours"] and events(one)[-4:] == ["reported", "kept", "reported", "kept"]

    def test_what_takes_the_place_of_ours_is_judged_by_itself(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.members["general"] = "runs/mine"
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and one.lineage.entries()[-1]["state"] == "unproven"
        one.tick(NOW + 300)
        assert one.by_hand is not None and one.by_hand.undo == [["drafter", "general", "default"]]
        assert server.members == {"general": "runs/mine"}

    def test_a_server_that_was_started_again_without_it(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.members["general"] = "default"
        server.count(rounds=10, accepted=10, tokens=20)
        one.tick(NOW + 240)
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and one.stage is None and one.by_hand is None and not is_condemned(one)

    def test_a_cluster_that_is_sent_elsewhere_proves_nothing(self, tmp_path: Path, server: FakeServer) -> None:
        """The member is taken out all the same, also where the server does not know the cluster any more."""
        traffic(tmp_path)
        policy = Deciding(Decision("propose", ("tickets",), why="it returns"))
        one = watcher(tmp_path, server, Played((0, ""), (0, PASSED)), policy=policy)
        ticked(one, 0, 5)
        assert events(one)[-1] == "swapped" and len(server.members) == 2
        server.clusters.clear()
        one.tick(NOW + 360)
        assert events(one)[-1] == "rolled back" and server.members == {"general": "default"} and one.stage is None

    def test_counters_that_begin_anew_are_counted_anew(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=10, accepted=10, tokens=20)
        one.tick(NOW + 240)
        server.count(rounds=1010, accepted=210, tokens=1220)  # fewer than before the swap, and far worse
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and "1.21 tokens a round" in why(one)


class TestFullDisk:
    @pytest.mark.slow
    def test_a_choice_is_made_when_there_is_room_again(
        self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = begun(tmp_path, server, 3)

        def full(path: Path, text: str) -> None:
            raise CacheError("no space left on the disk: free some")

        monkeypatch.setattr(lineage, "write_whole", full)
        for minute in range(3, 8):
            one.tick(NOW + 60 * minute)
        assert events(one) == ["training"] and server.members == {"general": "default"}
        monkeypatch.undo()
        one.tick(NOW + 600)
        assert events(one) == ["training", "swapped"]
        assert [entry["state"] for entry in one.lineage.entries()] == ["serving"]

    @pytest.mark.slow
    def test_a_route_is_watched(self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        traffic(tmp_path)
        server.members["old"] = "runs/old"
        decisions = Decision("score", ("tickets",)), Decision("route", ("tickets",), "old", "it is good enough")
        one = watcher(tmp_path, server, Played((0, PASSED)), policy=Deciding(*decisions))
        ticked(one, 0)

        def full(path: Path, text: str) -> None:
            raise CacheError("no space left on the disk: free some")

        monkeypatch.setattr(lineage, "write_whole", full)
        ticked(one, 1, 3)
        assert server.clusters == {"tickets": "old"} and one.stage is not None and one.stage.name == "probation"
        assert one.lineage.entries() == [] and events(one).count("routed") == 1
        monkeypatch.undo()
        # a daemon that is started again knows it too
        again = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        again.tick(NOW + 3600 + 240)
        [entry] = again.lineage.entries()
        assert (entry["drafter"], entry["state"], entry["member"]) == ("runs/old", "routed", "old")
        assert entry["gate"] == PASSED
        again.tick(NOW + 3600 + 300)
        assert len(again.lineage.entries()) == 1

    @pytest.mark.slow
    def test_what_was_swapped_is_marked_before_it_is_taken_back(
        self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = begun(tmp_path, server, 3)
        marks: list[str] = []
        mark, is_full = lineage.Lineage.mark, [True]

        def marked(self: Any, drafter: str, state: str, reason: str) -> None:
            if is_full[0]:
                raise CacheError("no space left on the disk: free some")
            marks.append(state)
            mark(self, drafter, state, reason)

        monkeypatch.setattr(lineage.Lineage, "mark", marked)
        one.tick(NOW + 180)
        server.count(rounds=3500, accepted=2600, tokens=7000)
        one.tick(NOW + 240)
        assert server.members == {"general": "default"}, "a full disk does not keep a bad drafter at work"
        is_full[0] = False
        one.tick(NOW + 300)
        assert marks == ["serving", "rolled back"] and events(one)[-1] == "rolled back"

    def test_what_is_done_does_not_hang_on_its_line_in_the_log(
        self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = begun(tmp_path, server, 3, (0, ""), (3, {"passed": False, "reason": "no", "gains": {}}))

        def full(file: Path, lines: Any) -> None:
            raise OSError("no space left on the disk")

        monkeypatch.setattr(log, "append_lines", full)
        one.tick(NOW + 180)
        assert one.stage is None and not one.policy.is_training and events(one) == ["training"]
        monkeypatch.undo()
        one.log.append(log.event_line(1, "reported"))
        assert events(one) == ["training", "refused", "reported"], "it is written with the next one"

    def test_a_decision_is_carried_out_all_the_same(
        self, tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        traffic(tmp_path)
        one = watcher(tmp_path, server, Played((0, "")))
        monkeypatch.setattr(log, "append_lines", lambda file, lines: (_ for _ in ()).throw(OSError("no space")))
        one.tick(NOW)
        assert one.stage is not None and one.stage.kind == "retrain"

    @pytest.mark.parametrize("gains", [{}, {"drifted": {"low": 0.5}}, "much"])
    def test_a_verdict_without_its_figures_ends_nothing(self, tmp_path: Path, server: FakeServer, gains: Any) -> None:
        one = begun(tmp_path, server, 4, (0, ""), (0, {"passed": True, "reason": "it is good", "gains": gains}))
        assert events(one) == ["training", "refused"] and one.stage is None
        assert one.lineage.entries()[-1]["state"] == "not judged" and not is_condemned(one)
