"""Conversations in requests: template, variables, tools and calls, and `/tokenize`, which renders the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from doubles import ByteTokenizer, ScriptedDrafter
from live_server import Live, serving
from request_calls import CHAT, MESSAGES, SCHEMA, ask, refused
from small_llm import Parrot, fake_llm

from paceline.engine.engine import Engine

pytestmark = pytest.mark.slow
pytest_plugins = ("tiny_server",)


def test_a_final_message_is_continued_and_tokenize_says_the_same(live: Live) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello, B"}]
    request = {"messages": messages, "continue_final_message": True}
    ids = ask(live, **request, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    text = live.post("/detokenize", {"tokens": ids})[1]["prompt"]
    assert text.endswith("<|im_start|>assistant\nHello, B")
    assert live.post("/tokenize", request)[1]["tokens"] == ids
    assert refused(live, **request, add_generation_prompt=True)["param"] == "continue_final_message"
    closed = {"messages": messages, "add_generation_prompt": False}
    ids = ask(live, **closed, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert live.post("/tokenize", closed)[1]["tokens"] == ids


@pytest.mark.parametrize(
    ("template", "fault"),
    [("{{ raise_exception('no user speaks here') }}", "no user speaks here"), (None, "no chat template")],
)
def test_a_template_that_refuses_is_told_in_words_of_http(template: str | None, fault: str) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    with serving(lambda: fake_llm(Parrot("assistant: ", [ByteTokenizer.eos_token_id]), tokenizer=tokenizer)) as live:
        answers = [live.post(path, {"messages": MESSAGES})[:2] for path in (CHAT, "/tokenize")]
    for status, body in answers:
        assert (status, body["error"]["param"]) == (400, "messages")
        assert fault in body["error"]["message"]
        assert "/v1/completions" in body["error"]["message"] and "--raw" not in body["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_conversation(live: Live, name: str) -> None:
    values = {"messages": [{"role": "user", "content": "Other."}], "tools": [], "add_generation_prompt": False}
    request = {"messages": MESSAGES, "chat_template_kwargs": {name: values[name]}}
    for path in (CHAT, "/tokenize"):
        status, body, _ = live.post(path, request)
        assert (status, body["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_tokenize_renders_as_the_chat_does(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    request = {"messages": MESSAGES, "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    count = ask(live, **request, max_tokens=1)["usage"]["prompt_tokens"]
    status, body, _ = live.post("/tokenize", request | {"return_token_strs": True})
    assert (status, body["count"], len(body["token_strs"])) == (200, count, count)
    assert count > live.post("/tokenize", {"messages": MESSAGES})[1]["count"]
    assert live.post("/tokenize", {"prompt": "x", "tools": tools})[1]["error"]["param"] == "tools"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "high"},
        {"documents": [{"text": "Oslo is rainy."}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    ],
)
def test_tokenize_gives_the_tokens_of_the_chat(fields: dict[str, Any]) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = f"{{{{ reasoning_effort }}}} {{{{ documents }}}} {{{{ tools }}}}{tokenizer.chat_template}"
    answer = [ByteTokenizer.eos_token_id]
    with serving(lambda: fake_llm(Parrot("assistant: ", answer), tokenizer=tokenizer)) as live:
        request: dict[str, Any] = {"messages": MESSAGES} | fields
        status, body, _ = live.post("/tokenize", request)
        plain = live.post("/tokenize", {"messages": MESSAGES})[1]["tokens"]
        chat: dict[str, Any] = request if fields.get("tool_choice") != "required" else request | {"tool_choice": "auto"}
        ids = ask(live, **chat, max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert status == 200, body
    assert body["tokens"] == ids
    assert (body["tokens"] == plain) == (fields.get("tool_choice") == "none")


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_histories_with_arguments_of_either_shape_are_one_prompt(live: Live, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = [
        *MESSAGES,
        {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
    ]
    counts = [live.post("/tokenize", {"messages": each})[1]["tokens"] for each in (history, expected)]
    assert counts[0] == counts[1]
    call["function"] = {"name": "f", "arguments": "{broken"}
    assert refused(live, messages=history)["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_of_a_stream_are_those_of_the_whole_answer(parallel: bool) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1.10}}</tool_call>'
    answer_ids = [*f"Sure.\n{call}\n{call}".encode(), ByteTokenizer.eos_token_id]
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 180,
        "temperature": 0,
        "tool_choice": "auto",
    }
    request |= {"tools": tools, "parallel_tool_calls": parallel}
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = (
        f"{tokenizer.chat_template}{{# knows tools #}}"  # so that none are described in the prompt
    )
    with serving(lambda: fake_llm(Parrot("assistant: ", answer_ids), tokenizer=tokenizer)) as live:
        body = ask(live, **request)
        status, streamed, _ = live.post(CHAT, request | {"stream": True})
    message = body["choices"][0]["message"]
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.decode().split("\n\n") if line[6:7] == "{"]
    assert (status, message["content"], body["choices"][0]["finish_reason"]) == (200, "Sure.", "tool_calls")
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Sure."
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [each["function"] for each in calls] == [each["function"] for each in message["tool_calls"]]
    assert [each["function"]["arguments"] for each in calls] == ['{"a": 1.10}'] * (2 if parallel else 1)
    assert [each["index"] for each in calls] == list(range(len(calls)))


@pytest.mark.parametrize("is_drafted", [False, True])
def test_blocks_of_other_dialects_keep_the_answers_order(is_drafted: bool) -> None:
    """A call, then a text: a round with drafts brings the end of the one and the beginning of the other together."""
    answer = b'<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone: I called f for you.'
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = f"{tokenizer.chat_template}{{# knows tools #}}"

    def load() -> Any:
        target = Parrot("assistant: ", [*answer, *[ByteTokenizer.eos_token_id] * 16])
        llm = fake_llm(target, tokenizer=tokenizer)
        if is_drafted:
            llm.engine = Engine(target, tokenizer, ScriptedDrafter(target, 15), eos_token_ids=(257,))
        return llm

    messages, function = [{"role": "user", "content": "hi"}], {"name": "f"}
    tools = {
        "messages": [function | {"input_schema": {"type": "object"}}],
        "responses": [function | {"type": "function"}],
    }
    with serving(load) as live:
        request = {"max_tokens": 120, "temperature": 0, "messages": messages, "tools": tools["messages"]}
        blocks = live.post("/v1/messages", request)[1]["content"]
        request = {"max_output_tokens": 120, "temperature": 0, "input": "hi", "tools": tools["responses"]}
        items = live.post("/v1/responses", request)[1]["output"]
    expected = ["f", "Done: I called f for you."]
    assert [block.get("text") or block["name"] for block in blocks] == expected
    assert [item["content"][0]["text"] if item["type"] == "message" else item["name"] for item in items] == expected
