"""Another engine in the place of our own: the server needs what `serve/worker/engine.py` says, and nothing else."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from doubles import ByteTokenizer
from live_server import break_engine, chat_body, read_to_end, serving, wait_until

from paceline.config import EngineConfig
from paceline.engine.engine import Chunk
from paceline.errors import PromptError
from paceline.serve.admin.metrics import Metrics
from paceline.serve.worker.engine import Engine, Model
from paceline.types import Constraint, RoundStats, Route, SamplingParams, Sequence


class EchoEngine:
    """Says each prompt again, a token a step; has no rows, no drafts, and fails at a prompt with "!"."""

    def __init__(self) -> None:
        self.rounds: list[RoundStats] = []
        self.read = (0, 0.0)
        self.scheduler = SimpleNamespace(waiting=(), prefilling=(), running=deque[Sequence]())
        self.target = SimpleNamespace(vocab_size=258, cache=SimpleNamespace(num_rows=2, max_len=128, lengths=[0, 0]))
        self.grammars = SimpleNamespace(compile=None)
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running)

    def add(
        self, prompt_ids: list[int], params: SamplingParams, constraint: Constraint | None, route: Route | None = None
    ) -> int:
        if params.top_k:
            raise PromptError("this engine is greedy: leave top_k out")
        self._num_added += 1
        self.scheduler.running.append(Sequence(self._num_added, list(prompt_ids), len(prompt_ids), params))
        return self._num_added

    def abort(self, request_id: int) -> Sequence | None:
        sequence = next((seq for seq in self.scheduler.running if seq.request_id == request_id), None)
        if sequence:
            self.scheduler.running.remove(sequence)
        return sequence

    def step(self) -> list[Chunk]:
        chunks = []
        for seq in list(self.scheduler.running):
            token = seq.tokens[seq.num_output]
            if token == ord("!"):
                seq.finish_reason, seq.error = "error", PromptError("the model's numbers are not finite")
            else:
                seq.tokens.append(token)
                seq.finish_reason = "length" if seq.num_output == min(seq.prompt_len, seq.params.max_tokens) else None
            text = chr(token) if 0 < token < 128 and not seq.error else ""
            chunks.append(Chunk(seq, [] if seq.error else [token], text, seq.finish_reason))
            if seq.finish_reason:
                self.scheduler.running.remove(seq)
        return chunks

    def check_integrity(self) -> None: ...


class EchoModel:
    def __init__(self) -> None:
        self.config = EngineConfig(model="echo")
        self.tokenizer = cast(Any, ByteTokenizer())
        self.engine: Engine = EchoEngine()
        self.drafter: Any = None
        self.members: dict[str, Any] = {}

    def use_members(self, members: Any, /) -> None:
        self.members = members

    def renew(self) -> None:
        self.engine = EchoEngine()


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 100, **more}


@pytest.mark.slow
def test_another_engine_is_served() -> None:
    factory: Callable[[], Model] = EchoModel
    with serving(factory) as live:
        assert [each["id"] for each in live.request("GET", "/v1/models")[1]["data"]] == ["echo"]
        status, body, _ = live.post("/v1/completions", prompt("hello"))
        assert status == 200 and body["choices"][0]["text"] == "hello" and body["usage"]["completion_tokens"] == 6
        events = (
            live.post("/v1/chat/completions", chat_body("hey", stream=True, max_tokens=90))[1].decode().split("\n\n")
        )
        deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
        assert "hey" in "".join(delta.get("content", "") for delta in deltas)
        status, body, _ = live.post("/v1/completions", prompt("hello", top_k=3))
        assert (status, body["error"]["message"]) == (400, "this engine is greedy: leave top_k out")
        status, body, _ = live.request("GET", "/admin/drafters")
        assert (status, body["error"]["code"]) == (400, "no_pool")
        break_engine(live)
        assert live.post("/v1/completions", prompt("hello"))[0] == 500
        assert live.post("/v1/completions", prompt("again"))[1]["choices"][0]["text"] == "again"


@pytest.mark.slow
def test_a_request_that_fails_alone_is_told_and_its_neighbours_are_not() -> None:
    with serving(EchoModel, max_n=2) as live:
        for body in (prompt("a" * 20 + "!"), prompt(["aaaa", "aa!a"])):
            stream = live.open_stream(prompt("b" * 60), "/v1/completions")
            status, answer, _ = live.post("/v1/completions", body)
            assert status == 500 and answer["error"]["code"] == "request_failed"
            assert answer["error"]["message"] == "the model's numbers are not finite"
            text = read_to_end(stream)
            assert text.count(b'"text":"b') == 60 and b'"finish_reason":"length"' in text
        stream = live.open_stream(prompt("ccc!"), "/v1/completions")
        text = read_to_end(stream)
        assert text.count(b'"text":"c') == 3 and b'"code":"request_failed"' in text
        wait_until(lambda: live.worker.num_open == 0)
        assert live.seen.num_crashes == 0 and len(live.llms) == 1
        assert live.seen.outcomes.count("error") == 3 and live.seen.outcomes.count("length") == 2
        assert set(live.seen.outcomes) == {"error", "length", "abort"}, "the other answer of a request that failed"


def test_another_engine_is_counted() -> None:
    engine, metrics = EchoEngine(), Metrics("echo")
    engine.add([104, 105], SamplingParams(), None)
    metrics.step(engine, 0.1)
    body = metrics.render()[0].decode()
    assert 'vllm:num_requests_running{model_name="echo"} 1.0' in body
    assert 'vllm:kv_cache_usage_perc{model_name="echo"} 0.0' in body
