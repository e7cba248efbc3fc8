"""Lossy rules over HTTP: refused unless allowed; lossless false in every answer, chunk and metric; never a trace."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles import FakeTarget, ScriptedDrafter
from live_server import Live, chat_body, serving, wait_until
from small_llm import Talker, fake_llm
from trace_files import BYTES, rows, writer

from paceline.engine.engine import Engine
from paceline.engine.llm import LLM
from paceline.errors import ConfigError
from paceline.lossy import Lossy
from paceline.serve.settings import ServeConfig
from paceline.types import SamplingParams, Sequence

EVERYTHING = "relaxed:n=258,delta=1"


def loose() -> LLM:
    """A model that allows lossy rules, up to a mean total variation of 0.25, and a drafter that is wrong half of the
    time."""
    llm = fake_llm(Talker(num_rows=2, max_len=256, eos_bonus=-60.0), speculate="full")
    llm.allow_lossy, llm.max_tv = True, 0.25
    assert isinstance(llm.target, FakeTarget)
    llm.use_drafter(ScriptedDrafter(llm.target, accuracy=0.5))
    llm.use_members(llm.members)
    return llm


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(loose, allow_lossy=True, max_tv=0.25) as running:
        yield running


def ask(live: Live, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, Any]:
    body = chat_body(max_tokens=60, **more) if "chat" in path else {"prompt": "hello", "max_tokens": 60, **more}
    status, answer, _ = live.post(path, {"temperature": 0} | body)
    return status, answer


def metrics(live: Live) -> str:
    with urllib.request.urlopen(live.url + "/metrics") as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_without_the_owners_leave_it_is_refused() -> None:
    with serving() as closed:
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, answer = ask(closed, path, lossy="lenience:0.5")
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (403, "lossy_not_allowed", "lossy")
            assert "--allow-lossy" in error["message"]
        _, answer = ask(closed)
        assert "lossless" not in answer and "lossy" not in answer


@pytest.mark.slow
def test_every_answer_says_that_it_is_not_lossless_and_what_it_cost(live: Live) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        rule = EVERYTHING if "chat" in path else {"rule": "relaxed", "n": 258, "delta": 1}
        _, body = ask(live, path, lossy=rule)
        assert body["lossless"] is False
        price = body["lossy"]
        assert price["rule"] == EVERYTHING and price["max_tv"] == 0.25
        assert 0 < price["mean_tv"] == price["share_changed"] <= 0.25, "the server's budget holds"
    _, both = ask(live, n=2, lossy=EVERYTHING + ",max_tv=0.1")
    assert [each["max_tv"] for each in both["lossy"]] == [0.1, 0.1] and all(
        each["mean_tv"] <= 0.1 for each in both["lossy"]
    )
    assert ask(live, lossy="lenience:1", paceline_timings=True)[1]["paceline"]["lossless"] is False


def test_what_does_not_go_with_a_lossy_rule_is_refused(live: Live) -> None:
    for more in ({"min_tokens": 3}, {"bad_words": ["x"]}):
        status, answer = ask(live, lossy=EVERYTHING, **more)
        assert (status, answer["error"]["param"]) == (400, "lossy") and "leave one" in answer["error"]["message"]


def test_every_chunk_says_so(live: Live) -> None:
    body = chat_body(
        max_tokens=60,
        temperature=0,
        lossy=EVERYTHING,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    request = urllib.request.Request(
        live.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 4 and all(chunk["lossless"] is False for chunk in chunks)
    [price] = [chunk["lossy"] for chunk in chunks if "lossy" in chunk]
    assert 0 < price["mean_tv"] <= 0.25


@pytest.mark.slow
def test_metrics_count_it_apart() -> None:
    def number(text: str, name: str) -> float:
        return float(next(line for line in text.splitlines() if line.startswith(f"{name}{{")).split()[-1])

    with serving(loose, allow_lossy=True) as live:
        ask(live, lossy=EVERYTHING, ignore_eos=True)
        wait_until(lambda: number(metrics(live), "paceline:lossy_requests_total"))
        exposition = metrics(live)
        assert (
            number(exposition, "paceline:lossy_requests_total") == 1
            and number(exposition, "paceline:lossy_tokens_total") == 60
        )
        assert (
            0
            < number(exposition, "paceline:lossy_total_variation_total")
            == number(exposition, "paceline:lossy_tokens_changed_total")
            <= 15
        )
        assert number(exposition, "paceline:lossy_rounds_total") > 5
        assert number(exposition, "vllm:spec_decode_num_drafts_total") == 0, (
            "what stands by a lossy rule is no drafter's merit"
        )
        assert "paceline:drafter_rounds_total{" not in exposition
        ask(live)
        assert number(metrics(live), "vllm:spec_decode_num_drafts_total") > 0


def test_a_lossy_answer_is_never_a_trace(tmp_path: Path) -> None:
    target = FakeTarget(vocab_size=258)
    engine = Engine(target, BYTES, ScriptedDrafter(target, 3, accuracy=0.6), allow_lossy=True)
    for lossy in (None, Lossy.of("lenience:0.5"), Lossy.of("lenience:1")):
        engine.add([1, 2], SamplingParams(max_tokens=9, lossy=lossy))
    traces, done = writer(tmp_path), list[Sequence]()
    while engine.has_work:
        for chunk in engine.step():
            if chunk.finish_reason:
                done.append(chunk.sequence)
                traces.offer(chunk.sequence, chunk.finish_reason, None)
    traces.close()
    assert len(done) == 3 and len(rows(tmp_path)) == 1
    assert traces.dropped["lossy"] == 2 and sum(traces.dropped.values()) == 2


@pytest.mark.slow
def test_a_budget_needs_leave() -> None:
    with pytest.raises(ConfigError, match="needs allow_lossy"):
        ServeConfig(max_tv=0.1)
