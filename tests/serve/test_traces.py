"""Traces: what was said, exactly, within limits; lost rather than in anyone's way."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from call_counts import num_calls
from doubles import FakeTarget, ScriptedDrafter
from live_server import wait_until
from pyarrow import parquet
from trace_files import BYTES, rows, sequence, writer, written

from paceline.data import answers
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.serve.admin.traces import SCHEMA, Trace, TraceWriter
from paceline.types import GrammarSpec, SamplingParams, Sequence


def make_older(path: Path, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(path, (when, when))


def test_a_trace_says_what_the_engine_did(tmp_path: Path) -> None:
    target = FakeTarget(vocab_size=258)
    engine = Engine(target, BYTES, ScriptedDrafter(target, 3, accuracy=0.6))
    params = [
        SamplingParams(max_tokens=20),
        SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=9, stop=("\0\0\0",)),
    ]
    ids = [engine.add(BYTES.encode(text), each) for text, each in zip(("one", "two"), params, strict=True)]
    one, done = writer(tmp_path), dict[int, Sequence]()
    began = time.time()
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish_reason:
                done[chunk.sequence.request_id] = chunk.sequence
                one.offer(chunk.sequence, chunk.finish_reason, None)
    one.close()
    by_prompt = {bytes(row["prompt_ids"][1:]): row for row in rows(tmp_path)}
    for text, request_id in zip((b"one", b"two"), ids, strict=True):
        row, seq = by_prompt[text], done[request_id]
        assert row["prompt_ids"] + row["answer_ids"] == seq.tokens and row["answer_ids"] == seq.output_ids
        assert list(zip(row["drafted"], row["accepted"], strict=True)) == [one[:2] for one in seq.rounds]
        assert 1 + sum(row["accepted"]) + len(seq.rounds) == len(row["answer_ids"])
        assert row["text"] == BYTES.decode(seq.output_ids) and row["finish_reason"] == "length"
        assert 0 < row["first_token_s"] <= row["total_s"] and row["verify_s"] == pytest.approx(seq.timings.verify_s)
        assert (row["model"], row["tag"], row["turn"], row["source"]) == ("tiny", None, 0, "traces")
        assert row["seed"] == seq.seed and abs(row["ended"].timestamp() - began) < 60
    assert json.loads(by_prompt[b"one"]["sampling"]) == {"max_tokens": 20}
    sampling = {"temperature": 0.7, "top_k": 5, "seed": 3, "max_tokens": 9, "stop": ["\0\0\0"]}
    assert json.loads(by_prompt[b"two"]["sampling"]) == sampling
    assert one.written == 2 and not any(one.dropped.values())


def test_whose_drafts_an_answer_had_and_what_it_was_taken_for(tmp_path: Path) -> None:
    """A tag that is redacted leaves no digest either."""
    plain, tagged = sequence(), sequence("Say more.")
    tagged.drafter, tagged.cluster = "tickets", "tag:a tag"
    row, other = written(tmp_path / "one", plain, tagged)
    assert (row["drafter"], row["cluster"], other["drafter"]) == (None, None, "tickets")
    assert other["cluster"].startswith("tag-") and "a tag" not in other["cluster"]
    assert written(tmp_path / "two", tagged, redact=("a tag",))[0]["cluster"] is None


def test_the_columns_are_those_of_answers_and_nothing_about_the_client(tmp_path: Path) -> None:
    columns = list(answers.SCHEMA)
    assert list(SCHEMA)[: len(columns)] == columns
    more = {"model", "tag", "ended", "sampling", "seed", "drafted", "accepted", "num_reused", "drafter", "cluster"}
    more |= {f"{name}_s" for name in ("queue", "prefill", "first_token", "draft", "verify", "host", "total")}
    assert {field.name for field in SCHEMA} - {field.name for field in columns} == more
    written(tmp_path, sequence())
    (path,) = tmp_path.iterdir()
    assert parquet.ParquetFile(path).schema_arrow.remove_metadata() == SCHEMA
    assert path.stat().st_mode & 0o077 == 0, "for the owner alone"


def test_the_same_prompt_is_held_out_as_one(tmp_path: Path) -> None:
    from paceline.train.documents.dataset import prompt_of

    written_rows = written(tmp_path, sequence(), sequence(temperature=0.5), sequence("Other."))
    assert len({row["key"] for row in written_rows}) == 3
    assert len({prompt_of(row["key"]) for row in written_rows}) == 2


def test_every_kind_of_parameter_and_odd_text(tmp_path: Path) -> None:
    odd = sequence(logit_bias={3: float("-inf"), 4: 1.5}, stop=("\0",), grammar=GrammarSpec("regex", "a+"))
    one = writer(tmp_path)
    one.offer(odd, "stop", "t\udcffg")
    one.close()
    (row,) = rows(tmp_path)
    sampling = json.loads(row["sampling"])
    assert sampling["logit_bias"] == {"3": "-inf", "4": "1.5"} and sampling["grammar"] == {
        "kind": "regex",
        "text": "a+",
    }
    assert row["tag"] == "t?g" and row["text"] == "It."


def test_a_request_that_cannot_be_written_costs_itself_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = sequence()
    broken.rounds = [(1,)]  # pyright: ignore[reportAttributeAccessIssue]
    one = writer(tmp_path)
    one.offer(broken, "stop")
    one.offer(sequence(), "stop")
    one.close()
    assert len(rows(tmp_path)) == one.written == 1 and one.dropped["error"] == 1
    assert "a trace is lost" in caplog.text


def test_requests_that_ended_before_they_began_and_mocked_ones(tmp_path: Path) -> None:
    waiting, mocked = Sequence(1, [1, 2], 2, SamplingParams()), sequence()
    waiting.timings.arrival_s = time.perf_counter()
    mocked.lossless = False
    one = writer(tmp_path)
    one.offer(waiting, "abort")
    one.offer(mocked, "stop")
    one.close()
    (row,) = rows(tmp_path)
    assert (row["answer_ids"], row["drafted"], row["text"], row["first_token_s"]) == ([], [], "", None)
    assert row["finish_reason"] == "abort" and not any(one.dropped.values())


def test_sampling(tmp_path: Path) -> None:
    written_rows = written(tmp_path, *(sequence() for _ in range(400)), sample=0.25)
    assert 50 < len(written_rows) < 150


def test_a_full_queue_drops_and_counts_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), TraceWriter._row

    def slow(self: TraceWriter, trace: Any) -> Any:
        gate.wait()
        return real(self, trace)

    monkeypatch.setattr(TraceWriter, "_row", slow)
    one = writer(tmp_path, queue_size=4)
    seq = sequence()
    for _ in range(100):
        one.offer(seq, "stop")  # one that waits would wait for the gate, for ever
    assert 95 <= one.dropped["queue"] <= 96, "four wait, and one may be in the thread's hands"
    gate.set()
    one.close()
    assert one.written == len(rows(tmp_path)) == 100 - one.dropped["queue"]
    one.offer(seq, "stop")
    assert one.written + one.dropped["queue"] == 101, "after the end all is lost"


def test_shards_by_number_and_by_time(tmp_path: Path) -> None:
    written_rows = written(tmp_path, *(sequence() for _ in range(7)), rows_per_file=3)
    assert len(written_rows) == 7
    sizes = [parquet.ParquetFile(path).metadata.num_rows for path in sorted(tmp_path.iterdir())]
    assert sum(sizes) == 7 and max(sizes) == 3
    soon = writer(tmp_path / "soon", flush_s=0.05)
    soon.offer(sequence(), "stop")
    wait_until(lambda: soon.written == 1)
    soon.close()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
def test_a_full_disk_loses_traces_says_so_once_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(table: Any, file: Any, **options: Any) -> None:
        file.write(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device")

    caplog.set_level(logging.WARNING, "paceline.serve")
    monkeypatch.setattr(parquet, "write_table", full)
    one = writer(tmp_path, rows_per_file=2, flush_s=0.02)
    for _ in range(6):
        one.offer(sequence(), "stop")
    wait_until(lambda: one.dropped["disk"] == 6)
    assert [record.message.startswith("traces are lost") for record in caplog.records] == [True]
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir()), "nothing half is left"
    time.sleep(0.1)  # nothing to write is no recovery
    monkeypatch.undo()
    one.offer(sequence(), "stop")
    wait_until(lambda: one.written == 1)
    one.close()
    assert [record.message for record in caplog.records][1:] == ["traces are written again; 6 were lost"]
    assert len(rows(tmp_path)) == 1


def test_a_folder_that_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    one = writer(tmp_path / "file" / "traces")
    one.offer(sequence(), "stop")
    one.close()
    assert one.dropped["disk"] == 1 and caplog.text.count("traces are lost") == 1


def test_requests_do_not_notice_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda number: gate.wait())
    target = FakeTarget(vocab_size=258)
    engine = Engine(target, BYTES, ScriptedDrafter(target, 3))
    one = writer(tmp_path, queue_size=8, rows_per_file=1)
    for number in range(40):
        engine.add([number + 1] * 4, SamplingParams(max_tokens=6))
    num_done = 0
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish_reason:
                num_done += 1
                one.offer(chunk.sequence, chunk.finish_reason)
    assert num_done == 40 and one.dropped["queue"] >= 40 - 8 - 1
    gate.set()
    one.close()
    assert one.written + one.dropped["queue"] == 40


@pytest.mark.slow
def test_the_oldest_go_by_size(tmp_path: Path) -> None:
    written(tmp_path, *(sequence(answer=os.urandom(500).hex()) for _ in range(10)), rows_per_file=1)
    paths = sorted(tmp_path.iterdir())
    size = max(path.stat().st_size for path in paths)
    for age, path in enumerate(reversed(paths)):
        make_older(path, 100 * age)
    (tmp_path / "answers-r0-00000.parquet").write_bytes(b"x" * 10 * size)  # not a trace
    writer(tmp_path, max_bytes=4 * size).close()
    left = sorted(tmp_path.glob("traces-*"))
    assert left == paths[-len(left) :] and 3 <= len(left) <= 4
    assert (tmp_path / "answers-r0-00000.parquet").exists()
    written(tmp_path, *(sequence(answer=os.urandom(500).hex()) for _ in range(4)), rows_per_file=1, max_bytes=4 * size)
    assert sum(path.stat().st_size for path in tmp_path.glob("traces-*")) <= 4 * size
    assert not set(left) & set(tmp_path.glob("traces-*"))


@pytest.mark.slow
def test_the_oldest_go_by_age_also_when_nothing_is_asked(tmp_path: Path) -> None:
    written(tmp_path, sequence(), sequence(), rows_per_file=1)
    old, new = sorted(tmp_path.iterdir())
    killed = tmp_path / f"{old.name}.{'0' * 16}.part"
    killed.write_bytes(b"PAR1")
    idle = writer(tmp_path, max_days=1000 / 86400, flush_s=0.02)
    time.sleep(0.1)
    assert old.exists() and new.exists() and killed.exists()
    for path in (old, killed):
        make_older(path, 2000)
    wait_until(lambda: not old.exists() and not killed.exists())
    idle.close()
    assert new.exists()


def test_files_and_folders_of_others_stay_and_stop_no_pruning(tmp_path: Path) -> None:
    written(tmp_path, *(sequence(answer=os.urandom(500).hex()) for _ in range(4)), rows_per_file=1)
    shards, size = sorted(tmp_path.iterdir()), max(path.stat().st_size for path in tmp_path.iterdir())
    mine = [tmp_path / "traces-mine.txt", tmp_path / f"{shards[0].name}.bak", tmp_path / "traces-old"]
    mine[0].write_text("notes")
    mine[1].write_text("a copy")
    mine[2].mkdir()
    (tmp_path / shards[0].name.replace("-00000.", "-00009.")).mkdir()
    for path in (*mine, *tmp_path.glob("*-00009.*")):
        make_older(path, 90000)
    one = writer(tmp_path, max_bytes=2 * size, max_days=1)
    one.close()
    assert all(path.exists() for path in mine) and one.dropped["disk"] == 0
    assert len([path for path in tmp_path.glob("traces-*.parquet") if path.is_file()]) <= 2


def test_a_shard_that_cannot_be_deleted_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be removed, such as another user's in a sticky folder: earlier writes stay."""
    written(tmp_path, *(sequence() for _ in range(3)), rows_per_file=1)
    theirs, *ours = sorted(tmp_path.iterdir())
    for path in (theirs, *ours):
        make_older(path, 2 * 86400)
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path == theirs:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    one = writer(tmp_path, max_days=1)
    one.offer(sequence(), "stop")
    one.close()
    assert theirs.exists() and not any(path.exists() for path in ours)
    assert one.written == 1 and one.dropped["disk"] == 0
    assert "old traces are not deleted" in caplog.text and "lost" not in caplog.text


