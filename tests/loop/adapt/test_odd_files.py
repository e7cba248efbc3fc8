"""Odd rows, shards and state files, of other programs or of people: left out and counted, or one line, never the
end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from adapt_requests import HOUR, keyed
from fake_servers import FakeServer, serving
from played import NOW, Alarmed, Played, traffic, watcher
from pyarrow import parquet

from paceline.cli import app
from paceline.errors import ConfigError
from paceline.loop.adapt.traffic.stored import read_hours, read_requests, read_span
from paceline.serve.admin.traces import SCHEMA

INT32S = pa.list_(pa.int32())


def shard(folder: Path, row: dict[str, Any], **types: pa.DataType) -> None:
    """One more shard of one row, some of whose columns have other types."""
    fields = [(field.name, types.get(field.name, field.type)) for field in SCHEMA]
    rows = [{**keyed(500), "sampling": "{}", **row}]
    table = pa.Table.from_pylist([{name: each.get(name) for name, _ in fields} for each in rows], pa.schema(fields))
    parquet.write_table(table, folder / "traces" / "traces-odd.parquet")


ROWS: dict[str, tuple[dict[str, Any], dict[str, pa.DataType]]] = {
    "a null among the drafts": ({"drafted": [3, None], "accepted": [1, 1]}, {}),
    "a null among the accepted": ({"drafted": [3, 3], "accepted": [1, None]}, {}),
    "more accepted than drafted": ({"drafted": [3], "accepted": [9]}, {}),
    "no key": ({"key": None}, {}),
    "a null among the tokens": ({"prompt_ids": [1, None]}, {}),
    "a time of another age": ({"ended": 2**62}, {}),
    "a time long ago": ({"ended": -(2**62)}, {}),
    "a time as a number": ({"ended": 5}, {"ended": pa.int64()}),
    "a key as a number": ({"key": 5}, {"key": pa.int64()}),
    "drafts as text": ({"drafted": "3,3"}, {"drafted": pa.string()}),
    "drafts as a number": ({"drafted": 3}, {"drafted": pa.int64()}),
    "fractions accepted": ({"accepted": [0.5]}, {"accepted": pa.list_(pa.float32())}),
    "a tag as a number": ({"cluster": None, "tag": 7}, {"tag": pa.int64()}),
    "sampling that is a list": ({"sampling": "[]"}, {}),
    "a bias that is a list": ({"sampling": '{"logit_bias": [1]}'}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_one_odd_row_is_left_out_and_ends_nothing(tmp_path: Path, name: str) -> None:
    traffic(tmp_path)
    row, types = ROWS[name]
    shard(tmp_path, row, **types)
    hours, left_out = read_hours(tmp_path / "traces", now=NOW)
    requests, more = read_requests(tmp_path / "traces", now=NOW)
    spans = read_span(tmp_path / "traces", NOW - 86400, NOW)
    assert len(requests) == 120 and sum((left_out + more).values()) >= 1, "counted, by one of the two"
    assert sum(sums.requests for by in hours.values() for sums in by.values()) >= 120 and spans
    one = watcher(tmp_path, None, Played((0, "")))
    one.tick(NOW)
    assert one.log.lines() and one.log.lines()[0]["hour"] == HOUR


STAGE = {
    "kind": "retrain",
    "name": "gate",
    "hour": HOUR,
    "clusters": ["tickets"],
    "candidates": ["a"],
    "window": {"since": 3},
}
STATE = {"incumbent": "default", "stage": STAGE, "by_hand": None, "scored": {}, "known": None, "meters": {}}
ODD: list[dict[str, Any]] = [
    {"candidates": []},
    {"at": 5},
    {"clusters": []},
    {"window": {}},
    {"window": None},
    {"began": "x"},
    {"began": float("nan")},
    {"name": "waiting"},
    {"kind": "renew"},
    {"hour": "noon"},
    {"verdicts": [{}, {}]},
    {"undo": [["drafter"], ["a", "b"]]},
    {"name": "training"},
    {"name": "probation", "counted": [1, 2]},
    {"num_tries": 1.5},
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_state_that_cannot_be_is_one_line(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "state").mkdir()
    file = tmp_path / "state" / "state.json"
    file.write_text(json.dumps(STATE))
    watcher(tmp_path, None, Played())
    file.write_text(json.dumps({**STATE, "stage": {**STAGE, **odd}}))
    with pytest.raises(ConfigError, match="move it away"):
        watcher(tmp_path, None, Played())


@pytest.mark.parametrize(
    "odd",
    [{"scored": {"tickets": {}}}, {"scored": [3]}, {"scored": 5}]
    + [{name: value} for name in ("stage", "by_hand") for value in ("gate", "", {}, [], 0, False)],
    ids=str,
)
def test_so_is_one_whose_other_parts_cannot_be(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.json").write_text(json.dumps({**STATE, **odd}))
    with pytest.raises(ConfigError, match="move it away"):
        watcher(tmp_path, None, Played())


COUNTED = [1.0] * 7


@pytest.mark.parametrize(
    "odd",
    [
        3,
        None,
        [],
        [COUNTED],
        [COUNTED, [1.0] * 6],
        [COUNTED, "1234567"],
        [COUNTED, [None] * 7],
        [COUNTED, [float("nan")] * 7],
    ],
    ids=str,
)
def test_so_is_one_whose_meters_cannot_be(tmp_path: Path, odd: Any) -> None:
    with serving(FakeServer()) as server:
        (tmp_path / "state").mkdir()
        file = tmp_path / "state" / "state.json"
        file.write_text(json.dumps({**STATE, "meters": {server.url: {"0": [COUNTED, COUNTED]}}}))
        one = watcher(tmp_path, server, Played())
        assert one.deployment is not None and one.deployment.meters.saved() == {server.url: {"0": [COUNTED, COUNTED]}}
        for meters in ({server.url: {"0": odd}}, {server.url: odd} if odd else odd or 3):
            file.write_text(json.dumps({**STATE, "meters": meters}))
            with pytest.raises(ConfigError, match="move it away"):
                watcher(tmp_path, server, Played())


def test_odd_events_in_the_log_are_left_out_and_counted(tmp_path: Path) -> None:
    traffic(tmp_path)
    (tmp_path / "state").mkdir()
    odd: list[dict[str, Any]] = [
        {"event": "reported"},
        {"event": "swapped", "hour": "noon"},
        {"event": 5, "hour": HOUR},
        {"event": "swapped", "hour": HOUR, "clusters": None},
        {"event": "refused", "hour": HOUR, "cost_hours": "much"},
    ]
    (tmp_path / "state" / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in odd))
    one = watcher(tmp_path, None, Played((0, "")), policy=Alarmed())
    messages: list[str] = []
    one.say, one._next = messages.append, None
    one.tick(NOW)
    assert any("left out 5 events" in each for each in messages)


@pytest.mark.parametrize("words", [(), ("--page",)])
def test_odd_lines_of_the_log_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """`adapt log` ended with KeyError or TypeError at any of them."""
    event = {"hour": HOUR, "time": "2026-11-03T12:00Z", "event": "swapped", "why": "it is better"}
    hour = {"hour": HOUR, "time": event["time"], "seen": {"tickets": {"state": "calm"}}}
    hour |= {"decision": {"action": "none", "why": "nothing fell", "declined": {}}}
    odd: list[Any] = [
        {"event": "swapped"},
        {**event, "hour": "noon"},
        {"hour": HOUR, "event": "swapped"},
        {"hour": HOUR},
    ]
    odd += [{**hour, "seen": {"tickets": {}}}, {**hour, "seen": 5}, {**hour, "decision": {}}, {**event, "event": 5}]
    text = "".join(json.dumps(line) + "\n" for line in (event, *odd, hour))
    (tmp_path / "log.jsonl").write_text(text)
    app(["adapt", "log", "--state", str(tmp_path), *words], prog_name="paceline", standalone_mode=False)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2 and "swapped: it is better" in shown.out and "nothing fell" in shown.out
    assert f"left out: {len(odd)} lines of {tmp_path / 'log.jsonl'} that are damaged" in shown.err
    assert (tmp_path / "report.html").exists() == bool(words)


def test_fewer_learning_rates_than_there_are_candidates(tmp_path: Path) -> None:
    """The daemon was started again with one rate where it had had two."""
    traffic(tmp_path)
    (tmp_path / "state").mkdir()
    stage = {
        **STAGE,
        "name": "training",
        "candidates": ["a/drafter", "b/drafter"],
        "at": 1,
        "verdicts": [],
        "incumbent": "x",
    }
    stage |= {"window": {"since": 3, "folder": "w"}, "rates": [1e-4, 3e-4]}
    (tmp_path / "state" / "state.json").write_text(json.dumps({**STATE, "stage": stage}))
    jobs = Played((0, ""))
    watcher(tmp_path, None, jobs).tick(NOW)
    [command] = jobs.commands
    assert command[command.index("--lr") + 1] == "0.0003"
