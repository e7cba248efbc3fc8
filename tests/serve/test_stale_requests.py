"""Requests of an engine that crashed: their numbers may be others' in the next one, whom nothing of theirs reaches."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from live_server import LONG, Gated, break_engine, chat_body, read_to_end, serving, wait_until
from small_llm import fake_llm

from paceline.draft.base import NoDrafter
from paceline.serve.http.failures import ApiError
from paceline.serve.worker.drafters import Drafters


@pytest.mark.slow
def test_a_client_that_was_lost_in_a_crash_ends_no_other_client_s_answer() -> None:
    """The second engine is in the middle of the other client's answer when the lost one is aborted."""
    targets = [Gated(num_rows=2, max_len=256, eos_bonus=-60.0) for _ in range(2)]
    left = iter(targets)
    with serving(lambda: fake_llm(next(left))) as live:
        stream = live.open_stream(chat_body(**LONG))
        wait_until(lambda: live.llm.engine.scheduler.running)
        [lost] = list(live.worker._open)
        wait_until(lambda: targets[0].is_waiting)
        break_engine(live)
        targets[0].gate.set()
        wait_until(lambda: len(live.llms) == 2 and live.worker.state == "ready")
        stream.close()
        other = live.open_stream(chat_body(max_tokens=40, temperature=0))
        wait_until(lambda: targets[1].is_waiting)
        assert list(live.llm.engine._requests) == lost.request_ids
        live.worker.abort(lost)  # as its connection closes, late
        targets[1].gate.set()
        text = read_to_end(other)
        assert b'"finish_reason":"length"' in text
        assert live.seen.num_crashes == 1


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_trial_that_was_lost_in_a_crash_ends_no_request(is_replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def add(self, *arguments: Any, **options: Any) -> int:
            return 7

        def abort(self, request_id: int) -> None:
            aborted.append(request_id)

    aborted = list[int]()
    model = SimpleNamespace(engine=Engine(), tokenizer=SimpleNamespace(encode=lambda text: [1]))

    class Worker:
        async def call(self, function: Any) -> Any:
            result = function(model)
            if is_replaced:
                model.engine = Engine()
            return result

    monkeypatch.setattr("paceline.serve.worker.drafters.TRY_SECONDS", 0.0)
    with pytest.raises(ApiError, match="could not be tried"):
        asyncio.run(Drafters(cast(Any, Worker()))._try(NoDrafter(), 10))
    assert aborted == ([] if is_replaced else [7])
