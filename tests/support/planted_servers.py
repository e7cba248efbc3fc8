"""Servers with a fault each, for tests of `paceline audit`: proxies before an honest server.

honest      nothing is changed
flattened   temperature times 1.15
lossy       a lossy rule, which the answers do not tell of
top-p       0.9 in place of what was asked
slipped     every hundredth token is another model's
another     greedy answers come from another model
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from loopback import Handler, answering

from paceline.loop.audit.answers import AnswerReader
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client

JSON_TYPE = "application/json"
HEAT, TOP_P, SLIP_EVERY = 1.15, 0.9, 100
LOSSY = "typical:eps=0.09,delta=0.3"
JSON = dict[str, Any]
Ask = Callable[[JSON], JSON]
"""A request of /v1/completions to its answer."""


class Refused(Exception):
    """The server behind the proxy refused the request."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


def asking(client: Client) -> Ask:
    """Pass a request on."""

    def ask(body: JSON) -> JSON:
        stream = client.post("/v1/completions", json.dumps(body).encode())
        if stream.status != 200:
            raise Refused(stream.status, stream.body)
        return json.loads(stream.body)

    return ask


def flattened(ask: Ask) -> Ask:
    return lambda body: ask(body | {"temperature": min(HEAT * body["temperature"], 2.0)})


def wrong_top_p(ask: Ask) -> Ask:
    return lambda body: ask(body | ({"top_p": TOP_P} if body.get("top_p", 1.0) < 1 else {}))


def lossy(ask: Ask, rule: str) -> Ask:
    def ask_lossy(body: JSON) -> JSON:
        answer = ask(body | ({"lossy": rule} if body["temperature"] else {}))
        return {name: value for name, value in answer.items() if name not in ("lossy", "lossless")}

    return ask_lossy


def another(ask: Ask, other: Ask) -> Ask:
    return lambda body: ask(body) if body["temperature"] else other({**body, "model": None})


class Slipping:
    """Every hundredth token is the likeliest of another model. Gives token ids, as vLLM does."""

    def __init__(self, ask: Ask, other: Ask, tokenizer: Tokenizer, every: int = SLIP_EVERY) -> None:
        self._ask, self._other, self._tokenizer, self._every = ask, other, tokenizer, every
        self._reader, self._numbers, self._lock = AnswerReader(tokenizer), itertools.count(1), threading.Lock()

    def __call__(self, body: JSON) -> JSON:
        prompt, answer_ids, reason = list(body["prompt"]), list[int](), "length"
        with self._lock:
            slips = [next(self._numbers) % self._every == 0 for _ in range(body["max_tokens"])]
        while len(answer_ids) < len(slips) and reason == "length":
            left = slips[len(answer_ids) :]
            if left[0]:
                more, _ = self._told(self._other, {"temperature": 0.0, "max_tokens": 1}, prompt + answer_ids)
            else:
                until = left.index(True) if True in left else len(left)
                more, reason = self._told(self._ask, body | {"max_tokens": until}, prompt + answer_ids)
            answer_ids += more
        if reason == "length" and len(answer_ids) < len(slips):
            reason = "stop"
        text = self._tokenizer.decode(answer_ids)
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": reason,
            "token_ids": answer_ids,
            "prompt_token_ids": prompt,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer_ids)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def _told(self, ask: Ask, body: JSON, prompt: list[int]) -> tuple[list[int], str]:
        answer = self._reader.read(ask(body | {"prompt": prompt, "return_token_ids": True}), "stop" in body)
        assert answer is not None and answer.token_ids
        return answer.token_ids, answer.finish_reason


@contextlib.contextmanager
def proxy(ask: Ask, name: str = "model") -> Iterator[str]:
    """Its address."""

    class Asked(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": name}]}).encode(), JSON_TYPE)

        def do_POST(self) -> None:
            body = self.body()
            if not self.path.endswith("/v1/completions"):
                self.answer(404, b"{}", JSON_TYPE)
                return
            try:
                self.answer(200, json.dumps(ask(body | {"model": None})).encode(), JSON_TYPE)
            except Refused as refused:
                self.answer(refused.status, refused.body, JSON_TYPE)

    with answering(Asked) as url:
        yield url


def planted(ask: Ask, other: Ask, tokenizer: Tokenizer, rule: str = LOSSY) -> dict[str, Ask]:
    """Every kind of server, by name; the first one is honest."""
    return {
        "honest": ask,
        "flattened": flattened(ask),
        "lossy": lossy(ask, rule),
        "top-p": wrong_top_p(ask),
        "slipped": Slipping(ask, other, tokenizer),
        "another": another(ask, other),
    }
