"""Hours of servers whose rounds no trace tells: from their counters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from adapt_requests import HOUR
from fake_servers import FakeServer
from played import NOW, PASSED, Deciding, Played, events, ticked, traffic, watcher

from paceline.data.answers import AnswerShards
from paceline.loop.adapt.config import CandidateConfig
from paceline.loop.adapt.decide.decide import Decision
from paceline.loop.adapt.servers.counted_hours import ALL, CountedHours
from paceline.loop.adapt.servers.counters import Counts


def test_readings_become_hours_that_stay_known(tmp_path: Path) -> None:
    one = CountedHours(tmp_path)
    for minute, (rounds, accepted) in enumerate([(100, 50), (150, 150), (150, 150), (20, 10), (30, 40)]):
        one.read(3600 * 7 + 60 * minute, Counts(rounds=rounds, accepted=accepted))
    assert one.hours(7) == {}, "it is not over"
    again = CountedHours(tmp_path)
    for hours in (one.hours(8), again.hours(8)):
        (sums,) = hours[7].values()
        assert (sums.requests, sums.rounds, sums.tokens) == (
            2,
            60.0,
            190.0,
        )  # one without a round, one across a restart
    again.read(3600 * 7 + 3000, Counts())
    again.read(3600 * 7 + 3060, Counts(rounds=10))
    assert again.hours(8)[7][ALL].rounds == 70 and again.hours(9, since=8) == {}


def test_a_server_of_another_engine_is_watched_by_its_counters(tmp_path: Path, server: FakeServer) -> None:
    """Its answers are learned from although nobody knows their rounds, or the temperature."""
    traffic(tmp_path, drafted=None, accepted=None, temperature=None, seed=None)
    jobs, policy = Played((0, ""), (0, PASSED)), Deciding(Decision(), Decision("retrain", (ALL,)))
    how: Any = {"candidate": CandidateConfig(str(tmp_path)), "deploy": {"engine": "vllm", "restart": "true"}}
    one = watcher(tmp_path, server, jobs, policy=policy, **how)
    for minute in range(5):
        server.count(rounds=1000 + 100 * minute, accepted=1000 + 200 * minute, tokens=0)
        one.tick(NOW + 60 * minute)
    assert one.log.lines()[-1]["hour"] == HOUR and not one.log.lines()[-1]["seen"]
    ticked(one, 1, 5)
    line = next(line for line in one.log.lines() if line["hour"] == HOUR + 1)
    assert line["seen"][ALL]["tokens_per_round"] == 3.0
    assert events(one) == ["training", "swapped"]
    gate = jobs.commands[1]
    assert "--cluster" not in gate and "--most-loss" in gate
    [window] = (tmp_path / "state" / "windows").iterdir()
    answers = list(AnswerShards(window))
    assert len(answers) > 50 and all(math.isnan(answer.temperature) for answer in answers)
