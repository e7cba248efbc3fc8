"""The server under load: too many requests, clients that leave, bad requests, deadlines, a drain."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import openai
import pytest
from doubles import ScriptedDrafter
from live_server import (
    LONG,
    Live,
    SlowTalker,
    chat_body,
    idle_collector,
    in_engine,
    in_threads,
    quick_end,
    read_to_end,
    serving,
    talker,
    wait_until,
)
from small_llm import fake_llm
from torch import Tensor

from paceline import SamplingParams
from paceline.engine.engine import Engine
from paceline.serve.admin.metrics import Metrics
from paceline.serve.run import make_server
from paceline.serve.settings import ServeConfig
from paceline.serve.worker.worker import EngineWorker

pytestmark = pytest.mark.slow


def test_greedy_answers_equal_the_offline_ones_in_company() -> None:
    texts = [f"prompt {index}" for index in range(12)]
    expected = fake_llm().chat([chat_body(text)["messages"] for text in texts], SamplingParams(max_tokens=30))
    with serving(talker()) as live:
        answers: dict[int, Any] = {}

        def ask(index: int) -> None:
            answers[index] = live.post("/v1/chat/completions", chat_body(texts[index], max_tokens=30, temperature=0))[1]

        for thread in in_threads(len(texts), ask):
            thread.join()
        assert [answers[index]["choices"][0]["message"]["content"] for index in range(len(texts))] == [
            e.text for e in expected
        ]
        wait_until(live.is_idle)
        live.llm.engine.check_integrity()
        assert set(live.seen.outcomes) <= {"stop", "length"}


def test_a_full_queue_says_when_to_come_back() -> None:
    with serving(talker(0.01), max_queue=1) as live:
        streams = [live.open_stream(chat_body(**LONG)) for _ in range(3)]
        wait_until(lambda: live.worker.num_open == 3)
        status, body, headers = live.post("/v1/chat/completions", chat_body(**LONG))
        assert status == 429
        assert body["error"]["code"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
        assert live.seen.refusals == ["queue_full"]
        with live.client() as client, pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="fake", messages=cast(Any, chat_body()["messages"]))
        status, body, _ = live.post("/v1/chat/completions", chat_body(**LONG, n=4))
        assert status == 400
        for stream in streams:
            stream.close()
        wait_until(live.is_idle)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=2))[0] == 200


def test_each_refused_request_is_counted_once_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    chats: list[Any] = [{"x": 1}, {"model": "gpt"}, {"lossy": "typical"}, {"n": 3}, {"guided_regex": "("}]
    reasons = ["invalid_value", "model_not_found", "lossy_not_allowed", "invalid_value", "invalid_value"]
    with serving(talker(), max_n=2, deadline=1e-6) as live:
        for body in (*(chat_body(**more) for more in chats), chat_body("x" * 500), b"{", b"\xff"):
            live.post("/v1/chat/completions", body)
        live.post("/v1/messages", chat_body(max_tokens=4096))  # the engine's own check
        live.post("/nothing", {})
        live.worker.state = "loading"
        assert live.post("/v1/completions", {"prompt": "x"})[0] == live.request("GET", "/ready")[0] == 503
        live.worker.state = "ready"
        reasons += ["context_length_exceeded", "invalid_json", "invalid_json", "context_length_exceeded", "not_found"]
        assert live.seen.refusals == [*reasons, "loading"]
        assert live.post("/v1/completions", {"prompt": "x"})[0] == 504
        monkeypatch.setattr(live.llm.engine, "_check", lambda *_: 1 / 0)
        assert live.post("/v1/completions", {"prompt": "x"})[0] == 500
        assert live.seen.refusals == [*reasons, "loading"], "neither a deadline nor a failure is a refusal"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(stream: bool) -> None:
    with serving(talker(0.01)) as live:
        if stream:
            connection = live.open_stream(chat_body(**LONG, n=2))
            assert b"200 OK" in connection.recv(4096)
        else:
            client = http.client.HTTPConnection("127.0.0.1", live.port)
            client.request(
                "POST", "/v1/chat/completions", json.dumps(chat_body(**LONG)), {"content-type": "application/json"}
            )
            wait_until(lambda: live.llm.engine.scheduler.running)
            assert client.sock
            connection = client.sock
        connection.close()
        wait_until(live.is_idle, seconds=1.0)
        assert set(live.seen.outcomes) == {"abort"}


def test_one_that_leaves_while_waiting_leaves_no_trace() -> None:
    with serving(talker(0.01, num_rows=1)) as live:
        first = live.open_stream(chat_body(max_tokens=60))
        waiting = live.open_stream(chat_body(max_tokens=60))
        wait_until(lambda: live.llm.engine.scheduler.waiting)
        waiting.close()
        wait_until(lambda: not live.llm.engine.scheduler.waiting)
        wait_until(lambda: live.worker.num_open == 1)
        first.close()
        wait_until(live.is_idle)
        assert list(live.seen.outcomes) == ["abort", "abort"]


def test_the_first_token_is_no_draft_and_has_its_own_logprob() -> None:
    """Beside a running answer the first token and the round behind it come out of one step, in two chunks."""
    target = SlowTalker(0.005, num_rows=2, max_len=256)

    def drafting() -> Any:
        llm = fake_llm(target)
        llm.engine = Engine(target, llm.tokenizer, ScriptedDrafter(target, 3, accuracy=1.0))
        return llm

    with serving(drafting, stream_interval_ms=0.0) as live:
        other = live.open_stream(chat_body(**LONG))
        wait_until(lambda: live.llm.engine.scheduler.running)
        body = chat_body("x", max_tokens=9, temperature=0, stream=True, paceline_timings=True, logprobs=True)
        events = live.post("/v1/chat/completions", body)[1].decode().split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        other.close()
    drafted = [token["drafted"] for chunk in chunks for token in chunk["paceline"]["tokens"]]
    assert drafted == [False, True, True, True, False, True, True, True, False]
    for chunk in chunks:
        assert len(chunk["choices"][0]["logprobs"]["content"]) == len(chunk["paceline"]["tokens"])


def test_a_bad_request_found_late_harms_no_other() -> None:
    with serving(talker(0.005)) as live:
        other = live.open_stream(chat_body(max_tokens=50))
        status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=5, logit_bias={"5000": 1}))
        assert status == 400
        assert "vocabulary" in body["error"]["message"]
        text = read_to_end(other)
        assert b'"finish_reason":"length"' in text
        assert live.seen.num_crashes == 0


def test_an_unforeseen_error_of_one_request_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(talker(0.005)) as live:
        other = live.open_stream(chat_body(max_tokens=50))
        wait_until(lambda: live.llm.engine.scheduler.running)

        def refuse(*arguments: Any) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(live.llm.engine, "_check", refuse)
        status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=5))
        assert (status, body["error"]["code"]) == (500, "request_failed")
        assert "secret" not in json.dumps(body)
        text = read_to_end(other)
        assert b'"finish_reason":"length"' in text
        assert len(live.llms) == 1


class Damaged(SlowTalker):
    """Has no finite logits after a text with "!" of 20 tokens."""

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        is_damaged = ord("!") in tokens and len(tokens) == 20
        return super().logits_after(tokens) * (math.nan if is_damaged else 1.0)


def test_a_request_that_fails_alone_is_told_and_its_neighbours_are_not() -> None:
    with serving(lambda: fake_llm(Damaged(0.001, num_rows=3, max_len=256)), max_n=2) as live:
        body = {"max_tokens": 60, "temperature": 0}
        for broken in ("a" * 10 + "!", ["aaaa", "aa!a"]):
            stream = live.open_stream({"prompt": "b", **body}, "/v1/completions")
            status, answer, _ = live.post("/v1/completions", {"prompt": broken, **body})
            assert status == 500 and answer["error"]["code"] == "request_failed"
            assert "not finite at position 20" in answer["error"]["message"]
            text = read_to_end(stream)
            assert b'"finish_reason":"length"' in text and b"error" not in text
        text = read_to_end(live.open_stream({"prompt": "ccc!", **body}, "/v1/completions"))
        assert text.count(b'"text":"') > 1 and b'"code":"request_failed"' in text
        wait_until(live.is_idle)
        assert live.seen.num_crashes == 0 and len(live.llms) == 1
        assert Counter(live.seen.outcomes) == {"error": 3, "length": 2, "abort": 1}, "the other answer of two is ended"


def test_deadlines_end_what_takes_too_long() -> None:
    with serving(talker(0.02), deadline=0.3) as live:
        status, body, _ = live.post("/v1/chat/completions", chat_body(**LONG))
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        wait_until(live.is_idle)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200


def test_a_drain_finishes_what_is_under_way_and_takes_nothing_new() -> None:
    with serving(talker(0.01)) as live:
        stream = live.open_stream(chat_body(max_tokens=60))
        text = stream.recv(4096)
        live.drain()
        wait_until(lambda: live.worker.state == "draining")
        status, body, _ = live.request("GET", "/ready")
        assert (status, body["error"]["code"]) == (503, "draining")
        assert live.request("GET", "/health")[0] == 200
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 503
        text = read_to_end(stream, text)
        assert b'"finish_reason":"length"' in text
        wait_until(lambda: live.worker.state == "stopped")


def test_a_drain_does_not_wait_for_ever() -> None:
    with serving(talker(0.05), drain_seconds=0.2) as live:
        stream = live.open_stream(chat_body(**LONG))
        text = stream.recv(4096)
        live.drain()
        text = read_to_end(stream, text)
        assert b"shutting down" in text
        wait_until(lambda: live.worker.state == "stopped")


def test_tags_reach_the_metrics() -> None:
    with serving(talker()) as live:
        live.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, {"x-paceline-tag": "support " + "x" * 200})
        wait_until(lambda: live.seen.tags)
        assert live.seen.tags == [("support " + "x" * 200)[:128]]


def test_metrics_that_fail_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(talker()) as live:

        def broken(*arguments: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(live.seen, "finished", broken)
        monkeypatch.setattr(live.seen, "step", broken)
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


def test_an_idle_engine_sleeps() -> None:
    with serving(talker()) as live:
        live.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        wait_until(live.is_idle)
        before = in_engine(live, lambda _: time.thread_time())
        time.sleep(0.5)
        assert in_engine(live, lambda _: time.thread_time()) - before < 0.1, "seconds on the CPU of the engine's thread"


def test_functions_run_between_two_steps() -> None:
    with serving(talker()) as live:
        name = in_engine(live, lambda llm: f"{llm.config.model} in {threading.current_thread().name}")
        assert name == "fake in paceline-engine"


def test_until_the_model_is_loaded_the_server_says_so() -> None:
    go = threading.Event()

    def slowly() -> Any:
        go.wait(10)
        return talker()()

    live = Live(slowly, ServeConfig(port=0))
    with idle_collector(), quick_end():
        live._thread.start()
        wait_until(lambda: live.server.started)
        assert live.request("GET", "/health")[0] == 200
        assert live.request("GET", "/ready")[0] == 503
        assert live.post("/v1/completions", {"prompt": "x"})[1]["error"]["code"] == "loading"
        go.set()
        wait_until(lambda: live.request("GET", "/ready")[0] == 200)
        live.stop()


def test_the_openapi_document_names_every_endpoint() -> None:
    app = cast(Any, make_server(EngineWorker(talker(), ServeConfig(), Metrics("test"))).config.app)
    paths = set(app.openapi()["paths"])
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
    assert paths >= {"/health", "/ready", "/metrics", "/version", "/v1/embeddings"}


def test_a_first_token_is_not_held_back_beside_others() -> None:
    """Tokens may wait for a second here; the first one of the later answer comes while that answer is still being
    made."""
    with serving(talker(0.02), stream_interval_ms=1000.0) as live:
        other = live.client().chat.completions.create(model="fake", stream=True, max_tokens=200, **chat_body("one"))
        next(iter(other))
        times = []
        for chunk in live.client().chat.completions.create(
            model="fake", stream=True, max_tokens=50, **chat_body("two")
        ):
            if chunk.choices and chunk.choices[0].delta.content:
                times.append(time.monotonic())
        other.close()
    assert len(times) > 10
    assert times[-1] - times[0] > 0.25, "the first token came with the last"
