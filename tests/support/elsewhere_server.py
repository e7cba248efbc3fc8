"""A server of the target that is elsewhere, as far as training can tell: vLLM's, one of text alone, one that is
down."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from loopback import Handler, answering

from paceline.engine.llm import LLM
from paceline.types import SamplingParams

Reply = Callable[[list[int], dict[str, Any]], list[int]]
"""Prompt and body to the tokens of an answer, its end token included."""


class Elsewhere:
    """Answers completions; tests set how."""

    def __init__(self, llm: LLM, reply: Reply | None = None) -> None:
        self.llm, self.reply = llm, reply or self._generated
        self.tells_ids = self.takes_extras = self.takes_ids = self.takes_text = True
        self.key: str | None = None
        self.off_by = 0
        """Added to the numbers of tokens that it counts."""
        self.failures: list[int] = []
        """Statuses of the next answers, 0 to hang up."""
        self.refuses = 0
        """Close the connection of this many requests."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gathers = 0
        """Nothing is answered before so many requests are there at once; once there were, all are, as they come."""
        self.now = self.most_at_once = self.num_refused = 0
        self.url = ""
        self.other: Callable[[str, str, dict[str, Any]], tuple[int, bytes] | None] = lambda method, path, body: None
        """Answers first, where it has an answer."""
        self._lock, self._gathered = threading.Lock(), threading.Condition()

    def _generated(self, prompt_ids: list[int], body: dict[str, Any]) -> list[int]:
        params = SamplingParams(temperature=body["temperature"], max_tokens=body["max_tokens"], seed=body["seed"])
        with self._lock:
            return self.llm.generate_ids([prompt_ids], params)[0].token_ids

    def answer(self, method: str, path: str, key: str | None, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status 0 is a server that hangs up."""
        with self._gathered:
            if self.refuses:
                self.refuses, self.num_refused = self.refuses - 1, self.num_refused + 1
                return 0, b""
        if self.failures:
            return self.failures.pop(0), b"busy"
        self.keys.append(key)
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, b"no"
        if (reply := self.other(method, path, body)) is not None:
            return reply
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "the-model"}]}).encode()
        self.bodies.append(body)
        return self._completed(path, body)

    def _completed(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        is_chat, tokenizer = path == "/v1/chat/completions", self.llm.tokenizer
        if not self.takes_extras and "return_token_ids" in body:
            return 400, b"what is return_token_ids?"
        if is_chat:
            prompt_ids = self.llm.encode_chat(body["messages"], body.get("tools"), body.get("chat_template_kwargs"))
        elif isinstance(body["prompt"], list):
            prompt_ids = body["prompt"]
        else:
            prompt_ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
        if not is_chat and not (self.takes_ids if isinstance(body["prompt"], list) else self.takes_text):
            return 400 if self.takes_text else 404, b"not so"
        with self._gathered:
            self.now += 1
            self.most_at_once = max(self.most_at_once, self.now)
            self._gathered.notify_all()
            self._gathered.wait_for(lambda: self.most_at_once >= self.gathers, timeout=60)
        ids = self.reply(prompt_ids, body)
        with self._gathered:
            self.now -= 1
        reason = "stop" if ids[-1] in tokenizer.eos_token_ids else "length"
        text = tokenizer.decode(ids[:-1] if reason == "stop" else ids, skip_special=False)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if self.tells_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt_ids}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids) + self.off_by}
        return 200, json.dumps({"choices": [choice], "usage": usage}).encode()


@contextlib.contextmanager
def served(fake: Elsewhere) -> Iterator[Elsewhere]:
    """On a free port of loopback, from threads."""

    class Asked(Handler):
        def _any(self) -> None:
            status, data = fake.answer(self.command, self.path, self.headers.get("Authorization"), self.body())
            if not status:
                self.close_connection = True
                return
            self.answer(status, data)

        do_GET = do_POST = _any

    with answering(Asked) as fake.url:
        yield fake
