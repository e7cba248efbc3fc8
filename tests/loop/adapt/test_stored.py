"""Traces as hours and requests: what counts, and what is left out."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pytest
from adapt_requests import HOUR, NOON, keyed, row, store
from pyarrow import parquet
from trace_files import BYTES, sequence, writer

from paceline.errors import ConfigError
from paceline.loop.adapt.config import ReplayConfig
from paceline.loop.adapt.traffic.replay import run
from paceline.loop.adapt.traffic.stored import MOST_REPEATS, params_of, read_hours, read_requests
from paceline.types import GrammarSpec, SamplingParams


def test_rounds_with_drafts_count_by_hour_and_cluster(tmp_path: Path) -> None:
    later = NOON + datetime.timedelta(hours=2)
    store(tmp_path, [keyed(0), keyed(1, tag=None), keyed(2, ended=later)])
    hours, left_out = read_hours(tmp_path)
    assert set(hours) == {HOUR, HOUR + 2} and not left_out
    assert set(hours[HOUR]) == {"tickets", "default"}
    assert (hours[HOUR]["tickets"].tokens, hours[HOUR]["tickets"].rounds) == (5.0, 2.0)
    run(ReplayConfig(traces=tmp_path, out=tmp_path / "hours.jsonl"))
    lines = map(json.loads, (tmp_path / "hours.jsonl").read_text().splitlines())
    assert [line["hour"] for line in lines] == [HOUR, HOUR + 1, HOUR + 2]


def test_one_client_that_repeats_itself_counts_a_few_times(tmp_path: Path) -> None:
    poison = [row(key=f"traces/same@0#{number}", drafted=[7] * 9, accepted=[7] * 9) for number in range(500)]
    store(tmp_path, [keyed(0), *poison])
    hours, left_out = read_hours(tmp_path)
    assert hours[HOUR]["tickets"].requests == 1 + MOST_REPEATS
    assert left_out["repeats itself"] == 500 - MOST_REPEATS


def test_what_no_clock_can_have_stamped_is_left_out(tmp_path: Path) -> None:
    wrong = [datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), NOON + datetime.timedelta(days=400)]
    store(tmp_path, [keyed(number, ended=each) for number, each in enumerate(wrong)])
    hours, left_out = read_hours(tmp_path, now=NOON.timestamp())
    assert hours == {} and left_out["impossible time"] == 2


def test_damaged_shards_and_other_files_are_left_out(tmp_path: Path) -> None:
    store(tmp_path, [keyed(0)])
    (tmp_path / "traces-0.parquet").write_bytes((tmp_path / "traces-1.parquet").read_bytes()[:200])
    parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "traces-2.parquet")
    (tmp_path / "traces-3.part").write_bytes(b"half")
    hours, left_out = read_hours(tmp_path)
    assert hours[HOUR]["tickets"].requests == 1
    assert left_out == {"damaged shard": 1, "shard without the columns of traces": 1}


def test_requests_without_rounds_say_nothing(tmp_path: Path) -> None:
    store(tmp_path, [keyed(0, drafted=[], accepted=[]), keyed(1, drafted=[0], accepted=[0]), keyed(2, accepted=[1])])
    hours, left_out = read_hours(tmp_path)
    assert hours[HOUR]["tickets"].requests == 0 and left_out["no rounds"] == 2


def test_requests_of_a_window(tmp_path: Path) -> None:
    later = NOON + datetime.timedelta(hours=2)
    cut = keyed(3, finish_reason="abort")
    store(tmp_path, [keyed(0), keyed(1, ended=later), keyed(2, tag="chat"), cut, keyed(4, sampling='{"top_k": -3}')])
    requests, left_out = read_requests(tmp_path, "tickets", since=HOUR, until=HOUR + 2)
    assert [each.prompt for each in requests] == ["traces/0"]
    assert left_out == {"cut short": 1, "unknown sampling": 1}


def test_clusters_that_are_not_tracked_are_read_as_one(tmp_path: Path) -> None:
    names = ("tickets", "chat", "code", "other")
    store(tmp_path, [keyed(number, tag=name) for number, name in enumerate(names)])
    assert [each.cluster for each in read_requests(tmp_path)[0]] == [*names]
    assert [each.cluster for each in read_requests(tmp_path, tracked=["tickets"])[0]] == ["tickets", *3 * ["other"]]
    assert [each.prompt for each in read_requests(tmp_path, "other", tracked=["tickets", "chat"])[0]] == [
        "traces/2",
        "traces/3",
    ]


def test_a_temperature_that_nobody_knows_is_not_greedy(tmp_path: Path) -> None:
    """Another server's answers, as `paceline record` keeps them: the client gave no temperature, and rounds are not
    told."""
    other = {"temperature": None, "sampling": "{}", "drafted": None, "accepted": None, "seed": None}
    store(tmp_path, [keyed(0), keyed(1, **other), keyed(2, **other | {"temperature": 0.0})])
    requests, left_out = read_requests(tmp_path)
    assert [each.prompt for each in requests] == ["traces/0", "traces/2"] and left_out == {"unknown temperature": 1}
    requests, left_out = read_requests(tmp_path, exact=False)
    assert [each.knows_temperature for each in requests] == [True, False, True] and not left_out


def test_what_a_server_writes_is_read_back(tmp_path: Path) -> None:
    one = writer(tmp_path)
    one.offer(sequence(temperature=0.5, stop=("end",), logit_bias={3: float("-inf")}, max_tokens=9), "stop", "tickets")
    one.close()
    [recorded], _ = read_requests(tmp_path)
    assert recorded.params == SamplingParams(
        temperature=0.5, stop=("end",), logit_bias={3: float("-inf")}, max_tokens=9, seed=5
    )
    assert recorded.prompt_ids == BYTES.encode("Say it.") and recorded.seed == 5 and recorded.cluster == "tickets"


def test_sampling_with_a_grammar() -> None:
    assert params_of('{"grammar": {"kind": "regex", "text": "a+"}}').grammar == GrammarSpec("regex", "a+")
    assert params_of(None) == SamplingParams()


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of traces"):
        read_hours(tmp_path / "none")


def test_requests_without_a_temperature_get_the_server_s_usual_settings(tmp_path: Path) -> None:
    rows = [keyed(0, temperature=None, sampling='{"top_p": 0.5}'), keyed(1, temperature=0.0)]
    store(tmp_path, rows)
    requests, left_out = read_requests(tmp_path, usual={"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    assert not left_out and [each.knows_temperature for each in requests] == [False, True]
    assert requests[0].params == SamplingParams(temperature=0.6, top_p=0.5, top_k=20)
    assert requests[1].params == SamplingParams(), "it said what it wants"
    assert read_requests(tmp_path)[1] == {"unknown temperature": 1}
