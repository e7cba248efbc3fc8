"""The official `openai` client's Responses, unmodified, against a real server with a real (tiny, random) model."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from live_server import break_engine, serving, talker, wait_until
from pydantic import BaseModel, ConfigDict

from paceline.serve.dialects.responses import ResponsesRequest, chat_of

pytest_plugins = ("tiny_server",)
MODEL = "tiny"
QUESTION = "Say something."
HELLO = [{"role": "user", "content": QUESTION}]
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a place.",
    "parameters": SCHEMA,
    "strict": True,
}
FUNCTION = {"name": "weather", "description": "Of a place.", "parameters": SCHEMA, "strict": True}


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Rome"]


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, temperature=0, **options)


@pytest.mark.slow
def test_an_answer_is_the_chats(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input=QUESTION, instructions="Be brief.", temperature=0, max_output_tokens=30, store=False
    )
    expected = chat(client, messages=[{"role": "system", "content": "Be brief."}, *HELLO], max_tokens=30)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.status == "incomplete"
    assert answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage and answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == 30
    assert answer.usage.total_tokens == expected.usage.total_tokens


@pytest.mark.slow
def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "input": HELLO, "temperature": 0, "max_output_tokens": 30}
    whole = client.responses.create(**request)
    events = list(client.responses.create(**request, stream=True))
    kinds = [event.type for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    end = ["output_text.delta", "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:5] == [f"response.{kind}" for kind in begin]
    assert kinds[-5:] == [f"response.{kind}" for kind in end]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 3
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage and whole.usage
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 30
    with client.responses.stream(**request) as stream:
        assert (
            "".join(event.delta for event in stream if event.type == "response.output_text.delta") == whole.output_text
        )


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_tool_is_called(client: openai.OpenAI, choice: Any, is_stream: bool) -> None:
    request: Any = {"model": MODEL, "input": HELLO, "tools": [WEATHER], "tool_choice": choice, "temperature": 0}
    if is_stream:
        events = list(client.responses.create(**request, stream=True))
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert ["".join(pieces)] == done
        last = events[-1]
        assert last.type == "response.completed"
        answer = last.response
    else:
        answer = client.responses.create(**request)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, answer.status, call.status) == ("weather", "completed", "completed")
    assert json.loads(call.arguments)["place"] in ("Oslo", "Rome")


@pytest.mark.slow
def test_turns_with_an_output_give_the_chats_prompt(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, tools=[WEATHER], tool_choice="required", temperature=0)
    (call,) = first.output
    assert call.type == "function_call"
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    text = {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}
    turns: Any = [*HELLO, reasoning, text, call, result, {"role": "user", "content": "And now?"}]
    second = client.responses.create(model=MODEL, input=turns, tools=[WEATHER], temperature=0, max_output_tokens=20)
    function = {"name": "weather", "arguments": call.arguments}
    called = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
    }
    history = [
        *HELLO,
        called,
        {"role": "tool", "tool_call_id": call.call_id, "content": "snow"},
        {"role": "user", "content": "And now?"},
    ]
    expected = chat(client, messages=history, tools=[{"type": "function", "function": FUNCTION}], max_tokens=20)
    assert second.output_text == expected.choices[0].message.content
    assert second.usage and second.usage.input_tokens == expected.usage.prompt_tokens


def test_items_of_one_answer_are_one_message() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    first_message = {"type": "message", "role": "assistant", "content": "I look."}
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    items = [
        *HELLO,
        thought("Hm."),
        thought("So."),
        first_message,
        call,
        {**call, "call_id": "2"},
        thought("Then."),
        first_message,
        first_message,
    ]
    chat, names = chat_of(ResponsesRequest.model_validate({"input": items}))
    sent = [message.as_sent() for message in chat.messages]
    assert [(each["content"], each.get("reasoning_content"), len(each.get("tool_calls", ()))) for each in sent] == [
        (QUESTION, None, 0),
        ("I look.", "Hm.\nSo.", 2),
        ("I look.", "Then.", 0),
        ("I look.", None, 0),
    ]
    assert names["messages[1]"] == "input[1]"
    assert names["messages[1].tool_calls[1].function"] == "input[5]"


@pytest.mark.slow
def test_a_json_schema_holds(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Place)
    assert answer.output_parsed and answer.output_parsed.place in ("Oslo", "Rome")
    with client.responses.stream(model=MODEL, input=QUESTION, text_format=Place) as stream:
        parsed = stream.get_final_response().output_parsed
    assert parsed and parsed.place in ("Oslo", "Rome")


def test_log_probabilities_are_the_chats(client: openai.OpenAI) -> None:
    request: Any = {"model": MODEL, "temperature": 0, "top_logprobs": 2}
    answer = client.responses.create(
        **request,
        input=QUESTION,
        max_output_tokens=5,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    expected = (
        client.chat.completions.create(**request, messages=HELLO, logprobs=True, max_tokens=5).choices[0].logprobs
    )  # type: ignore[arg-type]
    assert expected and expected.content and part.logprobs
    assert [(each.token, each.logprob) for each in part.logprobs] == [
        (each.token, each.logprob) for each in expected.content
    ]
    with pytest.raises(openai.BadRequestError, match="include") as wrong:
        client.responses.create(**request, input=QUESTION)
    assert wrong.value.param == "top_logprobs"


def test_log_probabilities_include_the_end_token_streamed_or_not() -> None:
    include: Any = {"include": ["message.output_text.logprobs"], "temperature": 0, "max_output_tokens": 99}
    with serving(talker(eos_bonus=3.5)) as live, live.client() as client:
        for question in "abcdef":
            chat: Any = {"messages": [{"role": "user", "content": question}], "max_tokens": 99}
            (choice,) = client.chat.completions.create(model="fake", temperature=0, logprobs=True, **chat).choices
            assert choice.finish_reason == "stop" and choice.logprobs and choice.logprobs.content
            expected = [(each.token, each.logprob) for each in choice.logprobs.content]
            events = client.responses.create(model="fake", input=question, stream=True, **include)
            streamed = [
                each for event in events if event.type == "response.output_text.delta" for each in event.logprobs
            ]
            whole: Any = client.responses.create(model="fake", input=question, **include).output[0]
            for logprobs in (streamed, whole.content[0].logprobs):
                assert [(each.token, each.logprob) for each in logprobs] == expected


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}),
        ("reasoning.effort", {"reasoning": {"effort": "high"}}),
        (
            "input[0].content[0].type",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        (
            "input[1].arguments",
            {"input": [*HELLO, {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "[]"}]},
        ),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "1"}]}),
        ("input", {"input": "x" * 3000}),
    ],
)
def test_a_refusal_names_the_field(client: openai.OpenAI, field: str, more: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": MODEL, "input": QUESTION, "max_output_tokens": 4, **more})
    assert refused.value.param == field


@pytest.mark.slow
def test_a_failure_ends_a_stream_with_a_failed_response() -> None:
    with serving(talker(0.01)) as live, live.client() as client:
        events = []
        for event in client.responses.create(model="fake", input=QUESTION, max_output_tokens=200, stream=True):
            events.append(event)
            if len(events) == 6:
                break_engine(live)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error and last.response.error.code == "server_error"


@pytest.mark.slow
def test_both_apis_are_counted_as_chats_with_their_tags() -> None:
    with serving(talker()) as live:
        headers = {"x-paceline-tag": "agents"}
        assert live.post("/v1/responses", {"input": "x", "max_output_tokens": 3}, headers)[0] == 200
        assert live.post("/v1/messages", {"messages": HELLO, "max_tokens": 3}, headers)[0] == 200
        wait_until(lambda: len(live.seen.outcomes) == 2)  # the engine counts when the answers are on their way
        assert live.seen.tags == ["agents", "agents"]
