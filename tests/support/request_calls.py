"""Requests to a live server, and parts of their answers."""

from __future__ import annotations

from typing import Any

from live_server import Live

MESSAGES = [{"role": "user", "content": "Say something."}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def ask(live: Live, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    status, body, _ = live.post(path, ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | fields)
    assert status == 200, body
    return body


def text_of(body: dict[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refused(live: Live, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    status, body, _ = live.post(path, ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"}) | fields)
    assert status == 400, body
    return body["error"]
