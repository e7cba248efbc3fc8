"""Whether a server is worse than before a swap: by traces, by counters, by errors, by pace; and when too little is
known."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from adapt_requests import keyed, store
from played import NOW

from paceline.loop.adapt.config import WatchConfig
from paceline.loop.adapt.rollout.stage import LEAST_ROUNDS, LONGEST_WAIT_S, Stage
from paceline.loop.adapt.servers.counters import Counts

FIRST = Counts(rounds=1000, accepted=1000, steps=1000, busy_s=20, requests=50)
BEFORE = Counts(rounds=3000, accepted=3000, steps=3000, busy_s=60, requests=1000)
"""Two tokens a round, one row a round, 20 ms each."""


def begun(folder: Path, first: Counts | None = FIRST) -> Stage:
    (folder / "traces").mkdir(exist_ok=True)
    stage = Stage("retrain", "gate", 1, ("tickets",))
    stage.begin_probation(folder / "traces", [] if first is None else [first], BEFORE, NOW)
    return stage


def wrong(stage: Stage, folder: Path, **changes: float) -> str | None:
    """What is said when the counters have moved by this."""
    counts = BEFORE + Counts(**changes)
    stage.seen, stage.sums = stage.counted, []
    stage.look(counts, None)
    return stage.fault(folder / "traces", counts, NOW + 600, WatchConfig())


def test_fewer_tokens_by_its_counters(tmp_path: Path) -> None:
    stage = begun(tmp_path)
    assert wrong(stage, tmp_path, rounds=LEAST_ROUNDS - 1, accepted=0) is None, "too few rounds say nothing"
    assert "1.00 tokens a round by its metrics, 2.00 before" in str(
        wrong(stage, tmp_path, rounds=LEAST_ROUNDS, accepted=0, requests=10)
    )
    assert wrong(stage, tmp_path, rounds=1000, accepted=910, requests=10_000) is None, "less than 5%"
    assert wrong(stage, tmp_path, rounds=1000, accepted=760, requests=50) is None, "12%, and one standard error is 4%"
    assert wrong(stage, tmp_path, rounds=1000, accepted=890, requests=10_000) is not None
    assert wrong(begun(tmp_path, None), tmp_path, rounds=1000, accepted=0) is None, "nothing is known of before"


def test_fewer_tokens_by_its_traces(tmp_path: Path) -> None:
    """A cluster needs its rounds before and after; counters are not asked then."""
    begin = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    ends = {"ago": begin - datetime.timedelta(hours=1), "since": begin + datetime.timedelta(seconds=60)}
    good, bad = ({"drafted": [3] * 20, "accepted": [each] * 20} for each in (2, 1))
    store(tmp_path / "traces", [keyed(each, ended=ends["ago"], **good) for each in range(10)])
    stage = begun(tmp_path)
    assert stage.before["tickets"] == 3.0
    store(tmp_path / "traces", [keyed(100 + each, ended=ends["since"], **bad) for each in range(9)], "traces-2.parquet")
    assert wrong(stage, tmp_path, rounds=180, accepted=180) is None, "180 rounds of 200"
    store(tmp_path / "traces", [keyed(200, ended=ends["since"], **bad)], "traces-3.parquet")
    assert wrong(stage, tmp_path, rounds=1000, accepted=2000) == "2.00 tokens a round, 3.00 before"


@pytest.mark.parametrize("with_metrics", [True, False])
def test_a_clock_that_was_set_back_proves_nothing_by_traces(tmp_path: Path, with_metrics: bool) -> None:
    """The traces fall to 2 tokens a round, at times before the swap; metrics tell of the fall, or of nothing before."""
    begin = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    good, bad = ({"drafted": [3] * 20, "accepted": [each] * 20} for each in (2, 1))
    ago, back = begin - datetime.timedelta(hours=1), begin - datetime.timedelta(hours=2)
    store(tmp_path / "traces", [keyed(each, ended=ago, **good) for each in range(10)])
    stage = begun(tmp_path, FIRST if with_metrics else None)
    stage.clock_moved(-2 * 3600 - 600)
    now = NOW + 3600 - 2 * 3600 - 600
    store(tmp_path / "traces", [keyed(100 + each, ended=back, **bad) for each in range(20)], "traces-2.parquet")
    counts = BEFORE + Counts(rounds=400, accepted=200, requests=20)
    stage.look(counts, None)
    fault = stage.fault(tmp_path / "traces", counts, now, WatchConfig())
    assert fault == ("1.50 tokens a round by its metrics, 2.00 before" if with_metrics else None)
    assert stage.is_over(now, WatchConfig(), None) == ("proven" if with_metrics else "unproven")


def test_metrics_are_compared_beside_the_traces_from_before_a_clock_was_set_back(tmp_path: Path) -> None:
    begin = datetime.datetime.fromtimestamp(NOW, datetime.UTC)
    good = {"drafted": [3] * 20, "accepted": [2] * 20}
    times = begin - datetime.timedelta(hours=1), begin + datetime.timedelta(seconds=60)
    store(tmp_path / "traces", [keyed(each, ended=times[0], **good) for each in range(10)])
    stage = begun(tmp_path)
    store(tmp_path / "traces", [keyed(100 + each, ended=times[1], **good) for each in range(10)], "traces-2.parquet")
    assert wrong(stage, tmp_path, rounds=1000, accepted=100) is None, "traces tell of all of it"
    stage.clock_moved(-300)
    assert (
        wrong(stage, tmp_path, rounds=1000, accepted=100, requests=20)
        == "1.10 tokens a round by its metrics, 2.00 before"
    )


@pytest.mark.parametrize(
    ("rounds", "busy_s", "is_slower"), [(200, 5.2, True), (200, 4.8, False), (236, 5.2, True), (260, 5.2, False)]
)
def test_slower_rounds(tmp_path: Path, rounds: int, busy_s: float, is_slower: bool) -> None:
    """200 rounds of the server: 26 or 24 ms each beside 20, with one row, or with more of them, which take longer
    anyway."""
    fault = wrong(begun(tmp_path), tmp_path, rounds=rounds, accepted=rounds, steps=200, busy_s=busy_s)
    assert (fault == "a round takes 26.0 ms, 20.0 before with as many rows") is is_slower
    assert (fault is not None) is is_slower


def test_waits_of_any_number_of_tries_have_a_length(tmp_path: Path) -> None:
    stage = Stage("retrain", "undo", 1, ("tickets",), num_tries=2000)
    stage.wait(NOW)
    assert stage.wait_until == NOW + LONGEST_WAIT_S


def test_requests_that_ended_in_an_error(tmp_path: Path) -> None:
    assert wrong(begun(tmp_path), tmp_path, errors=1, requests=1) is None, "one may fail of any cause"
    reason = wrong(begun(tmp_path, None), tmp_path, errors=20, requests=40)
    assert reason == "20 of 40 requests ended in an error, nothing is known of before"


def test_a_baseline_of_few_requests_is_uncertain(tmp_path: Path) -> None:
    """A fall from 2 tokens a round to 1.5, surely now, but with four requests before."""
    few = Counts(rounds=2900, accepted=2900, steps=2900, busy_s=58, requests=996)
    changes = {"rounds": 1000, "accepted": 500, "requests": 1000}
    assert wrong(begun(tmp_path, few), tmp_path, **changes) is None
    assert wrong(begun(tmp_path), tmp_path, **changes) is not None
