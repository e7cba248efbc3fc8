"""Families behind the server: an answer over HTTP is Transformers' `generate`, with a drafter that is mostly wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import serving

from paceline.engine.llm import LLM

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
SERVED = ["llama", "gemma3", "gpt-oss", "qwen3.5-moe", "gemma4-small"]
"""One family for each kind of cache: the server does not depend on the family."""


@pytest.mark.parametrize("name", SERVED)
def test_an_answer_over_http(name: str, family_model: tuple[Path, Any]) -> None:
    folder, model = family_model

    def factory() -> LLM:
        settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_batch": 2, "max_len": 64}
        return LLM(str(folder), drafter="random-dflash", speculate="full", **settings)

    with serving(factory) as live:
        status, body, _ = live.post(
            "/v1/completions",
            {"prompt": "ab", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
        )
    assert status == 200
    choice = body["choices"][0]
    prompt = choice["prompt_token_ids"]
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    assert choice["token_ids"] == out[0, len(prompt) :].tolist()
