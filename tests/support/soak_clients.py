"""Clients that behave badly: hang up, ask for nonsense, all at once. Every answer is right or a clean error.

A third of the requests are hung up on, before the first token or in the middle; some ask for the impossible. Greedy
answers must equal those of an engine without drafts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

HOST, CHAT, TIMEOUT_S = "127.0.0.1", "/v1/chat/completions", 600.0
GONE = ("gone before the first token", "gone in the middle")
KINDS = ["whole", "whole", "streamed", "streamed", "absurd", "absurd", *GONE, *GONE[1:]]
ABSURD: list[tuple[dict[str, Any] | bytes, set[int]]] = [
    ({"max_tokens": 10**9}, {400}),
    ({"temperature": -1}, {400}),
    ({"temperature": math.nan}, {400}),
    ({"top_p": math.inf}, {400}),
    ({"n": 1000}, {400}),
    ({"messages": [{"role": "user", "content": "spam " * 200_000}]}, {400}),
    ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, {413}),
    ({"messages": []}, {400}),
    ({"messages": "hello"}, {400}),
    ({"messages": [{"role": 5}]}, {400}),
    ({"max_tokens": "many"}, {400}),
    ({"stream": {"yes": 1}}, {400}),
    ({"stop": ["", "x"]}, {400}),
    ({"logit_bias": {"-1": 5}}, {400}),
    ({"top_k": -7}, {400}),
    ({"guided_regex": "([a"}, {400}),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}}, {400}),
    ({"model": "other"}, {404}),
    (b"{", {400}),
    (b"\xff\xfe", {400}),
]
LONGER = 8
"""Factor of max_tokens for clients that disconnect early."""
UNKNOWN = {"user": "five", "store": False}
"""Fields without effect here."""


@dataclass
class Soak:
    """Requests to one server, and what became of them."""

    port: int
    expected: dict[str, str]
    """Prompt -> the greedy answer that is right."""
    max_tokens: int = 30
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self, num_requests: int, num_clients: int, seed: int = 0) -> None:
        """All of them, so many at once; returns when each has its answer or has left."""
        kinds = [KINDS[number % len(KINDS)] for number in range(num_requests)]
        random.Random(seed).shuffle(kinds)
        clients = [threading.Thread(target=self._client, args=(kinds, seed + number)) for number in range(num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _client(self, kinds: list[str], seed: int) -> None:
        luck = random.Random(seed)
        while True:
            try:
                kind = kinds.pop()
            except IndexError:
                return
            try:
                outcome = self._ask(kind, luck)
            except Exception as error:  # noqa: BLE001  (whatever it is, it is counted and told)
                self.wrong.append(f"{kind}: {type(error).__name__} {error}")
                outcome = "WRONG"
            self.outcomes[f"{kind}: {outcome}"] += 1

    def _ask(self, kind: str, luck: random.Random) -> str:
        prompt = luck.choice(list(self.expected))
        body = chat_request(prompt, self.max_tokens) | (UNKNOWN if luck.random() < 0.2 else {})
        if kind == "absurd":
            return self._absurd(body, *luck.choice(ABSURD))
        if kind in GONE:
            return self._hang_up(body, kind, luck)
        text = self.streamed(body) if kind == "streamed" else self.whole(body)
        assert text == self.expected[prompt], f"{text!r} instead of {self.expected[prompt]!r}"
        return "right"

    def whole(self, body: dict[str, Any]) -> str:
        status, answer = self.post(json.dumps(body).encode())
        assert status == 200, answer
        (choice,) = answer["choices"]
        assert choice["finish_reason"] in ("stop", "length"), choice
        return choice["message"]["content"]

    def streamed(self, body: dict[str, Any]) -> str:
        status, text = self.request(json.dumps(body | {"stream": True}).encode())
        assert status == 200, text
        events = text.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-2:]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length"), chunks[-1]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    def _absurd(self, body: dict[str, Any], change: dict[str, Any] | bytes, statuses: set[int]) -> str:
        data = change if isinstance(change, bytes) else json.dumps(body | change).encode()
        try:
            status, answer = self.post(data)
        except (BrokenPipeError, ConnectionResetError):
            assert 413 in statuses  # hung up on in the middle of a body that is too long
            return "refused"
        assert status in statuses, f"{status} for {data[:80]!r}: {answer}"
        check_error(answer)
        return "refused"

    def _hang_up(self, body: dict[str, Any], kind: str, luck: random.Random) -> str:
        """At a random moment: while the answer is waited for, or after some of its events. More tokens are asked for
        than are waited for, so that a fast server is still writing when its client leaves."""
        longer = {"max_tokens": LONGER * self.max_tokens, "ignore_eos": True}
        data = json.dumps(body | longer | {"stream": kind != GONE[0] or luck.random() < 0.5}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(data)}\r\n\r\n"
        )
        with socket.create_connection((HOST, self.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(head.encode() + data)
            if kind == GONE[0]:
                time.sleep(luck.choice([0.0, 0.001, 0.01, 0.05]))
                return "left"
            num_wanted, text = luck.randrange(1, self.max_tokens), b""
            while text.count(b"data: ") < num_wanted and b"[DONE]" not in text:
                piece = connection.recv(4096)
                assert piece, f"the server hung up: {text!r}"
                text += piece
            assert text.startswith(b"HTTP/1.1 200 "), text
        return "left"

    def post(self, data: bytes) -> tuple[int, Any]:
        status, text = self.request(data)
        return status, json.loads(text)

    def request(self, data: bytes, method: str = "POST", path: str = CHAT) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()


def chat_request(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy chat request."""
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}


def check_error(answer: dict[str, Any]) -> None:
    """OpenAI's shape, and nothing about the inside of the server."""
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    text = json.dumps(answer)
    assert answer["error"]["message"] and "Traceback" not in text and "/site-packages/" not in text, answer
