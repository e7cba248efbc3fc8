"""Answers of which the server parsed reasoning or calls: their tokens, rendered again and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from upstream import completion

from paceline.loop.record.exchange import Exchange
from paceline.loop.record.reader import Reader
from paceline.loop.record.response import Response
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.admin.traces import Trace

QUESTION = [{"role": "user", "content": "Weather?"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call id=' + (c.id or '') + '>\n{\"name\": \"' + c.function.name"
    " + '\", \"arguments\": ' + c.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The parts of Qwen3's template that matter here; it also shows the ids of calls, as others do."""
CALL = {"id": "call_7", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ærø", "n": 2}'}}
THOUGHT = "<think>\nIs it?\nIt is.\n</think>\n\nRainy."
CALLED = (
    '<think>\nLook.\n</think>\n\n\n<tool_call id=call_7>\n{"name": "weather", "arguments": {"place": "Ærø", "n": 2}}\n'
)
CALLED += "</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(tokenizer: Tokenizer, *chunks: dict[str, Any], **more: Any) -> Trace:
    (trace,) = Reader(tokenizer).traces(Exchange(True, {"messages": QUESTION, **more}, list(chunks)))
    assert trace.prompt_ids == tokenizer.encode_chat(QUESTION, tools=more.get("tools", ()))
    return trace


def answer(message: dict[str, Any], num_tokens: int | None, reason: str = "stop", **more: Any) -> dict[str, Any]:
    reply = completion("", reason, **more)
    reply["choices"][0]["message"] = {"role": "assistant", **message}
    return reply | ({} if num_tokens is None else {"usage": {"completion_tokens": num_tokens}})


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), *tokenizer.eos_token_ids]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("reasoning", ["\nIs it?\nIt is.\n", "Is it?\nIt is."])
def test_reasoning_is_rendered_again(tokenizer: Tokenizer, name: str, reasoning: str) -> None:
    """With and without the line breaks that the template writes."""
    whole = tokens(tokenizer, THOUGHT)
    trace = read(tokenizer, answer({"content": "Rainy.", name: reasoning}, len(whole)))
    assert (trace.answer_ids, trace.finish_reason) == (whole, "stop")


def test_calls_keep_their_ids(tokenizer: Tokenizer) -> None:
    whole = tokens(tokenizer, CALLED)
    message = {"content": None, "reasoning_content": "Look.", "tool_calls": [CALL]}
    trace = read(tokenizer, answer(message, len(whole), "tool_calls"), tools=[TOOL])
    assert (trace.answer_ids, trace.finish_reason) == (whole, "stop")


def test_a_stream_of_calls(tokenizer: Tokenizer) -> None:
    """vLLM names a call's id and function once, and then sends pieces of its arguments."""
    whole = tokens(tokenizer, CALLED)
    function = CALL["function"]
    first = {"index": 0, "id": "call_7", "type": "function", "function": {"name": "weather", "arguments": ""}}
    pieces = [function["arguments"][:9], function["arguments"][9:]]
    calls = [first, *({"index": 0, "function": {"arguments": piece}} for piece in pieces)]
    deltas = [{"reasoning": "Lo"}, {"reasoning": "ok."}, *({"tool_calls": [call]} for call in calls)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]
    chunks += [{"choices": [], "usage": {"completion_tokens": len(whole)}}]
    assert read(tokenizer, *chunks, tools=[TOOL]).answer_ids == whole
    message = Response.of(chunks).choices[0].message()
    assert message["tool_calls"] == [CALL] and message["reasoning_content"] == "Look."


@pytest.mark.parametrize(
    ("message", "num_tokens", "more"),
    [
        ({}, len(THOUGHT) + 2, {}),
        ({}, None, {}),
        ({}, len(THOUGHT) + 1, {"reason": "length"}),
        ({}, len(THOUGHT) + 1, {"choice": {"stop_reason": "x"}}),
        ({"refusal": "No."}, len(THOUGHT) + 1, {}),
        ({"reasoning_content": True}, len(THOUGHT) + 1, {}),
        ({"content": "Rainy.<|im_end|>"}, len(THOUGHT) + 1, {}),
        ({"tool_calls": [{"function": {"name": "weather", "arguments": "nonsense"}}]}, len(THOUGHT) + 1, {}),
    ],
    ids=["count", "no count", "length", "stop string", "refusal", "hidden", "end in the text", "arguments"],
)
def test_what_cannot_be_checked_leaves_a_prompt(
    tokenizer: Tokenizer, message: dict[str, Any], num_tokens: int | None, more: dict[str, Any]
) -> None:
    fields = {"content": "Rainy.", "reasoning_content": "Is it?\nIt is.", **message}
    trace = read(tokenizer, answer(fields, num_tokens, **more))
    assert (trace.answer_ids, trace.finish_reason) == ([], "unknown")


def test_stop_strings_leave_a_prompt(tokenizer: Tokenizer) -> None:
    fields = {"content": "Rainy.", "reasoning_content": "Is it?\nIt is."}
    assert read(tokenizer, answer(fields, len(THOUGHT) + 1), stop=["!"]).answer_ids == []


def test_arguments_in_another_form_are_not_taken(tokenizer: Tokenizer) -> None:
    """The same number of other tokens: the model wrote its arguments without the template's spaces."""
    fields = {"content": "", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"place":"Ærø!"}'}}]}
    text = '\n<tool_call id=call_7>\n{"name": "weather", "arguments": {"place": "Ærø!"}}\n</tool_call>'
    num_tokens = len(tokens(tokenizer, text))
    assert read(tokenizer, answer(fields, num_tokens, "tool_calls"), tools=[TOOL]).answer_ids == []


def test_a_template_that_drops_reasoning(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template like DeepSeek-R1's: the count may agree by chance, the reasoning is still missing."""
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("m.reasoning_content %}", "false %}"))
    monkeypatch.setattr(tokenizer, "_compiled", None)
    trace = read(tokenizer, answer({"content": "Rainy.", "reasoning_content": "Is it?"}, len("Rainy.") + 1))
    assert trace.answer_ids == []
