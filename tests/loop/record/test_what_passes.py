"""`record` with unusual answers, and its counts: marks before streams, packed parts, samples, prompts
alone."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from doubles import ByteTokenizer
from starlette.datastructures import Headers

from paceline.loop.record.exchange import GZIP, MAX_MEMBERS, Observed
from paceline.loop.record.reader import Reader, _num_reused
from paceline.loop.record.response import Response
from paceline.loop.record.run import MAX_WAITING_BYTES, Recorder
from paceline.net.streaming import Stream
from paceline.serve.admin.traces import Lost, Trace, TraceWriter
from paceline.serve.settings import TraceConfig
from paceline.train.plan.current_traffic import seen_in_traces

BOM = b"\xef\xbb\xbf"
PIECES = [
    b'{"choices": [{"delta": {"content": "Hel"}}]}',
    b'{"choices": [{"delta": {"content": "lo there."}}]}',
    b"[DONE]",
]


def observed(body: bytes, kind: str = "text/event-stream", encoding: str = "", request: bytes = b"{}") -> Observed:
    """An exchange whose answer is this."""
    one = Observed(True, Headers({}))
    one.request.take(request)
    one.begins(200, [(b"content-type", kind.encode()), (b"content-encoding", encoding.encode())])
    one.take(body)
    one.ends()
    return one


def content(one: Observed) -> str:
    return "".join(chunk["choices"][0]["delta"]["content"] for chunk in one.exchange().chunks)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", BOM])
def test_a_stream_is_read_whole_with_any_mark_and_ends_of_lines(mark: bytes, end: bytes) -> None:
    stream = mark + b"".join(b"data: " + piece + end + end for piece in PIECES)
    assert content(observed(stream)) == "Hello there."


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_of_several_lines_is_one(end: bytes) -> None:
    parts = [b'data: {"choices": [{"delta":', b'data: {"content": "Hello"}}]}', b"", b"data: [DONE]", b"", b""]
    assert content(observed(end.join(parts))) == "Hello"


def test_ends_of_lines_may_differ_within_a_stream() -> None:
    stream = b"data: " + PIECES[0] + b"\n\r\n" + b"data: " + PIECES[1] + b"\r\n\n" + b"data: [DONE]\n\n"
    assert content(observed(stream)) == "Hello there."


def test_the_client_of_benchmarks_reads_over_the_mark_too() -> None:
    stream = Stream(0.0)
    stream.pieces = [(1.0, BOM[:1]), (2.0, BOM[1:] + b"data: first\n\nda"), (3.0, b"ta: second\n\n")]
    assert list(stream.events()) == [(2.0, b"first"), (3.0, b"second")]


def test_packed_parts_are_one_answer() -> None:
    body = json.dumps({"choices": [{"delta": {"content": "Hello"}}]}).encode()
    packed = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert content(observed(packed, "application/json", "gzip")) == "Hello"
    assert content(observed(gzip.compress(body) + b"\0\0", "application/json", "gzip")) == "Hello"
    with pytest.raises(Lost, match="unreadable"):
        observed(packed[:-9], "application/json", "gzip").exchange()
    with pytest.raises(Lost, match="unreadable"):
        observed(gzip.compress(body) + GZIP + b"no", "application/json", "gzip").exchange()


def test_members_of_a_packed_body_are_bounded() -> None:
    body, empty = gzip.compress(json.dumps({"choices": [{"delta": {"content": "Hello"}}]}).encode()), gzip.compress(b"")
    assert content(observed(body + empty * (MAX_MEMBERS - 1), "application/json", "gzip")) == "Hello"
    with pytest.raises(Lost, match="unreadable"):
        observed(body + empty * MAX_MEMBERS, "application/json", "gzip").exchange()


@pytest.mark.parametrize(
    "odd",
    [{"choices": [{"finish_reason": ["stop"]}]}, {"choices": [{"finish_reason": {}}]}, {"model": 5, "choices": []}],
    ids=str,
)
def test_parts_of_other_types_are_unreadable_not_an_error(odd: dict[str, Any]) -> None:
    with pytest.raises(Lost, match="unreadable"):
        Response.of([odd])


def test_cached_tokens_of_another_type_are_not_known() -> None:
    assert _num_reused({"prompt_tokens_details": {"cached_tokens": 7}}) == 7
    for odd in ([], {"cached_tokens": "7"}, {"cached_tokens": 2**40}, {"cached_tokens": -1}, 5):
        assert _num_reused({"prompt_tokens_details": odd}) is None


class Silent:
    """A reader that needs no exchange."""

    def traces(self, exchange: Any) -> list[Trace]:
        return [Trace([1], [2], "stop", 1e9, 0.0, {})]


def recorder(folder: Path, **options: Any) -> tuple[TraceWriter, Recorder]:
    sample = options.pop("sample", 1.0)
    writer = TraceWriter(TraceConfig(folder, sample=sample), "tiny", **options)
    writer.begin(cast(Any, ByteTokenizer()))
    return writer, Recorder(cast(Reader, Silent()), writer)


def large(each: int) -> Observed:
    """An answer that says that it has 8 MiB."""
    one = observed(b'{"choices": []}', "application/json")
    one.answer.num_bytes = 8 * 2**20 - each % 2
    return one


def test_a_sample_is_recorded_for_ever(tmp_path: Path) -> None:
    """2,000 answers of 8 MiB, of which a tenth is kept: none of them waits, so none is lost."""
    writer, one = recorder(tmp_path, sample=0.1, queue_size=4096)
    for each in range(2000):
        one.keep(large(each))
        if each % 20 == 19:
            idle(writer)
    writer.close()
    assert writer.dropped["queue"] == 0 and 100 < writer.written + sum(writer.dropped.values()) < 320


def test_what_is_not_in_the_sample_is_not_lost(tmp_path: Path) -> None:
    """Also while too many bytes wait."""
    writer, one = recorder(tmp_path, sample=1e-300)
    one._num_taken = MAX_WAITING_BYTES + 1
    one.keep(large(0))
    assert writer.dropped["queue"] == 0
    writer._config = TraceConfig(tmp_path)
    one.keep(large(0))
    writer.close()
    assert writer.dropped["queue"] == 1 and one._num_taken == MAX_WAITING_BYTES + 1


def test_what_a_full_queue_refuses_does_not_wait(tmp_path: Path) -> None:
    writer, one = recorder(tmp_path, queue_size=1)
    gate, is_held = threading.Event(), threading.Event()

    def hold() -> list[Trace]:
        is_held.set()
        gate.wait(60)
        return []

    writer.put(cast(Callable[[], Any], hold))
    assert is_held.wait(60)
    for each in range(100):
        one.keep(large(each))
    assert one._num_taken < MAX_WAITING_BYTES, "one of them waits, 99 were refused"
    gate.set()
    idle(writer)
    one.keep(large(0))
    writer.close()
    assert writer.dropped["queue"] == 99


def idle(writer: TraceWriter) -> None:
    """Wait until all that was put before has been read."""
    done = threading.Event()
    sample, writer._config = writer._config, TraceConfig(writer.folder)
    writer.put(lambda: [done.set()][:0], wait=True)  # type: ignore[func-returns-value]
    writer._config = sample
    assert done.wait(60)


def test_prompts_alone_are_no_answers(tmp_path: Path) -> None:
    writer, _ = recorder(tmp_path)
    for answer in ([5, 6], [], [7]):
        writer.put(lambda answer=answer: [Trace([1, 2], answer, "stop", 1e9, 0.0, {})])
    writer.close()
    assert (writer.written, writer.num_answers) == (3, 2)
    assert seen_in_traces(tmp_path).source.startswith("2 answers and 1 prompts without one in ")
