"""An engine that crashes under its server: who is told, what is answered all the same, which drafter comes back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from live_server import LONG, break_engine, chat_body, in_engine, in_threads, serving, talker, wait_until

from paceline.draft.base import NoDrafter
from paceline.errors import ModelNotFoundError

pytestmark = pytest.mark.slow


def test_a_crash_is_told_and_survived() -> None:
    with serving(talker(0.01)) as live:
        stream = live.open_stream(chat_body(**LONG))
        assert b"200 OK" in stream.recv(4096)
        whole: list[Any] = []
        waits = in_threads(1, lambda _: whole.append(live.post("/v1/chat/completions", chat_body(**LONG))))
        wait_until(lambda: len(live.llm.engine.scheduler.running) == 2)
        break_engine(live)
        rest = b""
        while piece := stream.recv(4096):
            rest += piece
            if b"[DONE]" in rest:
                break
        stream.close()
        last = rest.split(b"data: ")[-2]
        assert json.loads(last.split(b"\n\n")[0])["error"]["code"] == "engine_crashed"
        waits[0].join()
        status, body, _ = whole[0]
        assert status == 500
        assert body["error"]["type"] == "server_error"
        assert "out of luck" not in json.dumps(body)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200
        assert len(live.llms) == 2
        assert live.seen.num_crashes == 1
        wait_until(lambda: len(live.seen.outcomes) == 3)
        assert live.seen.outcomes[:2] == ["error", "error"]
        wait_until(live.is_idle)


def test_a_crash_loses_what_had_begun_and_nothing_else() -> None:
    """Rows for two of sixteen: the two are told, the others are answered by the next engine."""
    with serving(talker(0.001)) as live:
        expected = live.post("/v1/chat/completions", chat_body(max_tokens=40, temperature=0))[1]["choices"][0][
            "message"
        ]
        whole: list[tuple[int, Any]] = []

        def ask(number: int) -> None:
            status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=40, temperature=0))
            whole.append((status, body))

        live.llm.target.seconds = 0.25  # so that all sixteen have come before the first two are done
        threads = in_threads(16, ask)
        wait_until(lambda: len(live.llm.engine.scheduler.running) == 2 and len(live.llm.engine.scheduler.waiting) == 14)
        break_engine(live)
        for thread in threads:
            thread.join()
        lost = [body for status, body in whole if status == 500]
        kept = [body for status, body in whole if status == 200]
        assert len(lost) == 2 and len(kept) == 14
        assert {body["error"]["code"] for body in lost} == {"engine_crashed"}
        assert all(body["choices"][0]["message"] == expected for body in kept)
        assert live.seen.outcomes.count("error") == 2 and live.seen.num_crashes == 1
        wait_until(live.is_idle)
        live.llm.engine.check_integrity()


def test_a_request_of_several_answers_is_lost_whole_when_one_had_begun() -> None:
    with serving(talker(0.01)) as live:
        whole: list[Any] = []
        waits = in_threads(1, lambda _: whole.append(live.post("/v1/chat/completions", chat_body(**LONG, n=4))))
        wait_until(lambda: len(live.llm.engine.scheduler.running) == 2 and len(live.llm.engine.scheduler.waiting) == 2)
        break_engine(live)
        waits[0].join()
        assert whole[0][0] == 500 and whole[0][1]["error"]["code"] == "engine_crashed"
        wait_until(lambda: live.seen.outcomes == ["error"] * 4)
        wait_until(live.is_idle)


def test_weights_that_served_long_are_kept_over_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.worker.worker.STEADY_SECONDS", 0.0)
    with serving(talker()) as live:
        before = live.post("/v1/chat/completions", chat_body(max_tokens=20, temperature=0))[1]["choices"]
        engine = live.llm.engine
        break_engine(live)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
        assert live.post("/v1/chat/completions", chat_body(max_tokens=20, temperature=0))[1]["choices"] == before
        assert len(live.llms) == 1
        assert live.llm.engine is not engine
        wait_until(live.is_idle)
        live.llm.engine.check_integrity()


@pytest.mark.parametrize(("steady_s", "num_loads"), [(0.0, 1), (60.0, 3)])
def test_a_crash_forgets_no_swapped_drafter(monkeypatch: pytest.MonkeyPatch, steady_s: float, num_loads: int) -> None:
    monkeypatch.setattr("paceline.serve.worker.worker.STEADY_SECONDS", steady_s)
    with serving(talker()) as live:
        swapped = NoDrafter()
        in_engine(live, lambda llm: llm.use_drafter(swapped))
        for _ in range(2):
            break_engine(live)
            assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
            assert live.post("/v1/chat/completions", chat_body(max_tokens=30))[0] == 200
            assert live.llm.drafter is swapped
            assert live.llm.engine.drafter is swapped
        assert len(live.llms) == num_loads and live.seen.num_crashes == 2
        wait_until(live.is_idle)
        live.llm.engine.check_integrity()


def test_a_swapped_drafter_that_cannot_be_used_again_does_not_end_the_server() -> None:
    class Once(NoDrafter):
        num_bound = 0

        def bind(self, target: Any) -> None:
            self.num_bound += 1
            if self.num_bound > 1:
                raise RuntimeError("only once")

    with serving(talker()) as live:
        in_engine(live, lambda llm: llm.use_drafter(Once()))
        break_engine(live)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200
        assert type(live.llm.drafter) is NoDrafter


def test_what_waits_during_a_restart_is_answered_afterwards() -> None:
    llms = []

    def slowly() -> Any:
        if llms:
            time.sleep(0.3)
        llms.append(talker()())
        return llms[-1]

    with serving(slowly) as live:
        break_engine(live)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 200


def test_a_server_that_cannot_recover_ends() -> None:
    llms: list[Any] = []

    def once() -> Any:
        if llms:
            raise ModelNotFoundError("gone")
        llms.append(talker()())
        return llms[-1]

    with serving(once) as live:
        break_engine(live)
        assert live.post("/v1/chat/completions", chat_body(max_tokens=3))[0] == 500
        wait_until(lambda: live.worker.state == "failed")
        assert live.request("GET", "/health")[0] == 503
        status, body, _ = live.post("/v1/chat/completions", chat_body(max_tokens=3))
        assert (status, body["error"]["code"]) == (503, "failed")
