"""Tool calls out of answers, however the text comes; tools into prompts, whatever the template."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.failures import RequestRefused
from paceline.serve.protocol import ChatRequest
from paceline.serve.tools import Call, CallParser, forced_schema, prompt_messages, tools_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def request(**more: object) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": tools} | more)


def parse(pieces: list[str]) -> tuple[str, list[Call]]:
    parser = CallParser(tools_of(request()))
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "shown", "names"),
    [
        ("Hello there.", "Hello there.", []),
        (CALL, "", ["f"]),
        (f"Let me see.\n{CALL}", "Let me see.\n", ["f"]),
        (CALL + "\n" + CALL.replace('"f"', '"g"'), "", ["f", "g"]),
        (CALL.removesuffix("</tool_call>"), "", ["f"]),
        ('{"name": "g", "parameters": {"y": [2]}}', "", ["g"]),
        ('  {"name": "g"}', "", ["g"]),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ("{not json", "{not json", []),
        ("a < b <tool", "a < b <tool", []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ('<tool_call>{"name": ["f"]}</tool_call>', '<tool_call>{"name": ["f"]}</tool_call>', []),
        ("<tool_call>cut", "<tool_call>cut", []),
        ("", "", []),
    ],
)
@given(data=st.data())
def test_calls_are_found_however_the_text_comes(text: str, shown: str, names: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    given_text, calls = parse(pieces)
    assert given_text.strip() == shown.strip()
    assert [call.name for call in calls] == names


def test_arguments_are_json_text() -> None:
    assert parse([CALL])[1] == [Call("f", '{"x": 1}')]
    assert parse(['{"name": "f", "arguments": "{\\"x\\": 1}"}'])[1] == [Call("f", '{"x": 1}')]


def test_a_template_that_knows_tools_gets_them() -> None:
    asked = request()
    messages, variables = prompt_messages(asked.messages, tools_of(asked), "{% if tools %}{{ tools }}{% endif %}")
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["f", "g"]
    assert messages == [{"role": "user", "content": "hi"}]


def test_any_other_gets_a_system_message() -> None:
    asked = request(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    messages, variables = prompt_messages(asked.messages, tools_of(asked), "{{ messages }}")
    assert variables == {}
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou are")
    assert '"name": "g"' in messages[0]["content"]


def test_earlier_calls_become_text_or_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]
    asked = request(messages=turns)
    text, _ = prompt_messages(asked.messages, [], "plain")
    assert text[0]["content"] == CALL
    assert text[1] == {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"}
    native, _ = prompt_messages(asked.messages, [], "knows tools")
    assert native[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert native[1] == {"role": "tool", "content": "done", "tool_call_id": "1"}


def test_the_choice_becomes_a_schema() -> None:
    assert forced_schema(request()) is None
    assert forced_schema(request(tool_choice="none")) is None
    assert len(json.loads(forced_schema(request(tool_choice="required")) or "")["anyOf"]) == 2
    named = {"type": "function", "function": {"name": "g"}}
    schema = json.loads(forced_schema(request(tool_choice=named)) or "")
    assert schema["properties"]["name"] == {"const": "g"}
    with pytest.raises(RequestRefused, match="not among the tools"):
        forced_schema(request(tool_choice={"type": "function", "function": {"name": "h"}}))


def test_definitions_move_to_the_root() -> None:
    def tool(name: str, kind: object) -> dict[str, object]:
        parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": kind}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    same = request(tools=[tool("a", {"type": "string"}), tool("b", {"type": "string"})], tool_choice="required")
    assert json.loads(forced_schema(same) or "")["$defs"] == {"P": {"type": "string"}}
    with pytest.raises(RequestRefused, match="define 'P' differently"):
        forced_schema(request(tools=[tool("a", {"type": "string"}), tool("b", True)], tool_choice="required"))
    forced_schema(
        request(tools=[tool("a", 1) | {"function": {"name": "a", "parameters": {"$defs": [1]}}}], tool_choice="required")
    )
