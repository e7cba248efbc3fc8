"""Fields that the proxy adds to requests, its own metrics, and many streams at once."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from upstream import Asked, chunked, completion, events, recorded, whole

from paceline.errors import ConfigError
from paceline.loop.record.config import RecordConfig
from paceline.loop.record.exchange import ADDED, MAX_BYTES, with_fields
from paceline.loop.record.metrics import RecordMetrics
from paceline.loop.record.run import proxy
from paceline.model.text.tokenizer import Tokenizer
from paceline.report.tables import Progress
from paceline.serve.settings import ServeConfig, TraceConfig

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "Say hello."}]
PATH = "/v1/chat/completions"
NUM_STREAMS = 64


def with_ids(model: Path) -> Any:
    """An answer like vLLM's: its tokens if the request has the field, and reasoning apart from the text."""
    tokenizer = Tokenizer.from_path(model)
    ids = [*tokenizer.encode("Hm.Hello."), *tokenizer.eos_token_ids]

    def answer(request: Asked) -> Iterable[bytes]:
        is_requested = json.loads(request.body).get("return_token_ids")
        reply = completion("Hello.", choice={"token_ids": ids} if is_requested else {})
        reply["choices"][0]["message"] = {"role": "assistant", "content": "Hello.", "reasoning": "Hm."}
        return whole(reply)

    return answer


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1.50, "b": "\xc3\xa9{"}', b'{"x": true, "y": true, "a": 1.50, "b": "\xc3\xa9{"}'),
        (b" \n{}", b' \n{"x": true, "y": true}'),
        (b'{"x": false}', b'{"y": true, "x": false}'),
        (b'{"x": null, "y": 0}', None),
        (b'{"a": {"x": 1}, "y": 1}', b'{"x": true, "a": {"x": 1}, "y": 1}'),
        (b"[{}]", None),
        (b'{"a": ', None),
        (b"", None),
        ('{"a": 1}'.encode("utf-16"), None),
        (b"\x1f\x8b\x00", None),
    ],
)
def test_a_body_gets_what_it_lacks_and_keeps_its_bytes(body: bytes, expected: bytes | None) -> None:
    assert with_fields(body, ("x", "y")) == (body if expected is None else expected)


