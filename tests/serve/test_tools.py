"""Tools into prompts, whatever the template, and schemas of the calls that are demanded."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from paceline.data.messages import normalised
from paceline.errors import PromptError
from paceline.model.text.tools import compact, with_tools
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.grammars import forced_schema, grammar_of
from paceline.serve.requests.prompts import plain_tools, tools_of
from paceline.serve.requests.protocol import ChatRequest

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def request(**more: object) -> ChatRequest:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": tools} | more)


def in_prompt(chat_request: ChatRequest, template: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    messages = normalised(message.as_sent() for message in chat_request.messages)
    return with_tools(messages, plain_tools(tools_of(chat_request)), template)


def test_a_template_that_knows_tools_gets_them() -> None:
    chat_request = request()
    messages, variables = in_prompt(chat_request, "{% if tools %}{{ tools }}{% endif %}")
    assert [tool["function"]["name"] for tool in variables["tools"]] == ["f", "g"]
    assert messages == [{"role": "user", "content": "hi"}]


def test_any_other_gets_a_system_message() -> None:
    chat_request = request(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    messages, variables = in_prompt(chat_request, "{{ messages }}")
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
    chat_request = request(messages=turns, tool_choice="none")
    text, _ = in_prompt(chat_request, "plain")
    assert text[0]["content"] == CALL
    assert text[1] == {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"}
    native, _ = in_prompt(chat_request, "knows tools")
    assert native[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert native[0]["tool_calls"][0]["id"] == "1"
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
        request(
            tools=[tool("a", 1) | {"function": {"name": "a", "parameters": {"$defs": [1]}}}], tool_choice="required"
        )
    )


@pytest.mark.parametrize(
    "parameters",
    [..., None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"type": "object", "required": []}],
)
def test_a_tool_without_parameters_is_called_with_an_empty_object(parameters: object) -> None:
    function = {"name": "now"} | ({} if parameters is ... else {"parameters": parameters})
    schema = json.loads(forced_schema(request(tools=[{"function": function}], tool_choice="required")) or "")
    assert schema["properties"]["arguments"] == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("kind", ["nope", "string", ["string", "null"]])
def test_parameters_that_are_no_object_are_refused(kind: object) -> None:
    """A type alone was replaced by the empty object, whatever it was."""
    function = {"name": "now", "parameters": {"type": kind}}
    with pytest.raises(RequestRefused, match="the parameters of tool 'now' must be of type object") as refused:
        forced_schema(request(tools=[{"function": function}], tool_choice="required"))
    assert refused.value.param == "tools"


def test_parameters_may_be_an_object_or_null() -> None:
    parameters = {"type": ["object", "null"], "properties": {"place": {"type": "string"}}}
    tools = [{"function": {"name": "now", "parameters": parameters}}]
    schema = json.loads(forced_schema(request(tools=tools, tool_choice="required")) or "")
    assert schema["properties"]["arguments"] == parameters


def test_deeply_nested_json_is_refused_wherever_it_stands() -> None:
    deep: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        deep = {"items": deep}
    with pytest.raises(PromptError, match="^the JSON is nested too deeply: flatten it$"):
        compact(deep)
    with pytest.raises(RequestRefused, match="^the JSON is nested too deeply: flatten it$") as refused:
        grammar_of(request().model_copy(update={"guided_json": deep}))
    assert refused.value.status == 400
