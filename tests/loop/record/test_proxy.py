"""The proxy: what passes is untouched, what is kept is true, and nothing is kept that should not be."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import Live, serving, wait_until
from small_llm import tiny_model
from upstream import Asked, CutOff, chunked, completion, events, recorded, recording, whole

from paceline import LLM
from paceline.data.answers import AnswerShards
from paceline.model.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow
KEY = "sk-very-secret-0123456789"
HELLO = [{"role": "user", "content": "Say hello."}]
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position=2048)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    """A server that asks for a key."""

    def load() -> LLM:
        return LLM(str(model), drafter="ngram", dtype="float32", device="cpu", max_batch=4, speculate="full")

    with serving(load, api_keys=(KEY,)) as running:
        yield running


def raw(port: int, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "POST", PATH, json.dumps(body), {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    )
    answer = connection.getresponse()
    response = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return response


def without_id(data: bytes) -> list[Any]:
    """A real server names each answer anew."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
    return [{**json.loads(line), "id": 0, "created": 0} for line in lines]


def test_a_real_server_answers_through_it_as_without(live: Live, model: Path, tmp_path: Path) -> None:
    request = {"messages": HELLO, "temperature": 0, "max_tokens": 30, "stream": True}
    with recording(live.url, model, tmp_path / "store") as one:
        through, direct = raw(one.port, request), raw(live.port, request)
        refused = [openai_error(client) for client in (one.client(), live.client())]
        missing = raw(one.port, {"messages": []})[::2]
        assert missing == raw(live.port, {"messages": []})[::2] and missing[0] == 400
        client = one.client(KEY)
        names = [each.id for each in client.models.list()]
        texts = [client.chat.completions.create(model=names[0], **whole_of(request)).choices[0].message.content]
        chunks = list(
            client.chat.completions.create(model=names[0], messages=HELLO, temperature=0, max_tokens=30, stream=True)
        )
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert through[0] == direct[0] == 200 and without_id(through[2]) == without_id(direct[2])
    assert {*through[1]} == {*direct[1]} and through[1]["content-type"] == direct[1]["content-type"]
    assert refused[0] == refused[1] and "API key" in refused[0]
    assert texts[0] == texts[1] and names == ["tiny"]


def whole_of(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name != "stream"}


def openai_error(client: openai.OpenAI) -> str:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    return str(caught.value)


