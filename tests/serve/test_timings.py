"""`return_timings`: the parts of a request's way through the server, one after the other, are all of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from doubles import ByteTokenizer
from live_server import Live, chat_body, serving, talker

from paceline.serve.http.clock import BEFORE, Clock
from paceline.turnaround import Timings
from paceline.types import SamplingParams, Sequence

PARTS = [*BEFORE, "queue", "prefill", "draft", "verify", "engine", "text", "send", "other"]
PASS_S = 0.03
SLOW_S = 0.3
"""Longer than a busy machine takes for any part."""


def last_of(text: bytes) -> dict[str, Any]:
    chunks = [json.loads(event[6:]) for event in text.decode().split("\n\n") if event.startswith("data: {")]
    assert not any("timings" in chunk for chunk in chunks[:-1])
    return chunks[-1]["timings"]


def timed(live: Live, **more: Any) -> dict[str, float]:
    status, body, _ = live.post(
        "/v1/chat/completions", chat_body(max_tokens=20, temperature=0, return_timings=True) | more
    )
    assert status == 200
    return body["timings"] if isinstance(body, dict) else last_of(body)


@pytest.mark.slow
def test_parts_add_up_and_say_who_waited() -> None:
    """Five requests at once, three of them streams, two rows: of each the parts are the whole, and nothing is
    unexplained."""
    with serving(talker(PASS_S)) as live, ThreadPoolExecutor(5) as threads:
        timed(live)
        timings = list(threads.map(lambda place: timed(live, stream=place % 2 == 0), range(5)))
    for place, each in enumerate(timings):
        assert each.keys() == {*(f"{part}_s" for part in PARTS), "first_byte_s", "total_s"}
        assert sum(each[f"{part}_s"] for part in PARTS) == pytest.approx(each["total_s"])
        assert abs(each["other_s"]) < 0.02 * each["total_s"]
        assert min(each.values()) > -1e-3
        assert each["verify_s"] >= 19 * PASS_S and each["prefill_s"] >= PASS_S and each["draft_s"] < 5 * PASS_S
        assert (each["first_byte_s"] == each["total_s"]) is (place % 2 == 1)
    waited = sorted(each["queue_s"] for each in timings)
    assert waited[-1] > 2 * 19 * PASS_S > 2 * waited[0]  # the last one waits for two others, one after the other


@pytest.mark.slow
def test_what_is_slow_shows_in_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of four at once: time that is counted in another part is missing in its own."""

    def slowed(own: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            time.sleep(SLOW_S)
            return own(*arguments, **options)

        return slow

    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["a", "b"]}}}
    with serving(talker()) as live:
        usual = timed(live, max_tokens=1, response_format=schema)
        for owner, name in (
            (ByteTokenizer, "apply_chat_template"),
            (ByteTokenizer, "encode"),
            (type(live.llm.target), "forward"),
        ):
            monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))
        live.worker.info = replace(live.worker.serving(), compile=slowed(live.worker.serving().compile))
        spent = timed(live, max_tokens=1, response_format=schema)
        for part in ("template", "tokenizer", "prefill", "grammar"):
            assert usual[f"{part}_s"] < SLOW_S <= spent[f"{part}_s"], part


def test_an_engine_that_tells_no_times_leaves_them_unexplained() -> None:
    clock = Clock()
    seq = Sequence(0, [1, 2], 1, SamplingParams(), timings=Timings(arrival_s=0.0))
    time.sleep(0.02)
    timings = clock.timings([seq])
    assert timings["other_s"] > 0.015 and timings["queue_s"] == 0.0
    assert sum(timings[f"{part}_s"] for part in PARTS) == pytest.approx(timings["total_s"])