def test_reasoning_keeps_its_tokens(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(model)
    with recorded(with_ids(model), model, tmp_path / "store", add_fields="vllm") as one:
        body = json.dumps({"messages": HELLO, "temperature": 0.5}).encode()
        status, data = one.ask(body)
        assert one.upstream and status == 200 and json.loads(data)["choices"][0]["token_ids"]
        (request,) = one.upstream.asked
        assert request.body == body.replace(b"{", b'{"return_token_ids": true, ', 1)
        assert (
            request.headers["content-length"] == str(len(request.body)) and "transfer-encoding" not in request.headers
        )
        assert one.ask({"messages": HELLO, "return_token_ids": False})[0] == 200
        first, second = one.rows()
    assert first["answer_ids"] == [*tokenizer.encode("Hm.Hello."), *tokenizer.eos_token_ids]
    assert second["answer_ids"] == [], "the client asked for none"


def test_it_is_off_by_default_and_for_other_requests(model: Path, tmp_path: Path) -> None:
    for number, (add_fields, path) in enumerate((("none", PATH), ("vllm", "/v1/embeddings"), ("sglang", "/generate"))):
        folder = tmp_path / str(number)
        with recorded(lambda request: whole(completion("Hi.")), model, folder, add_fields=add_fields) as one:
            body = json.dumps({"messages": HELLO}).encode()
            assert one.ask(body, path)[0] == 200 and one.upstream
            assert one.upstream.asked[0].body == body


def test_sglang_gets_the_fields_that_its_streams_accept(model: Path, tmp_path: Path) -> None:
    with recorded(lambda request: whole(completion("Hi.")), model, tmp_path / "store", add_fields="sglang") as one:
        one.ask({"messages": HELLO, "stream": True})
        one.ask({"prompt": "a"}, "/v1/completions")
        assert one.upstream
        chat, text = (json.loads(request.body) for request in one.upstream.asked)
    assert {name for name in chat if name.startswith("return_")} == {*ADDED["sglang"][True]}
    assert "return_token_ids" not in chat and text["return_token_ids"] is text["return_spec_tokens_details"] is True


def test_bodies_in_pieces_and_beyond_the_limit(model: Path, tmp_path: Path) -> None:
    """One in chunks is changed and stays in chunks; one too large passes as it came."""

    def answer(request: Asked) -> Iterable[bytes]:
        return whole(completion("Hi."))

    body = json.dumps({"messages": HELLO}).encode()
    large = body[:-1] + b" " * MAX_BYTES + b"}"
    with recorded(answer, model, tmp_path / "store", add_fields="vllm") as one:
        assert one.ask(large)[0] == 200 and one.upstream
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        connection.request("POST", PATH, iter([body[:9], body[9:]]), encode_chunked=True)
        assert connection.getresponse().status == 200
        connection.close()
        request, in_chunks = one.upstream.asked
        assert request.body == large and request.headers["content-length"] == str(len(large))
        assert in_chunks.headers["transfer-encoding"] == "chunked" and "content-length" not in in_chunks.headers
        assert in_chunks.body == with_fields(body, ("return_token_ids",))


def figures(metrics: RecordMetrics) -> dict[str, float]:
    """Name, with the reason of what was dropped, -> value."""
    samples = (sample for family in metrics.collect() for sample in family.samples)
    return {each.name.removeprefix("paceline:record_") + each.labels.get("reason", ""): each.value for each in samples}


def test_64_streams_at_once(model: Path, tmp_path: Path) -> None:
    """Each waits in its middle until all are open; all arrive whole, and none is lost."""
    all_open, go_on = threading.Semaphore(0), threading.Event()
    pieces = events(completion("Hel", None, is_delta=True), completion("lo.", is_delta=True))

    def answer(request: Asked) -> Iterable[bytes]:
        for number, piece in enumerate(chunked(pieces)):
            yield piece
            if number == 1:
                all_open.release()
                assert go_on.wait(60)

    with recorded(answer, model, tmp_path / "store") as one, ThreadPoolExecutor(NUM_STREAMS) as clients:
        assert one.server is not None and one.recorder is not None
        metrics = RecordMetrics(one.server.proxy, one.recorder.waiting_bytes, one.writer)
        body = {"messages": HELLO, "stream": True}
        answers = [clients.submit(one.ask, body, PATH, {"x-paceline-tag": str(each)}) for each in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert all_open.acquire(timeout=60)
        at_once = figures(metrics)
        go_on.set()
        assert all(each.result() == (200, b"".join(pieces)) for each in answers)
        rows = one.rows()
        after = figures(metrics)
    assert (at_once["open"], at_once["requests_total"], at_once["traces_total"]) == (NUM_STREAMS, NUM_STREAMS, 0)
    assert sorted(int(row["tag"]) for row in rows) == [*range(NUM_STREAMS)]
    assert {row["text"] for row in rows} == {"Hello."}
    assert (after["open"], after["traces_total"], after["answers_total"]) == (0, NUM_STREAMS, NUM_STREAMS)
    assert after["waiting_bytes"] == 0 and {value for name, value in after.items() if "dropped" in name} == {0.0}


def test_metrics_of_the_proxy_and_of_the_server(model: Path, tmp_path: Path) -> None:
    """The server's own stay where they were; the proxy's have a port on loopback."""

    def answer(request: Asked) -> Iterable[bytes]:
        return whole(b"vllm:up 1\n") if request.target == "/metrics" else whole(completion("Hi.", metrics=METRICS))

    with recorded(answer, model, tmp_path / "store") as one:
        assert one.server is not None and one.recorder is not None
        metrics = RecordMetrics(one.server.proxy, one.recorder.waiting_bytes, one.writer)
        serving = metrics.serve(0)
        assert one.ask({"messages": HELLO})[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == b"vllm:up 1\n"
        connection.close()
        one.stop()
        assert serving.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{serving.server_port}/metrics", timeout=60) as page:
            families = {family.name: family for family in text_string_to_metric_families(page.read().decode())}
        serving.shutdown()
        serving.server_close()
    dropped = {sample.labels["reason"]: sample.value for sample in families["paceline:record_dropped"].samples}
    assert dropped["rounds"] == 1 and dropped["queue"] == 0
    assert [families[f"paceline:record_{name}"].samples[0].value for name in ("requests", "traces", "open")] == [
        1,
        1,
        0,
    ]


METRICS = {"speculative_decoding": {"num_spec_steps": 3}}


def test_options_of_the_proxy_that_cannot_be(model: Path, tmp_path: Path) -> None:
    for settings in ({"add_fields": "vllm"}, {"metrics_port": 9000}):
        with pytest.raises(ConfigError, match="leave them out with --import"):
            RecordConfig("tiny", imports=(tmp_path,), **settings)
    with pytest.raises(ConfigError, match="add_fields must be one of none, vllm, sglang"):
        RecordConfig("tiny", "http://a", add_fields="llama")
    with pytest.raises(ConfigError, match="metrics_port must be between"):
        RecordConfig("tiny", "http://a", metrics_port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = RecordConfig(str(model), "http://127.0.0.1:1", metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another --metrics-port"):
            proxy(config, ServeConfig(port=0), TraceConfig(tmp_path / "store"), progress=Progress())
