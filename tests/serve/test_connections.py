"""Names the server answers to, and peers that are slow: hung up on, and nobody else notices."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from live_server import Live, chat_body, read_to_end, serving, talker, wait_until

from paceline.errors import ConfigError
from paceline.serve.http.security import allowed_hosts, host_name
from paceline.serve.requests.completions import chat_jobs
from paceline.serve.requests.protocol import ChatRequest
from paceline.serve.run import Connection
from paceline.serve.settings import ServeConfig

pytestmark = pytest.mark.slow


HEADER_S = 1.0


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    with serving(talker(0.01), write_seconds=0.3) as running:
        yield running


@pytest.fixture
def live(running: Live) -> Iterator[Live]:
    """One server for all, whose counts begin anew with each test."""
    running.seen.outcomes.clear()
    running.seen.refusals.clear()
    yield running
    wait_until(running.is_idle)
    wait_until(lambda: not running.server.server_state.connections)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    """A server that waits for headers for longer than a busy machine holds a client up."""
    with serving(talker(0.01), header_seconds=HEADER_S) as running:
        yield running


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=60)


def rest_of(connection: socket.socket) -> bytes:
    text = b""
    while piece := connection.recv(4096):
        text += piece
    connection.close()
    return text


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ServeConfig(), {"localhost", "127.0.0.1", "::1"}),
        (ServeConfig(host="::1"), {"localhost", "127.0.0.1", "::1"}),
        (ServeConfig(host="127.0.0.2"), {"localhost", "127.0.0.1", "127.0.0.2", "::1"}),
        (ServeConfig(host="0.0.0.0"), None),
        (ServeConfig(host="models.example"), None),
        (ServeConfig(host="0.0.0.0", allowed_hosts=("Models.example", "[::1]")), {"models.example", "::1"}),
        (ServeConfig(allowed_hosts=("*",)), None),
    ],
)
def test_which_names_are_answered(config: ServeConfig, names: set[str] | None) -> None:
    assert allowed_hosts(config) == names


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8000", "localhost"),
        ("LOCALHOST.", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("a.b:1", "a.b"),
        ("", ""),
    ],
)
def test_names_without_their_port(header: str, name: str) -> None:
    assert host_name(header) == name


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed host"):
        ServeConfig(allowed_hosts=(" ",))


def test_other_names_are_refused_on_every_path(live: Live) -> None:
    """DNS rebinding: a page of attacker.example resolves its own name to this machine."""
    for method, path in (("GET", "/"), ("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("GET", "/health")):
        status, body, _ = live.request(
            method, path, b"{}" if method == "POST" else None, {"host": "attacker.example:80"}
        )
        assert (status, body["error"]["code"]) == (421, "host_not_allowed")
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert live.request("GET", "/health", headers={"host": f"LocalHost:{live.port}"})[0] == 200
    assert live.seen.refusals == ["host_not_allowed"] * 4
    with serving(talker(), allowed_hosts=("models.example",)) as named:
        assert named.request("GET", "/health", headers={"host": "models.example"})[0] == 200
        assert named.request("GET", "/health", headers={"host": "127.0.0.1"})[0] == 421


def test_small_pieces_are_sent_at_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a first token waits for the client's word on what came before: 40 ms on a connection that is used again."""
    original, seen = Connection.connection_made, list[int]()

    def watch(self: Connection, transport: Any) -> None:
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        original(self, transport)

    monkeypatch.setattr(Connection, "connection_made", watch)
    connect(live).close()
    wait_until(lambda: bool(seen))
    assert seen[0] != 0


def test_headers_that_do_not_come_are_not_waited_for(hasty: Live) -> None:
    """Neither none at all nor some, and a byte now and then buys no time."""
    began = time.monotonic()
    silent, slow, dripping = connect(hasty), connect(hasty), connect(hasty)
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
    assert hasty.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200
    dripping.settimeout(0.05)
    text = b""
    while not text and time.monotonic() - began < 30:
        try:
            dripping.sendall(b"G")
            text = dripping.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            break
    dripping.close()
    assert HEADER_S <= time.monotonic() - began < 30
    for connection in (silent, slow):
        text = rest_of(connection)
        assert text.startswith(b"HTTP/1.1 408 ") and b'"header_timeout"' in text
    wait_until(lambda: not hasty.server.server_state.connections)


