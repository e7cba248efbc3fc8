"""A canary beside a server that is silent or busy: it gets the drafter later, and silence condemns nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from canaries import begun, is_condemned, swapped, why
from fake_servers import FakeServer
from played import NOW, Played, events, traffic, watcher

from paceline.loop.adapt.decide.policy import SeasonalPolicy


class TestSilence:
    @pytest.mark.slow
    def test_a_server_that_does_not_answer_at_the_swap_gets_it_later(self, tmp_path: Path, server: FakeServer) -> None:
        one = begun(tmp_path, server, 3)
        server.is_away = True
        for minute in range(3, 60):
            one.tick(NOW + 60 * minute)
        assert events(one) == ["training", "waiting"] and one.stage is not None and one.stage.num_tries == 6
        assert one.metrics.registry.get_sample_value("paceline:adapt_server_up") == 0
        assert one.metrics.registry.get_sample_value("paceline:adapt_events_total", {"event": "waiting"}) == 1
        again = watcher(tmp_path, server, Played())  # a daemon that was stopped goes on
        server.is_away = False
        again.tick(NOW + 2 * 3600)
        assert events(again) == ["training", "waiting", "swapped", "answers"]
        [entry] = again.lineage.entries()
        assert entry["state"] == "serving" and server.members == {"general": entry["drafter"]}

    @pytest.mark.slow
    @pytest.mark.parametrize("status", [409, 503])
    def test_a_server_that_is_busy_gets_it_later(self, tmp_path: Path, server: FakeServer, status: int) -> None:
        one = begun(tmp_path, server, 3)
        server.refuses["/admin/drafters/general"] = status, {"error": "try again"}
        one.tick(NOW + 180)
        server.refuses.clear()
        one.tick(NOW + 240)
        assert events(one) == ["training", "waiting", "swapped", "answers"] and not is_condemned(one)

    @pytest.mark.slow
    def test_a_server_that_refuses_is_not_asked_again(self, tmp_path: Path, server: FakeServer) -> None:
        one = begun(tmp_path, server, 3)
        server.refuses["/admin/drafters/general"] = 400, {"error": "of another model"}
        one.tick(NOW + 180)
        server.refuses.clear()
        one.tick(NOW + 240)
        assert events(one) == ["training", "refused"] and is_condemned(one) and one.stage is None
        assert server.members == {"general": "default"}

    @pytest.mark.slow
    def test_a_lost_answer_is_undone_all_the_same(self, tmp_path: Path, server: FakeServer) -> None:
        """The server has loaded it; that nobody heard of it does not make the new drafter the one to go back to."""
        one = begun(tmp_path, server, 3)
        server.loses.add("/admin/drafters/general")
        one.tick(NOW + 180)
        assert events(one)[-1] == "waiting" and server.members != {"general": "default"}
        server.loses.clear()
        one.tick(NOW + 240)
        server.count(rounds=3500, accepted=2600, tokens=7000)
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and server.members == {"general": "default"}

    @pytest.mark.slow
    def test_a_second_try_knows_what_was_before_the_first(self, tmp_path: Path, server: FakeServer) -> None:
        """The new drafter served between the two: its rounds are no standard for it."""
        one = begun(tmp_path, server, 3)
        server.loses.add("/admin/drafters/general")
        one.tick(NOW + 180)
        server.loses.clear()
        server.count(rounds=4000, accepted=2600, tokens=8000)
        one.tick(NOW + 240)
        assert events(one)[-2:] == ["swapped", "answers"] and one.stage is not None and one.stage.before[""] == 2.0
        server.count(rounds=5000, accepted=2900, tokens=9000)
        one.tick(NOW + 300)
        assert events(one)[-1] == "rolled back" and why(one) == "1.30 tokens a round by its metrics, 2.00 before"

    @pytest.mark.slow
    def test_rounds_of_a_drafter_that_was_taken_back_are_no_standard(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=3500, accepted=2600, tokens=7000)
        one.tick(NOW + 240)
        assert events(one)[-1] == "rolled back" and one._canary is not None and not one._canary.readings
        server.count(rounds=4000, accepted=3100, tokens=8000)
        one.tick(NOW + 300)
        assert len(one._canary.readings) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("status", [401, 404, 507])
    def test_a_server_that_never_tries_it_condemns_nothing(
        self, tmp_path: Path, server: FakeServer, status: int
    ) -> None:
        one = begun(tmp_path, server, 3)
        server.refuses["/admin/drafters/general"] = status, {"error": "a wrong key, or no memory"}
        one.tick(NOW + 180)
        assert events(one) == ["training", "failed"] and one.stage is None and not one.policy.is_training
        assert one.lineage.entries()[-1]["state"] == "passed" and not is_condemned(one)

    @pytest.mark.slow
    def test_it_is_given_up_in_the_end_and_condemned_never(self, tmp_path: Path, server: FakeServer) -> None:
        one = begun(tmp_path, server, 3)
        server.is_away = True
        for hour in range(26):
            one.tick(NOW + 180 + 3600 * hour)
        server.is_away = False
        one.tick(NOW + 28 * 3600)
        assert "failed" in events(one) and one.stage is None and not one.policy.is_training
        assert one.lineage.entries()[-1]["state"] == "passed" and not is_condemned(one)
        assert server.members == {"general": "default"}

    @pytest.mark.slow
    def test_a_probation_outlasts_a_silence(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.is_away = True
        one.tick(NOW + 240)
        one.tick(NOW + 300)
        server.is_away = False
        server.count(rounds=3500, accepted=3500, tokens=7000)
        one.tick(NOW + 360)
        one.tick(NOW + 900)
        assert events(one)[1:] == ["swapped", "waiting", "answers", "kept"]

    @pytest.mark.slow
    def test_a_long_one_takes_it_back_and_condemns_nothing(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.is_away = True
        for minute in range(4, 20):
            one.tick(NOW + 60 * minute)
        assert events(one)[-1] == "waiting" and one.stage is not None and one.stage.name == "undo"
        server.is_away = False
        one.tick(NOW + 4 * 3600)
        assert "rolled back" in events(one) and server.members == {"general": "default"}
        assert one.lineage.entries()[-1]["state"] == "unproven" and not is_condemned(one)

    @pytest.mark.slow
    def test_a_roll_back_waits_for_the_server(self, tmp_path: Path, server: FakeServer) -> None:
        one = swapped(tmp_path, server)
        server.count(rounds=3500, accepted=2600, tokens=7000)
        server.loses.add("/admin/drafters/general")
        one.tick(NOW + 240)
        assert events(one)[-1] == "waiting"
        server.loses.clear()
        server.count(rounds=9000, accepted=9000, tokens=18000)  # what was seen stays true
        one.tick(NOW + 600)
        assert events(one)[-2:] == ["rolled back", "answers"] and is_condemned(one)

    def test_scores_of_a_silent_server_are_not_known(self, tmp_path: Path, server: FakeServer) -> None:
        traffic(tmp_path)
        server.members["other"] = "runs/other"
        one = watcher(tmp_path, server, Played(), policy=SeasonalPolicy())
        one.tick(NOW)
        assert one._scores("tickets") is None
        one._scored["tickets"] = {"hour": 10**9, "members": {}}
        server.is_away = True
        assert one._scores("tickets") is None, "no member would be a reason to train"
