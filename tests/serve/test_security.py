"""Keys, limits, and bodies that are none."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import Live, chat_body, serving, talker

from paceline.config import read_api_keys
from paceline.errors import ConfigError
from paceline.net.loopback import is_loopback
from paceline.serve.http.app import PAGES
from paceline.serve.settings import ServeConfig


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(talker(), max_body_bytes=20_000, body_seconds=0.5) as running:
        yield running


@pytest.mark.slow
def test_keys_open_the_api() -> None:
    with serving(talker(), api_keys=("first", "second")) as live:
        for header in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer "},
        ):
            status, body, headers = live.post("/v1/chat/completions", chat_body(max_tokens=1), header)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert (
                live.post("/v1/chat/completions", chat_body(max_tokens=1), {"authorization": f"Bearer {key}"})[0] == 200
            )
        assert live.request("GET", "/v1/models")[0] == 401
        assert live.request("GET", "/nothing")[0] == 401
        assert [live.request("GET", path)[0] for path in ("/health", "/ready", "/version", "/openapi.json")] == [
            200
        ] * 4
        for path, file in PAGES.items():
            status, body, headers = live.request("GET", path)
            assert (status, body, headers["x-content-type-options"]) == (200, file.read_bytes(), "nosniff"), path
            assert headers["content-security-policy"] == "frame-ancestors 'none'"
            assert headers["content-type"].startswith(
                {".js": "text/javascript", ".css": "text/css"}.get(file.suffix, "text/")
            )
        for path in ("/page/", "/page/index.html", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor/README.md"):
            assert live.request("GET", path)[0] == 404, path
        assert set(live.seen.refusals) == {"invalid_api_key"}


def test_keys_come_from_options_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# team\nfrom-file\n\nanother\n")
    monkeypatch.setenv("PACELINE_API_KEY", "from-env, more")
    assert read_api_keys(("given",), file) == ("given", "from-file", "another", "from-env", "more")
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no API key"):
        read_api_keys((), file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_api_keys((), tmp_path / "missing")
    with pytest.raises(ConfigError, match="ASCII"):
        ServeConfig(api_keys=("schlüssel",))


@pytest.mark.slow
def test_pages_of_other_origins_are_let_in_only_when_named(live: Live) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in live.request("OPTIONS", "/v1/chat/completions", headers=ask)[2]
    with serving(talker(), cors_origins=("https://a.example",), api_keys=("k",)) as open_live:
        headers = open_live.request("OPTIONS", "/v1/chat/completions", headers=ask)[2]
        assert headers["access-control-allow-origin"] == "https://a.example"
        status, _, headers = open_live.request("GET", "/v1/models", headers={"origin": "https://b.example"})
        assert status == 401
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b"[1]",
        b"null",
        b'"x"',
        b"NaN",
        b"[" * 9000,
        b'{"messages": ' + b"9" * 6000 + b"}",
        b"\x00",
    ],
)
def test_broken_bodies_are_refused(live: Live, data: bytes) -> None:
    status, body, _ = live.post("/v1/chat/completions", data)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


def test_only_json_is_read(live: Live) -> None:
    status, body, _ = live.request("POST", "/v1/completions", b'{"prompt": "x"}', {"content-type": "text/plain"})
    assert status == 400
    assert "application/json" in body["error"]["message"]


def test_long_bodies_are_refused(live: Live) -> None:
    status, body, _ = live.post("/v1/chat/completions", chat_body("x" * 30_000))
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 104857600\r\n\r\n{")
        assert b" 413 " in connection.recv(4096)


def test_long_bodies_without_a_length_are_refused(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(6):
            connection.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        assert b" 413 " in connection.recv(4096)


@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_client_that_sends_first_and_reads_then_sees_the_refusal(live: Live, is_chunked: bool) -> None:
    """A connection that is closed under a client that still sends is reset, and the answer with it."""
    for path, host, code in (
        ("/v1/completions", "localhost", b"body_too_large"),
        ("/health", "other", b"host_not_allowed"),
    ):
        with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
            length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {64 * 2**17}"
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{length}\r\n\r\n".encode())
            for _ in range(64):
                piece = b"x" * 2**17
                connection.sendall(b"20000\r\n" + piece + b"\r\n" if is_chunked else piece)
            text = b""
            while piece := connection.recv(4096):
                text += piece
            assert code in text and text.count(b"HTTP/1.1 ") == 1


@pytest.mark.slow
def test_what_is_not_wanted_is_not_read_for_ever(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a client that sends without end is listened to, nor one that waits."""
    monkeypatch.setattr("paceline.serve.http.security.DISCARD_BYTES", 2**20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head)
        with pytest.raises(OSError, match="reset|pipe"):
            connection.sendall(b"x" * 2**27)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(head)
        text = b""
        while piece := connection.recv(4096):
            text += piece
        assert b" 413 " in text and time.monotonic() - began < 10


