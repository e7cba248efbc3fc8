"""The whole audit over HTTP: servers of a tiny model, honest ones and such that have a fault."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted_servers
import pytest
import torch
from fixed_seeds import fixed_seeds
from live_server import serving
from safetensors.torch import load_file, save_file
from small_llm import tiny_model

from paceline.config import EngineConfig
from paceline.engine.llm import LLM
from paceline.loop.audit.answers import AnswerReader, ServerAnswer
from paceline.loop.audit.config import AuditConfig
from paceline.loop.audit.endpoint import AuditPrompt, Endpoint, Request
from paceline.loop.audit.run import Audited, Auditor, audit
from paceline.model.text.tokenizer import Tokenizer
from paceline.net.streaming import Client
from paceline.report.tables import Progress

__all__ = ["fixed_seeds"]

pytestmark = pytest.mark.slow
SMALL = AuditConfig(answers=48, max_tokens=16, greedy_tokens=24, server_precision="float32", temperatures=(1.0,))
ENGINE: dict[str, Any] = {"dtype": "float32", "max_batch": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp(tmp_path_factory.mktemp("model"))


def sharp(folder: Path, noise: float = 0.0) -> Path:
    """A tiny model that is as sure as a real one, and one that is a little different."""
    file = tiny_model(folder) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 12.0
    draw = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=draw)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp(tmp_path_factory.mktemp("other"), noise=0.4)


@pytest.fixture(scope="module")
def url(model: Path, other: Path) -> Iterator[str]:
    """Our own server, with a drafter that is often wrong."""
    with serving(
        lambda: LLM(str(model), drafter=str(other), speculate="3", allow_lossy=True, **ENGINE), allow_lossy=True
    ) as live:
        yield live.url


def examined(url: str, model: Path, out: Path, config: AuditConfig = SMALL, **options: Any) -> Audited:
    return audit(url, EngineConfig(model=str(model), dtype="float32"), config, out=out, **options)


def outcomes(done: Audited) -> dict[str, str]:
    return {each.check: each.outcome for each in done.findings}


def test_our_own_server_passes(url: str, model: Path, tmp_path: Path) -> None:
    done = examined(url, model, tmp_path)
    assert done.verdict == "honest", [each.text for each in done.findings]
    assert set(outcomes(done).values()) == {"passed"} and len(outcomes(done)) == 7
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["verdict"] == "honest" and len(report["tests"]) > 20
    page = (tmp_path / "report.html").read_text()
    assert "No fault found" in page and "<svg" in page and "surprisal" in page


def test_answers_longer_than_requested_are_scored_as_far_as_they_fit(model: Path) -> None:
    """A server that ignored max_tokens ended the audit with an error of the model's cache."""
    llm = LLM(str(model), drafter="none", max_len=64, max_batch=1, dtype="float32")
    prompt = AuditPrompt((5, 6), "", (5, 6), None)
    with contextlib.closing(Client("http://127.0.0.1:9")) as client:
        endpoint = Endpoint(client, "model", [prompt], AnswerReader(llm.tokenizer))
        auditor = Auditor(llm, endpoint, SMALL, Progress())
        answer = ServerAnswer("", "length", [7] * 300, None, 2, 300)
        (draw,) = auditor.scored([(Request(0, 1.0, 12), answer)], 1.0)
    assert draw.tokens == (7,) * 62 and len(draw.scores.nll_T) == 62


@pytest.mark.parametrize(
    ("name", "check"),  # one for each check; all kinds without a server: test_evidence.py
    [
        pytest.param("flattened", "sampled", marks=pytest.mark.nightly),
        pytest.param("top-p", "nucleus", marks=pytest.mark.nightly),
        pytest.param("another", "greedy", marks=pytest.mark.nightly),
    ],
)
def test_planted_faults(
    url: str,
    model: Path,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    check: str,
) -> None:
    monkeypatch.setattr("paceline.report.pages.ranges", lambda title, *_, **__: (title, ""))  # drawing takes longest
    monkeypatch.setattr(planted_servers, "HEAT", 1.5)  # at its own 1.15, 48 answers miss it once in four runs
    wrong = serving(lambda: LLM(str(other), drafter="none", **ENGINE))
    with wrong as live, contextlib.closing(Client(url)) as ours, contextlib.closing(Client(live.url)) as theirs:
        kinds = planted_servers.planted(
            planted_servers.asking(ours), planted_servers.asking(theirs), Tokenizer.from_path(model)
        )
        with planted_servers.proxy(kinds[name]) as faulty:
            done = examined(faulty, model, tmp_path)
    assert done.verdict == "faulty" and any(
        each.check == check and each.outcome == "fault" for each in done.findings
    ), [each.text for each in done.findings]
    assert "FAULT" in (tmp_path / "report.html").read_text()
