"""Requests of an engine that crashed: their numbers may be others' in the next one, whom nothing of theirs reaches."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from live_server import LONG, asked, break_engine, in_engine, serving, talker, wait_until

from paceline.draft.base import NoDrafter
from paceline.errors import ConfigError
from paceline.serve.drafters import Drafters
from paceline.serve.failures import ApiError


@pytest.mark.slow
def test_a_client_that_was_lost_in_a_crash_ends_no_other_client_s_answer() -> None:
    with serving(talker(0.005)) as live:
        stream = live.open_stream(asked(**LONG))
        wait_until(lambda: live.llm.engine.scheduler.running)
        [lost] = list(live.worker._open)
        break_engine(live)
        wait_until(lambda: len(live.llms) == 2 and live.worker.state == "ready")
        stream.close()
        other = live.open_stream(asked(max_tokens=40, temperature=0))
        wait_until(lambda: live.worker.num_open == 1 and live.worker._live)
        assert list(in_engine(live, lambda llm: llm.engine._requests)) in ([], lost.request_ids)
        live.worker.abort(lost)  # as its connection closes, late
        text = b""
        while b"[DONE]" not in text:
            text += other.recv(4096)
        other.close()
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

    monkeypatch.setattr("paceline.serve.drafters.TRY_SECONDS", 0.0)
    with pytest.raises(ApiError, match="could not be tried"):
        asyncio.run(Drafters(cast(Any, Worker()))._try(NoDrafter(), 10))
    assert aborted == ([] if is_replaced else [7])
