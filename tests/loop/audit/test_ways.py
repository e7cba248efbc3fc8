"""Servers that have less than ours: text prompts alone, chat alone, no seeds, no log-probabilities, other templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, serving, talker
from small_llm import Talker, fake_llm
from upstream import Asked, answering, whole

from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.loop.audit.config import AuditConfig
from paceline.loop.audit.run import Audited, audit

pytestmark = pytest.mark.slow
CONFIG = AuditConfig(answers=24, max_tokens=12, greedy_tokens=12, temperatures=(1.0,), server_precision="float32")
Change = Callable[[str, dict[str, Any]], str]
"""Path and body of a request, which it may change, to why the server refuses it: "" where it does not."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(talker(num_rows=4)) as running:
        yield running


@pytest.fixture(autouse=True)
def _our_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very model of the server; and no plots, which take longest."""
    monkeypatch.setattr("paceline.loop.audit.run.LLM.of", lambda _: fake_llm(Talker(num_rows=1, max_len=256)))
    monkeypatch.setattr("paceline.report.pages.ranges", lambda title, *_, **__: (title, ""))


def examined(live: Live, change: Change, out: Path, config: AuditConfig = CONFIG) -> Audited:
    def answer(request: Asked) -> Iterable[bytes]:
        if request.method == "GET":
            return whole({"data": [{"id": "fake"}]})
        body = json.loads(request.body) | {"model": None}
        if why := change(request.target, body):
            return whole({"error": {"message": why}}, status="400 Bad")
        status, reply, _ = live.post(request.target, body)
        return whole(reply, status=f"{status} So")

    with answering(answer) as upstream:
        return audit(upstream.url, EngineConfig(model="fake"), config, limit=6, out=out)


def outcomes(done: Audited) -> dict[str, str]:
    return {each.check: each.outcome for each in done.findings}


def plain(path: str, body: dict[str, Any]) -> str:
    """OpenAI's oldest words alone."""
    unknown = {"top_k", "return_token_ids", "seed", "logprobs"} & set(body)
    return f"what is {min(unknown)}?" if unknown else ""


def text_alone(path: str, body: dict[str, Any]) -> str:
    return plain(path, body) or ("a prompt is text" if not isinstance(body.get("prompt"), str) else "")


def chat_alone(path: str, body: dict[str, Any]) -> str:
    return plain(path, body) or ("no such thing" if path == "/v1/completions" else "")


@pytest.mark.parametrize(("change", "kind"), [(plain, "ids"), (text_alone, "text"), (chat_alone, "chat")])
def test_what_a_server_does_not_offer_is_no_fault(live: Live, tmp_path: Path, change: Change, kind: str) -> None:
    done = examined(live, change, tmp_path)
    results = outcomes(done)
    assert done.verdict == "honest", [each.text for each in done.findings]
    assert (
        results["seeds"] == results["logprobs"] == "not offered" and results["sampled"] == results["greedy"] == "passed"
    )
    assert json.loads((tmp_path / "config.json").read_text())["sent_as"] == kind


@pytest.mark.parametrize("greedy_tokens", [12, 0])
def test_another_template_cannot_be_compared(live: Live, tmp_path: Path, greedy_tokens: int) -> None:
    def change(path: str, body: dict[str, Any]) -> str:
        if "messages" in body:
            body["messages"] = [{"role": "system", "content": "Be brief."}, *body["messages"]]
        return chat_alone(path, body)

    done = examined(live, change, tmp_path, replace(CONFIG, greedy_tokens=greedy_tokens))
    assert done.verdict == "unsure" and outcomes(done) == {"usage": "not judged"}
    assert "Not decided" in (tmp_path / "report.md").read_text()


def test_a_seed_that_is_always_the_same_is_found(live: Live, tmp_path: Path) -> None:
    def change(path: str, body: dict[str, Any]) -> str:
        body["seed"] = 1
        return ""

    done = examined(live, change, tmp_path)
    assert done.verdict == "faulty" and any("pairs of answers are equal" in each.text for each in done.findings)


def test_a_server_that_answers_in_no_way_says_why(live: Live, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="status 400: out of order"):
        examined(live, lambda *_: "out of order", tmp_path)
