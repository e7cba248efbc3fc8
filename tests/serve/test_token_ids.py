"""`return_token_ids`: the tokens themselves, as vLLM gives them; nobody gets them unasked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import serving, talker


@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [True, False])
def test_token_ids_on_request(is_chat: bool) -> None:
    request: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Once", "n": 2}
    )
    request |= {"temperature": 1, "seed": 3, "max_tokens": 12}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    with serving(talker()) as live:
        tokenizer = live.llm.tokenizer
        prompt = tokenizer.encode_chat(request["messages"]) if is_chat else tokenizer.encode("Once")
        _, body, _ = live.post(path, request | {"return_token_ids": True})
        _, raw, _ = live.post(path, request | {"return_token_ids": True, "stream": True})
        _, plain, _ = live.post(path, request)
    for choice in body["choices"]:
        assert choice["prompt_token_ids"] == prompt
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert tokenizer.decode(choice["token_ids"]) == text
    assert sum(len(choice["token_ids"]) for choice in body["choices"]) == body["usage"]["completion_tokens"]
    streamed: dict[int, list[int]] = {}
    for line in raw.decode().split("\n\n"):
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert streamed == {choice["index"]: choice["token_ids"] for choice in body["choices"]}
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain["choices"][0]
