"""Requests as chat pages and editors send them: Open WebUI's chat, Continue's chat with tools and its completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import Live, serving, talker

READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the workspace.",
        "parameters": {"type": "object", "required": ["filepath"], "properties": {"filepath": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"filepath": "a.py"}'}}
SYSTEM = {"role": "system", "content": "You are a coding assistant."}
SESSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI's chat": (
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "fake",
            "messages": [{"role": "user", "content": "hello"}],
            "stream_options": {"include_usage": True},
        },
    ),
    "Open WebUI's second turn": (
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "fake",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                {"role": "assistant", "content": "good day"},
                {"role": "user", "content": "and now?"},
            ],
            "stream_options": {"include_usage": True},
        },
    ),
    "Continue's chat with a tool's result": (
        "/v1/chat/completions",
        {
            "model": "fake",
            "max_tokens": 16,
            "stream": True,
            "messages": [
                SYSTEM,
                {"role": "user", "content": "What is in a.py?"},
                {"role": "assistant", "content": " ", "tool_calls": [CALL]},
                {"role": "tool", "content": "pass", "tool_call_id": "call_1"},
            ],
            "tools": [READ_FILE],
        },
    ),
    "Continue's completion": (
        "/v1/completions",
        {
            "model": "fake",
            "max_tokens": 16,
            "temperature": 0.01,
            "stop": ["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>", "\n\n"],
            "stream": True,
            "prompt": "<|fim_prefix|>def f(<|fim_suffix|>)<|fim_middle|>",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_streams_to_its_end(session: str) -> None:
    path, body = SESSIONS[session]
    with serving(talker(max_len=2048)) as live:
        assert live.request("GET", "/v1/models")[1]["data"][0]["id"] == "fake"
        chunks = streamed(live, path, body)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] in (["stop"], ["length"])
    if path.endswith("chat/completions"):
        assert choices[0]["delta"]["role"] == "assistant"
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []


def streamed(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text, headers = live.post(path, body)
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in text.decode().split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]
