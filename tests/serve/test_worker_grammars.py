"""Grammars are compiled beside the engine: nobody waits for another's, and what cannot be compiled is the request's
fault."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from live_server import break_engine, chat_body, serving, talker, wait_until

from paceline.engine.grammar import Grammars
from paceline.types import GrammarSpec

pytestmark = pytest.mark.slow


def test_compiling_a_grammar_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), Grammars._compile

    def slowly(self: Grammars, spec: GrammarSpec) -> Any:
        assert threading.current_thread().name.startswith("paceline-grammar")
        assert go.wait(60)
        return real(self, spec)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    with serving(talker(0.005)) as live:
        whole: list[Any] = []

        def ask() -> None:
            regex = {"guided_regex": "[0-9]{3}", "max_tokens": 20, "n": 2}
            whole.append(live.post("/v1/chat/completions", chat_body(**regex)))

        waits = [threading.Thread(target=ask) for _ in range(3)]
        for thread in waits:
            thread.start()
        wait_until(lambda: live.worker._compiling._work_queue.qsize() == 1)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=50))[1]["usage"]["completion_tokens"] == 50
        assert not whole
        go.set()
        for thread in waits:
            thread.join()
        for status, body, _ in whole:
            assert status == 200
            assert all(choice["message"]["content"].isdecimal() for choice in body["choices"])
    wait_until(lambda: not any(thread.name.startswith("paceline-grammar") for thread in threading.enumerate()))


def test_a_vocabulary_is_read_once_whatever_happens_to_the_engine() -> None:
    with serving(talker()) as live:
        regex = chat_body(guided_regex="a+b", max_tokens=20)
        assert live.post("/v1/chat/completions", regex)[0] == 200
        vocabulary = live.llm.engine.grammars._vocabulary
        break_engine(live)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
        assert live.post("/v1/chat/completions", regex)[0] == 200
        assert len(live.llms) == 2
        assert vocabulary is not None and live.llm.engine.grammars._vocabulary is vocabulary


@pytest.mark.parametrize(
    "grammar",
    [
        {"guided_regex": "\ud800"},
        {"guided_regex": "([a"},
        {"guided_json": {"const": "\ud800"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
    ],
)
def test_grammars_that_are_none_are_the_requests_fault(grammar: dict[str, Any]) -> None:
    with serving(talker()) as live:
        status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=5, **grammar))
        assert status == 400
        assert body["error"]["code"] == "invalid_value" and body["error"]["type"] == "invalid_request_error"
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200
        assert live.seen.num_crashes == 0
