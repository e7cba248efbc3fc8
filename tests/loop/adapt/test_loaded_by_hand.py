"""A drafter that somebody loads into a running vLLM, past the daemon: it is watched, and taken back if it is worse."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_servers import counted
from played import NOW, Deciding, Played, events, watcher

from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.rollout.stage import read_stage
from paceline.loop.adapt.watch import Watcher
from paceline.runs.folder import plain


@pytest.mark.slow
class TestByHand:
    """Somebody loads weights into a running vLLM, past the daemon."""

    def watching(self, folder: Path, three: list[Any]) -> Watcher:
        """A daemon that has seen three minutes of these servers, with 3 tokens a round."""
        (folder / "old").mkdir()
        deploy = {"engine": "vllm", "hot_swap": True, "servers": tuple(server.url for server in three)}
        incumbent = CandidateConfig(str(folder / "old"))
        (folder / "traces").mkdir()
        for server in three:
            server.folder = server.folder or str(folder / "old")
        one = watcher(folder, three[0], Played(), policy=Deciding(), candidate=incumbent, deploy=deploy)
        for minute in range(3):
            counted(three, minute, 2, 2, 2)
            one.tick(NOW + 60 * minute)
        assert events(one) == []
        return one

    def serve(self, one: Watcher, three: list[Any], rates: dict[str, int], minutes: range) -> None:
        """Rounds in which each server's drafter has so many accepted drafts, by the name of its folder."""
        for minute in minutes:
            for server in three:
                rounds, accepted = getattr(server, "counted", (1000, 2000))
                server.counted = rounds + 500, accepted + 500 * rates[Path(server.folder).name]
                server.count(*server.counted, sum(server.counted), ended=20 * minute)
            one.tick(NOW + 60 * minute)

    @pytest.mark.parametrize("number", [0, 2])
    def test_a_bad_one_is_taken_back(self, tmp_path: Path, three: list[Any], number: int) -> None:
        one = self.watching(tmp_path, three)
        three[number].folder = str(tmp_path / "bad")
        self.serve(one, three, {"old": 2, "bad": 0}, range(3, 8))
        assert events(one) == ["reported", "rolled back"] and [server.folder for server in three] == [one.incumbent] * 3
        event, back = one.log.lines()[-2:]
        assert "bad was loaded by hand" in event["why"] and three[number].url in event["why"]
        assert "1.00 tokens a round on the canary, 3.00 on the other servers" in back["why"]

    def test_one_on_all_servers_is_taken_back_from_each(self, tmp_path: Path, three: list[Any]) -> None:
        """No server is left that they could be compared with: the time before says it."""
        one = self.watching(tmp_path, three)
        self.serve(one, three, {"old": 2}, range(3, 30))
        for server in three:
            server.folder = str(tmp_path / "bad")
        self.serve(one, three, {"old": 2, "bad": 0}, range(30, 60))
        assert events(one) == ["reported", "rolled back"] * 3 and {server.folder for server in three} == {one.incumbent}

    def test_one_that_reaches_the_other_servers_later_is_taken_back_too(self, tmp_path: Path, three: list[Any]) -> None:
        one = self.watching(tmp_path, three)
        for number, server in enumerate(three):
            server.folder = str(tmp_path / "bad")
            self.serve(one, three, {"old": 2, "bad": 0}, range(3 + number, 4 + number))
        self.serve(one, three, {"old": 2, "bad": 0}, range(6, 60))
        assert events(one).count("rolled back") == 3 and {server.folder for server in three} == {one.incumbent}

    def test_a_state_of_before_the_kinds_name_was_changed_is_read(self, tmp_path: Path, three: list[Any]) -> None:
        one = self.watching(tmp_path, three)
        three[1].folder = str(tmp_path / "good")
        self.serve(one, three, {"old": 2, "good": 4}, range(3, 5))
        assert one.by_hand is not None and one.by_hand.kind == "by hand"
        assert read_stage({**plain(asdict(one.by_hand)), "kind": "found"}) == one.by_hand

    def test_a_good_one_stays_where_it_is(self, tmp_path: Path, three: list[Any]) -> None:
        one = self.watching(tmp_path, three)
        three[1].folder = str(tmp_path / "good")
        self.serve(one, three, {"old": 2, "good": 4}, range(3, 40))
        assert events(one) == ["reported", "kept"], "it is watched once, and nobody else gets it"
        assert [Path(server.folder).name for server in three] == ["old", "good", "old"]
        assert one.incumbent == str(tmp_path / "old")

    def test_a_server_that_is_away_is_no_news(self, tmp_path: Path, three: list[Any]) -> None:
        one = self.watching(tmp_path, three)
        three[1].folder = str(tmp_path / "good")
        self.serve(one, three, {"old": 2, "good": 4}, range(3, 20))
        for three[1].is_away in (True, False):
            one.tick(NOW + 1300)
        assert events(one) == ["reported", "kept"]

    def test_one_that_was_there_before_the_daemon_is_none(self, tmp_path: Path, three: list[Any]) -> None:
        """The servers may read the incumbent from another folder."""
        for server in three:
            server.folder = str(tmp_path / "exported")
        one = self.watching(tmp_path, three)
        self.serve(one, three, {"exported": 2}, range(3, 8))
        assert events(one) == []
