"""A server with a tiny model, one for each file of tests: `pytest_plugins = ("tiny_server",)`, fixture `live`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import Live, serving
from openai import OpenAI
from small_llm import tiny_model

from paceline import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position=2048)


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    def load() -> LLM:
        return LLM(str(folder), drafter="ngram", dtype="float32", device="cpu", max_batch=4, speculate="full")

    with serving(load) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return LLM(str(folder), drafter="none", dtype="float32", device="cpu")
