"""`paceline adapt replay`, `check`, `log`: what they print, and how they end."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from adapt_requests import HOUR, NOON, keyed, store

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.loop.adapt.config import PolicyConfig, ReplayConfig
from paceline.loop.adapt.servers.counted_hours import ALL, CountedHours
from paceline.loop.adapt.servers.counters import Counts

pytestmark = pytest.mark.slow


def paceline(*words: object) -> int | None:
    return app(["adapt", *map(str, words)], prog_name="paceline", standalone_mode=False)


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def fallen(folder: Path) -> Path:
    """Eleven days of tickets, the last two and a half of them at half of the acceptance."""
    rows = []
    for at in range(11 * 24):
        ended = NOON + datetime.timedelta(hours=at)
        accepted = [2] * 40 if at < 204 else [0] * 40
        rows += [keyed(5 * at + each, ended=ended, drafted=[3] * 40, accepted=accepted) for each in range(5)]
    return store(folder / "traces", rows)


def test_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paceline(
        "replay", "--scenario", "empty-day", "--seeds", 1, "--days", 7, "--out", tmp_path / "lines.jsonl", "--json"
    )
    line = last_line(capsys)
    assert {"retrains", "false_alarms_per_4_weeks", "detection_periods", "second_member_proposed"} <= line.keys()
    assert line["retrains"] == 0
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 7 * 24


def test_replay_of_stored_traffic(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces = fallen(tmp_path)
    paceline("replay", "--traces", traces, "--training-price", "0.0001", "--json")
    ours = last_line(capsys)
    assert ours["hours"] == 11 * 24 and ours["retrains"] == 1 and ours["alarms"] == 1


def test_check_ends_with_a_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traces = fallen(tmp_path)
    arguments = ("check", "--traces", traces, "--state", tmp_path / "state", "--json")
    assert paceline(*arguments, "--training-price", "0.0001") == 3
    line = last_line(capsys)
    assert line["decision"]["action"] == "retrain" and line["seen"]["tickets"]["state"] == "held"
    assert paceline(*arguments) is None
    assert "cost" in last_line(capsys)["decision"]["declined"]["retrain"]


def test_check_of_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    assert paceline("check", "--traces", tmp_path / "traces", "--json") is None
    assert last_line(capsys)["decision"]["action"] == "too little"
    with pytest.raises(ConfigError, match="no folder of traces"):
        paceline("check", "--traces", tmp_path / "none")


def test_check_of_ten_requests_says_that_they_are_too_few(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And not that acceptance is as it usually is: nothing is known of what is usual."""
    store(tmp_path / "traces", [keyed(number) for number in range(10)])
    assert paceline("check", "--traces", tmp_path / "traces", "--json") is None
    shown = capsys.readouterr()
    line = json.loads(shown.out.splitlines()[-1])
    assert line["decision"]["action"] == "too little" and line["decision"]["why"].startswith("10 requests, 1 hour; ")
    assert shown.err.startswith("too little: 10 requests, 1 hour; ") and "usually is" not in shown.out + shown.err


def test_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paceline("log", "--state", tmp_path, "--json")
    assert last_line(capsys) == {"lines": 0, "report": None}


def test_check_of_requests_without_rounds_is_not_told_that_there_is_no_traffic(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As `record` writes them for another server: its metrics know the rounds."""
    store(tmp_path / "traces", [keyed(number, drafted=None, accepted=None, temperature=None) for number in range(40)])
    state = tmp_path / "state"
    assert paceline("check", "--traces", tmp_path / "traces", "--state", state, "--json") is None
    why = last_line(capsys)["decision"]["why"]
    assert f"40 of 40 requests have no rounds, and {state}/counted.jsonl is missing" in why
    assert f"paceline adapt watch --server URL --engine vllm|sglang --state {state} writes it" in why
    state.mkdir()
    (tmp_path / "state" / "counted.jsonl").write_text('{"hour": "x"}\n')
    assert paceline("check", "--traces", tmp_path / "traces", "--state", tmp_path / "state", "--json") is None
    line = last_line(capsys)
    assert "state/counted.jsonl has no hour yet" in line["decision"]["why"]
    assert line["left_out"] == {"no rounds": 40, "damaged hour": 1}


def test_check_of_requests_without_rounds_reads_the_hours_that_watch_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Eleven days of a server's counters, the last two and a half of them at half of the acceptance."""
    store(tmp_path / "traces", [keyed(number, drafted=None, accepted=None) for number in range(40)])
    counted = CountedHours(tmp_path / "state")
    (tmp_path / "state").mkdir()
    rounds = accepted = 0
    for at in range(11 * 24 * 12 + 1):
        counted.read((HOUR + at / 12) * 3600.0, Counts(rounds=rounds, accepted=accepted))
        rounds, accepted = rounds + 400, accepted + (800 if at < 204 * 12 else 100)
    counted.hours(HOUR + 11 * 24)
    arguments = ("check", "--traces", tmp_path / "traces", "--state", tmp_path / "state", "--json")
    assert paceline(*arguments, "--training-price", "0.0001") == 3
    line = last_line(capsys)
    assert (line["source"], line["hours"], line["left_out"]) == ("counted.jsonl", 11 * 24, {"no rounds": 40})
    assert line["decision"]["action"] == "retrain" and line["decision"]["clusters"] == [ALL]


def test_check_prefers_rounds_of_the_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store(tmp_path / "traces", [keyed(0), keyed(1, drafted=None, accepted=None)])
    counted = CountedHours(tmp_path / "state")
    (tmp_path / "state").mkdir()
    counted.read(HOUR * 3600.0, Counts())
    counted.read(HOUR * 3600.0 + 60, Counts(rounds=400, accepted=800))
    counted.hours(HOUR + 1)
    assert paceline("check", "--traces", tmp_path / "traces", "--state", tmp_path / "state", "--json") is None
    line = last_line(capsys)
    assert line["source"] == "traces" and set(line["seen"]) == {"tickets"} and line["left_out"] == {"no rounds": 1}


def test_replay_of_requests_without_rounds_is_refused(tmp_path: Path) -> None:
    store(tmp_path / "traces", [keyed(number, drafted=None, accepted=None) for number in range(40)])
    with pytest.raises(ConfigError, match="no request in .*traces has rounds"):
        paceline("replay", "--traces", tmp_path / "traces")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="early_periods"):
        PolicyConfig(hold_periods=9)
    with pytest.raises(ConfigError, match="scenario"):
        ReplayConfig(scenario="storm")