@pytest.mark.parametrize(
    "key", [" 5", "5 ", "+5", "-5", "-0", "1_0", "５", "٣", "007", "5.0", "0x5", "1e1", "", "9" * 5000, "²"]
)
def test_a_bias_of_a_token_that_is_no_plain_number_is_refused(live: Live, key: str) -> None:
    status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=1, logit_bias={"7": 1, key: 1}))
    assert (status, body["error"]["param"]) == (400, "logit_bias")
    assert "logit_bias" in body["error"]["message"] and len(body["error"]["message"]) < 200


def test_a_bias_of_plain_numbers_is_taken(live: Live) -> None:
    assert live.post("/v1/chat/completions", chat_body(max_tokens=1, logit_bias={"0": 1, "105": -100}))[0] == 200


@pytest.mark.slow
def test_slow_bodies_are_refused_and_others_go_on(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
        assert b" 408 " in connection.recv(4096)


def test_errors_have_one_shape(live: Live) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/none", 404),
    ):
        given_status, body, _ = live.request(method, path)
        assert given_status == status
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert live.request("GET", "/version")[1]["version"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "abc"}, 200),
        ({"messages": [{"role": "user", "content": "abc"}]}, 200),
        ({}, 400),
        ({"prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}, 400),
        ({"prompt": "abc", "model": "other"}, 404),
    ],
)
def test_tokenize(live: Live, body: dict[str, Any], status: int) -> None:
    given_status, answer, _ = live.post("/tokenize", body)
    assert given_status == status
    if status == 200:
        assert answer["count"] == len(answer["tokens"])
        text = live.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
        assert "abc" in text


@pytest.mark.parametrize("tokens", [[-1], [10**30], [258], ["x"], 5])
def test_tokens_that_are_none(live: Live, tokens: object) -> None:
    assert live.post("/detokenize", {"tokens": tokens})[0] == 400
    assert live.post("/v1/completions", {"prompt": tokens if tokens != 5 else [], "max_tokens": 1})[0] in (200, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "n stop seed tools top_p top_k min_p logprobs logit_bias max_tokens temperature tool_choice top_logprobs messages "
    "stream",
    "stream_options response_format guided_regex guided_json presence_penalty frequency_penalty repetition_penalty "
    "speculate",
    "ignore_eos stop_token_ids max_completion_tokens chat_template_kwargs return_metrics return_timings prediction "
    "paceline_timings model",
]


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(more=st.dictionaries(st.sampled_from(" ".join(FIELDS).split()), JSON, min_size=1, max_size=2))
def test_no_field_takes_the_server_down(live: Live, more: dict[str, Any]) -> None:
    status, _, _ = live.post("/v1/chat/completions", json.dumps(chat_body("x", max_tokens=2) | more).encode())
    assert status in (200, 400, 404, 413)
    assert live.seen.num_crashes == 0


@pytest.mark.parametrize(
    ("host", "is_near"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("LocalHost", True), ("10.0.0.1", False), ("", False)],
)
def test_what_counts_as_this_machine(host: str, is_near: bool) -> None:
    assert is_loopback(host, "localhost") == is_near
    assert not is_loopback("localhost"), "a name may point elsewhere"