def test_every_byte_and_header_passes_and_keys_reach_no_file(model: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    stream = events(
        completion("Hel", None, is_delta=True),
        completion("lo.", is_delta=True),
        {"choices": [], "usage": {"prompt_tokens": 43}},
    )
    num_prompt = len(tokenizer.encode_chat(HELLO))
    stream[2:3] = events({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": 7}}, done=False)
    body = {"model": "tiny", "messages": HELLO, "stream": True, "temperature": 0.5, "seed": 3, "user": "somebody"}
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "cookie": f"k={KEY}", "x-paceline-tag": "greetings"}
    with recorded(lambda request: chunked(stream), model, tmp_path / "store") as one:
        status, data = one.ask(body, PATH + f"?api-key={KEY}", headers)
        untagged = {name: value for name, value in headers.items() if name != "x-paceline-tag"}
        assert one.ask(body, PATH, untagged)[0] == 200 and one.upstream
        request, _ = one.upstream.asked
        rows = one.rows()
    assert (status, data) == (200, b"".join(stream))
    assert request.target == PATH + f"?api-key={KEY}" and request.body == json.dumps(body).encode()
    assert {name: request.headers[name] for name in headers} == headers and request.headers["host"] == one.upstream.url[
        7:
    ]
    row, other = rows
    assert other["tag"] is None
    assert row["prompt_ids"] == tokenizer.encode_chat(HELLO) and row["text"] == "Hello."
    assert row["answer_ids"] == [*tokenizer.encode("Hello."), *tokenizer.eos_token_ids]
    assert (row["finish_reason"], row["temperature"], row["seed"], row["tag"]) == ("stop", 0.5, 3, "greetings")
    assert row["model"] == "tiny" and json.loads(row["sampling"]) == {"temperature": 0.5, "seed": 3}
    assert row["drafted"] is row["accepted"] is row["verify_s"] is row["num_reused"] is None
    assert 0 < row["first_token_s"] <= row["total_s"] < 60 and abs(row["ended"].timestamp() - time.time()) < 60
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 1 and all(KEY.encode() not in path.read_bytes() for path in files)
    assert "somebody" not in str(rows) and {answer.text for answer in AnswerShards(one.folder)} == {"Hello."}


def test_an_answer_arrives_as_it_is_said(model: Path, tmp_path: Path) -> None:
    """The second piece comes only when the first has been read."""
    read = threading.Event()

    def slowly(request: Asked) -> Iterator[bytes]:
        for piece in chunked(events(completion("a", None, is_delta=True), completion("b", is_delta=True))):
            yield piece
            if b'"a"' in piece:
                assert read.wait(30)

    with recorded(slowly, model, tmp_path / "store") as one, one.client() as client:
        stream = iter(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))  # pyright: ignore
        assert next(stream).choices[0].delta.content == "a"
        read.set()
        assert next(stream).choices[0].delta.content == "b"
        stream.close()


def test_packed_answers_pass_packed_and_are_read(model: Path, tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps(completion("Hello.")).encode())
    with recorded(lambda request: whole(packed, "Content-Encoding: gzip\r\n"), model, tmp_path / "store") as one:
        assert one.ask({"messages": HELLO}, headers={"accept-encoding": "gzip"}) == (200, packed)
        assert [row["text"] for row in one.rows()] == ["Hello."]


def test_failures_pass_as_they_are_and_are_not_kept(model: Path, tmp_path: Path) -> None:
    refusal = {"error": {"message": "no", "code": 429}}

    def answer(request: Asked) -> Iterator[bytes]:
        kind = json.loads(request.body)["kind"]
        cut = events(completion("Hel", None, is_delta=True), done=False)
        if kind == "status":
            yield from whole(refusal, "Retry-After: 7\r\n", "429 Too Many Requests")
        elif kind == "broken":
            yield from whole(b"{nonsense")
        elif kind == "error":
            yield from chunked(events(refusal))
        elif kind == "unended":
            yield from chunked(cut)
        elif kind == "dies":
            yield from chunked(cut, end=b"5\r\nda")
            raise CutOff
        else:
            raise CutOff

    with recorded(answer, model, tmp_path / "store") as one:
        chat = {"messages": HELLO}
        assert one.ask({**chat, "kind": "status"}) == (429, json.dumps(refusal).encode())
        assert one.ask({**chat, "kind": "broken"}) == (200, b"{nonsense")
        assert one.ask({**chat, "kind": "error"}) == (200, b"".join(events(refusal)))
        assert one.ask({**chat, "kind": "unended"})[0] == 200
        with pytest.raises(http.client.IncompleteRead):
            one.ask({**chat, "kind": "dies"})
        status, body = one.ask({**chat, "kind": "nothing"})
        assert status == 502 and json.loads(body)["error"]["code"] == "upstream_unreachable"
        assert one.rows() == []
    assert {reason: number for reason, number in one.writer.dropped.items() if number} == {"unreadable": 1, "failed": 2}


def test_a_server_that_is_not_there(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with recording(f"http://127.0.0.1:{port}", model, tmp_path / "store") as one:
        assert one.ask({"messages": HELLO})[0] == 502


def test_a_client_that_leaves_is_left_upstream_too(model: Path, tmp_path: Path) -> None:
    left = threading.Event()

    def endless(request: Asked) -> Iterator[bytes]:
        try:
            for piece in chunked(events(completion("on and ", None, is_delta=True), done=False) * 100_000):
                yield piece
                time.sleep(0.002)
        finally:
            left.set()

    with recorded(endless, model, tmp_path / "store") as one:
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        connection.request("POST", PATH, json.dumps({"messages": HELLO, "stream": True}))
        assert connection.getresponse().read(10)
        connection.close()
        assert left.wait(30)
        assert one.rows() == []


def test_a_client_that_does_not_read_is_not_read_for(model: Path, tmp_path: Path) -> None:
    """The proxy holds no more of an answer than its buffers."""
    sent = [0]

    def large(request: Asked) -> Iterator[bytes]:
        for piece in chunked([b"data: {}\n\n" * 10_000] * 400):
            yield piece
            sent[0] += len(piece)

    with recorded(large, model, tmp_path / "store") as one:
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        connection.request("POST", PATH, json.dumps({"messages": HELLO, "stream": True}))
        answer = connection.getresponse()
        before = -1
        while sent[0] != before:
            before = sent[0]
            time.sleep(0.3)
        assert before < 30 * 2**20, "most of 40 MB waits upstream"
        assert len(answer.read()) == 400 * 100_000
        connection.close()
        assert one.rows() == [] and one.writer.dropped["size"] == 1


def test_other_paths_and_methods_pass_and_are_not_kept(model: Path, tmp_path: Path) -> None:
    with recorded(
        lambda request: whole({"path": request.target, "method": request.method}), model, tmp_path / "store"
    ) as one:
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=60)
        for method, path in (("GET", "/v1/models"), ("DELETE", "/files/a%2Fb?x=%20"), ("POST", "/v1/embeddings")):
            connection.request(method, path, b"{}" if method == "POST" else None)
            answer = connection.getresponse()
            assert json.loads(answer.read()) == {"path": path, "method": method}
            assert answer.getheader("x-odd-case") == "kept" and answer.getheader("date") == "today"
        connection.close()
        assert one.rows() == [] and not any(one.writer.dropped.values())


def test_a_slow_disk_is_in_nobody_s_way(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.serve.admin.traces import TraceWriter

    gate, real = threading.Event(), TraceWriter._write

    def slow(self: TraceWriter, rows: Any) -> None:
        gate.wait(60)
        real(self, rows)

    monkeypatch.setattr(TraceWriter, "_write", slow)
    with recorded(lambda request: whole(completion("Hello.")), model, tmp_path / "store") as one:
        for _ in range(5):
            assert one.ask({"messages": HELLO})[0] == 200
        gate.set()
        wait_until(lambda: one.writer._queue.empty())
        assert len(one.rows()) == 5


def test_redaction_reaches_what_is_recorded(model: Path, tmp_path: Path) -> None:
    with recorded(
        lambda request: whole(completion("Write to a@b.cd now.")), model, tmp_path / "store", redact=(r"\S+@\S+",)
    ) as one:
        one.ask({"messages": HELLO})
        one.ask({"messages": [{"role": "user", "content": "I am x@y.zz"}]})
        first, second = sorted(one.rows(), key=lambda row: -len(row["answer_ids"]))
    assert first["text"] == "Write to " and first["finish_reason"] == "redacted"
    assert second["answer_ids"] == [] and all(b"@y.zz" not in path.read_bytes() for path in one.folder.iterdir())


def test_a_page_of_another_site_is_refused(model: Path, tmp_path: Path) -> None:
    """The name that the proxy is called by is not passed on, so it checks it as the server would."""
    with recorded(lambda request: whole(completion("Hello.")), model, tmp_path / "store") as one:
        assert one.ask({"messages": HELLO}, headers={"host": "evil.example"})[0] == 421