@pytest.mark.parametrize(
    "odd",
    [{"seed": 2**70}, {"model": {"name": "tiny"}}, {"model": "\ud800"}, {"num_reused": "many"}, {"drafted": [2**40]}],
    ids=str,
)
def test_a_row_that_fits_no_column_takes_no_other_with_it(tmp_path: Path, odd: dict[str, Any]) -> None:
    """Nor does it end the thread that writes."""
    one = writer(tmp_path)
    fields: dict[str, Any] = {
        "prompt_ids": [1],
        "answer_ids": [2],
        "finish_reason": "stop",
        "ended": 1e9,
        "temperature": 0.0,
    }
    for more in ({}, odd, {}):
        one.put(lambda more=more: [Trace(**{**fields, "sampling": {}, **more})])
    one.close()
    assert one.written == len(rows(tmp_path)) == 2 and one.dropped["error"] == 1 and one.dropped["disk"] == 0


@pytest.mark.slow
def test_writers_share_a_folder(tmp_path: Path) -> None:
    pair = [writer(tmp_path, rows_per_file=1) for _ in range(2)]
    for _ in range(5):
        for one in pair:
            one.offer(sequence(), "stop")
    for one in pair:
        one.close()
    assert len({row["key"] for row in rows(tmp_path)}) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": 0.0}, "above 0 and at most 1, not 0"),
        ({"sample": 1.5}, "at most 1, not 1.5"),
        ({"max_bytes": 0}, "max_bytes must be"),
        ({"max_days": float("nan")}, "max_days must be"),
        ({"redact": ["("]}, "no regular expression"),
        ({"redact": ["x*"]}, "make it narrower"),
        ({"redact": [r"\w+"]}, "make it narrower"),
    ],
)
def test_impossible_values(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=message):
        writer(tmp_path, **options)
    assert threading.active_count() == before


def test_threads_end_and_offers_are_a_few_calls(tmp_path: Path) -> None:
    before = threading.active_count()
    one = writer(tmp_path, queue_size=5000)
    seq = sequence()
    calls = [num_calls(lambda: one.offer(seq, "stop")) for _ in range(200)]
    one.close()
    assert threading.active_count() == before and one.written == 200
    assert max(calls) < 40
