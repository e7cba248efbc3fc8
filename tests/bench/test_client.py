"""The client of `bench serving`: bytes to answers, and servers that break off."""

from __future__ import annotations

import socket
import threading

import pytest
from server_words import BY_SOURCE, LAST, USAGE, event, stream, text_event

from paceline.bench.serving.load import Answer, read_answer, tokens_per_round
from paceline.errors import ConfigError
from paceline.net.streaming import Client, Stream

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_stream_becomes_an_answer() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    whole = stream(role, text_event("a"), text_event("bcd"), text_event("e"), LAST + event(USAGE), event(b"[DONE]"))
    answer = read_answer(whole)
    assert answer.error is None and answer.text == "abcde"
    assert (answer.first_s, answer.total_s, answer.chunk_gaps_s) == (2.0, 6.0, [1.0, 1.0])
    assert (answer.num_prompt, answer.num_reused, answer.num_tokens) == (9, 3, 5)
    assert (answer.num_accepted, answer.num_drafted, answer.accepted_histogram) == (2, 6, [1, 0, 1])
    assert answer.rounds_by_source == BY_SOURCE
    assert read_answer(whole, began_s=4.0).due_s == 6.0
    assert answer.inter_token_s == 0.5
    assert tokens_per_round([answer, Answer()]) == 2.0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_where_the_bytes_are_cut_does_not_matter(size: int) -> None:
    data = text_event("é") + text_event("\r\n0\r\n\r\n") + LAST + event(USAGE) + event(b"[DONE]")
    answer = read_answer(stream(*(data[at : at + size] for at in range(0, len(data), size))))
    assert answer.error is None and answer.text == "é\r\n0\r\n\r\n" and answer.num_tokens == 5


@pytest.mark.parametrize(
    ("whole", "error"),
    [
        (stream(text_event("a")), "the stream ended early"),
        (stream(text_event("a"), event(b"[DONE]")), "the stream ended without a finish reason"),
        (stream(event({"error": {"message": "the engine failed"}}), event(b"[DONE]")), "the engine failed"),
        (stream(event(b"{"), event(b"[DONE]")), "an event of the stream is no JSON"),
        (stream(b'{"error": {"message": "too many"}}', status=429), "status 429: too many"),
        (stream(b'{"error": {"message": "too\\nmany"}}', status=429), "status 429: too many"),
        (stream(b'{"error": "busy"}', status=503), "status 503: busy"),
        (stream(b"oh  no", status=502), "status 502: oh no"),
        (stream(b"", status=500), "status 500: no message"),
        (stream(b'{"error": {"message": null}}', status=500), 'status 500: {"error": {"message": null}}'),
        (stream(b"[" * 100_000, status=500), "status 500: " + "[" * 200),
    ],
)
def test_what_can_be_wrong_with_an_answer(whole: Stream, error: str) -> None:
    assert read_answer(whole).error == error


def test_servers_that_tell_less() -> None:
    """Windows line ends, completions, no usage."""
    data = (
        b'data: {"choices": [{"text": "a"}]}\r\n\r\ndata: {"choices": [{"text": "b", "finish_reason": "stop"}]}\r\n\r\n'
    )
    answer = read_answer(stream(data + b"data: [DONE]\r\n\r\n"))
    assert (answer.text, answer.num_tokens, answer.num_rounds) == ("ab", 2, None)
    assert tokens_per_round([answer]) is None


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://me:secret@x", "http://x/?a=1"]
)
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="http://127.0.0.1:8000"):
        Client(url)
    with pytest.raises(ConfigError, match="printable"):
        Client("http://x", "a\r\nb")


def answered(*said_by_server: bytes, timeout_s: float = 5.0) -> list[Answer]:
    """Results of the client if a server answers each request like this on one connection, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            with listening.accept()[0] as connection:
                for each in said_by_server:
                    request = b""
                    while not request.endswith(b"{}"):
                        request += connection.recv(2**16)
                    connection.sendall(each)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout_s=timeout_s)
        answers = [read_answer(client.post("/v1/completions", b"{}")) for _ in said_by_server]
        client.close()
        return answers


def test_a_server_that_never_answers_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        assert client.post("/v1/completions", b"{}").failure == "no whole answer within 0.05 s"


@pytest.mark.parametrize(
    ("said_by_server", "error"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "the answer was not HTTP"),
        (b"", "the server hung up"),
        (CHUNKED + b"5\r\nhi", "the server hung up"),
        (CHUNKED + b"zz\r\nab\r\n", "the server hung up"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "the server hung up"),
    ],
)
def test_a_server_that_breaks_off_is_a_failure(said_by_server: bytes, error: str) -> None:
    assert [each.error for each in answered(said_by_server)] == [error]


def test_a_connection_is_used_again() -> None:
    whole = text_event("a") + LAST + event(b"[DONE]")
    by_length = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(whole), whole)
    in_chunks = CHUNKED + b"1\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (whole[:1], len(whole) - 1, whole[1:])
    assert [each.text for each in answered(by_length, in_chunks, by_length)] == ["a", "a", "a"]