def test_the_second_request_of_a_connection_is_due_as_well(hasty: Live) -> None:
    """While it is kept alive, and nothing is asked yet, a long answer on another connection outlives the time as
    well."""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(hasty) as connection:
        connection.sendall(whole)
        text = b""
        while b'"ok"}' not in text:
            text += connection.recv(4096)
        assert text.startswith(b"HTTP/1.1 200 ")
        began = time.monotonic()
        text = read_to_end(hasty.open_stream(chat_body(max_tokens=150)))
        assert time.monotonic() - began > HEADER_S and b'"finish_reason":"length"' in text
        connection.sendall(whole[:20])
        assert b"header_timeout" in rest_of(connection)


def test_what_is_no_http_gets_an_error_in_the_apis_shape(live: Live) -> None:
    connection = connect(live)
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    text = rest_of(connection)
    assert text.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in text


@pytest.mark.parametrize(("path", "method"), [("/v1/completions", b"POST"), ("/health", b"GET")])
def test_a_request_of_two_lengths_ends_its_connection(live: Live, path: str, method: bytes) -> None:
    """A proxy that goes by the other header takes what follows the body for a request of its own."""
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    connection = connect(live)
    head = method + f" {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    connection.sendall(head + b"Content-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden)
    text = rest_of(connection)
    assert text.startswith(b"HTTP/1.1 400 ") and b'"invalid_http"' in text
    assert text.count(b"HTTP/1.1 ") == 1


def test_a_chunk_that_is_none_is_told_once(live: Live) -> None:
    connection = connect(live)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: attacker.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head)
    text = connection.recv(4096)
    connection.sendall(b"this is no chunk\r\n")
    text += rest_of(connection)
    assert text.startswith(b"HTTP/1.1 421 ") and text.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_half_closes_gets_its_answer(live: Live, stream: bool) -> None:
    connection = live.open_stream(chat_body(max_tokens=40, stream=stream))
    connection.shutdown(socket.SHUT_WR)
    text = rest_of(connection)
    assert text.startswith(b"HTTP/1.1 200 ") and text.count(b"HTTP/1.1 ") == 1
    assert b'"finish_reason":"length"' in text
    wait_until(lambda: live.seen.outcomes == ["length"])  # noted after the answer has gone out
    wait_until(lambda: not live.server.server_state.connections)


def test_both_answers_to_a_client_that_asked_twice_and_half_closed(live: Live) -> None:
    connection = connect(live)
    connection.sendall(2 * b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    connection.shutdown(socket.SHUT_WR)
    assert rest_of(connection).count(b"HTTP/1.1 200 ") == 2


def test_half_a_request_and_no_more_is_not_waited_for(live: Live) -> None:
    began = time.monotonic()
    connection = connect(live)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    connection.shutdown(socket.SHUT_WR)
    assert rest_of(connection) == b"" and time.monotonic() - began < 20


def test_a_client_that_reads_nothing_is_hung_up_on(live: Live) -> None:
    """Its buffers are full: the answer is aborted, its row is free."""
    stream = live.open_stream(chat_body(max_tokens=200))
    wait_until(lambda: live.llm.engine.scheduler.running)
    (connection,) = live.server.server_state.connections
    assert live._loop
    live._loop.call_soon_threadsafe(connection.pause_writing)
    wait_until(live.is_idle)
    assert live.seen.outcomes == ["abort"]
    wait_until(lambda: not live.server.server_state.connections)
    stream.close()


def test_one_that_reads_again_in_time_keeps_its_answer(live: Live) -> None:
    stream = live.open_stream(chat_body(max_tokens=60))
    wait_until(lambda: live.llm.engine.scheduler.running)
    (connection,) = live.server.server_state.connections
    assert live._loop
    live._loop.call_soon_threadsafe(connection.pause_writing)
    live._loop.call_soon_threadsafe(connection.resume_writing)
    text = read_to_end(stream)
    assert b'"finish_reason":"length"' in text


@pytest.mark.parametrize(("asks", "tokens"), [({}, 20), ({"max_tokens": 30}, 30), ({"max_completion_tokens": 5}, 5)])
def test_chat_answers_without_a_limit_get_the_servers(asks: dict[str, Any], tokens: int) -> None:
    with serving(talker(0.0), default_max_tokens=20) as limited:
        assert limited.post("/v1/chat/completions", chat_body(**asks))[1]["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize(("context", "most"), [(4096, 1024), (300, 300)])
def test_without_any_limit_a_chat_answer_has_a_bound(context: int, most: int) -> None:
    request = ChatRequest(messages=[{"role": "user", "content": "Say something."}])
    with serving(talker(0.0)) as live:
        (job,) = chat_jobs(request, replace(live.worker.serving(), max_len=context), ServeConfig())
    assert job.params.max_tokens == min(most, context - len(job.prompt_ids))
