"""The official `anthropic` client, unmodified, against /v1/messages of a real server with a real (tiny, random)
model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import Live, break_engine, serving, talker

pytest_plugins = ("tiny_server",)
HELLO: Any = [{"role": "user", "content": "Say something."}]
MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Rome"]}},
    "required": ["place"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "The weather of a place.", "input_schema": SCHEMA}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a place.", "parameters": SCHEMA},
}
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Version 2 of the client has no such arguments any more, the API takes them as before."""


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as opened:
        yield opened


def chat(live: Live, **body: Any) -> Any:
    status, answer, _ = live.post("/v1/chat/completions", {"temperature": 0, **body})
    assert status == 200, answer
    return answer


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.slow
def test_an_answer_is_the_chats(client: anthropic.Anthropic, live: Live) -> None:
    message = client.messages.create(model=MODEL, max_tokens=30, system="Be brief.", messages=HELLO, **GREEDY)
    expected = chat(live, messages=[{"role": "system", "content": "Be brief."}, *HELLO], max_tokens=30)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert text_of(message) == expected["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    used = message.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == expected["usage"]["prompt_tokens"]
    assert used.output_tokens == expected["usage"]["completion_tokens"] == 30


@pytest.mark.slow
def test_a_stream_is_the_whole_answer_in_pieces(client: anthropic.Anthropic) -> None:
    request: Any = {"model": MODEL, "max_tokens": 30, "messages": HELLO, **GREEDY}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    raw = [kind for kind in kinds if kind != "text"]  # which is the client's own event
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(raw[2:-3]) == {"content_block_delta"} and len(raw) > 8
    assert text_of(final) == text_of(whole)
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    request: Any = {"model": MODEL, "max_tokens": 30, "messages": HELLO, **GREEDY}
    whole = text_of(client.messages.create(**request))
    cut = client.messages.create(**request, stop_sequences=["never said", whole[4:6]])
    assert text_of(cut) == whole[: whole.index(whole[4:6])]
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", whole[4:6])
    with client.messages.stream(**request, stop_sequences=[whole[4:6]]) as stream:
        assert stream.get_final_message().stop_sequence == whole[4:6]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_forced_tool_is_called(client: anthropic.Anthropic, choice: Any, is_stream: bool) -> None:
    request: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 300,
        **GREEDY,
    }
    if is_stream:
        with client.messages.stream(**request) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            message = stream.get_final_message()
        assert json.loads("".join(pieces))["place"] in ("Oslo", "Rome")
    else:
        message = client.messages.create(**request)
    (block,) = message.content
    assert block.type == "tool_use"
    assert (block.name, message.stop_reason) == ("weather", "tool_use")
    assert block.input["place"] in ("Oslo", "Rome")
    assert block.id


@pytest.mark.slow
def test_turns_with_a_tool_result_give_the_chats_prompt(client: anthropic.Anthropic, live: Live) -> None:
    first = client.messages.create(
        model=MODEL, messages=HELLO, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=300, **GREEDY
    )
    (call,) = first.content
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "snow"}]}
    turns: Any = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    second = client.messages.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=20, **GREEDY)
    function = {"name": "weather", "arguments": json.dumps(call.input)}
    history = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "snow"},
        {"role": "user", "content": "And now?"},
    ]
    expected = chat(live, messages=history, tools=[FUNCTION], max_tokens=20)
    assert text_of(second) == expected["choices"][0]["message"]["content"]
    counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=[WEATHER])
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


def test_an_answer_goes_on_with_the_assistants_last_text(client: anthropic.Anthropic, live: Live) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "The answer"}]
    expected = chat(live, messages=begun, continue_final_message=True, max_tokens=12)["choices"][0]["message"][
        "content"
    ]
    assert text_of(client.messages.create(model=MODEL, messages=begun, max_tokens=12, **GREEDY)) == expected
    called: Any = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\]"):
        client.messages.create(model=MODEL, messages=[*HELLO, called], max_tokens=12)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_json_schema_holds(client: anthropic.Anthropic, is_stream: bool) -> None:
    request: Any = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 300,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    if is_stream:
        with client.messages.stream(**request) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**request)
    assert message.stop_reason == "end_turn"
    assert json.loads(text_of(message))["place"] in ("Oslo", "Rome")


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", max_tokens=4, messages=HELLO)
    message = "there is no model 'other' here: this server has tiny"
    assert unknown.value.body == {"type": "error", "error": {"type": "not_found_error", "message": message}}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "x" * 3000}])
    with pytest.raises(anthropic.BadRequestError, match="^(?!.*prompt is too long).*max_tokens"):
        client.messages.create(model=MODEL, max_tokens=4096, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        client.messages.create(model=MODEL, max_tokens=4, messages=HELLO, extra_body={"container": "abc"})
    with pytest.raises(anthropic.BadRequestError, match="output_config.effort"):
        client.messages.create(model=MODEL, max_tokens=4, messages=HELLO, output_config={"effort": "low"})
    picture: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.type"):
        client.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]"):
        client.messages.create(
            model=MODEL, max_tokens=4, messages=HELLO, tools=[{"type": "web_search_20250305", "name": "web_search"}]
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "auto", "name": "weather"}}, "tool_choice.name does not go with the type auto"),
        ({"tool_choice": {"type": "none", "name": "weather"}}, "tool_choice.name does not go with the type none"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: a part of type tool needs it"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content: a message of the user must not be"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: a message of the user must not be"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, "messages[0].content[0].text: "),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: "),
    ],
)
def test_what_would_be_ignored_is_refused_by_its_name(live: Live, fields: dict[str, Any], message: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {"messages": HELLO, "tools": [WEATHER]} | ({} if "count" in path else {"max_tokens": 2}) | fields
        status, answer, _ = live.post(path, body)
        assert (status, answer["error"]["message"][: len(message)]) == (400, message)


@pytest.mark.parametrize("empty", [[], "", [{"type": "text", "text": ""}]])
def test_an_empty_answer_may_be_sent_back(live: Live, empty: Any) -> None:
    """A reply whose first token ends it has no content blocks."""
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"place": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": ""}
    for answer, more in ((empty, []), ([*empty, call], [result])):
        turns = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": more or "Go on."}]
        status, body, _ = live.post("/v1/messages/count_tokens", {"messages": turns, "tools": [WEATHER]})
        assert status == 200 and body["input_tokens"] > 0, body


def test_max_tokens_is_required(live: Live) -> None:
    status, answer, _ = live.post("/v1/messages", {"messages": HELLO})
    assert status == 400
    assert answer["type"] == "error"
    assert answer["error"] == {"type": "invalid_request_error", "message": "max_tokens: Field required"}


@pytest.mark.slow
def test_the_key_may_come_as_x_api_key() -> None:
    with serving(talker(), api_keys=("sesame",)) as live:
        with anthropic.Anthropic(base_url=live.url, api_key="sesame", max_retries=0) as right:
            assert right.messages.create(model="fake", max_tokens=4, messages=HELLO).usage.output_tokens <= 4
        with (
            anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0) as wrong,
            pytest.raises(anthropic.AuthenticationError),
        ):
            wrong.messages.create(model="fake", max_tokens=4, messages=HELLO)


@pytest.mark.slow
def test_a_failure_ends_a_stream_with_an_error() -> None:
    with serving(talker(0.01)) as live, anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as client:
        request: Any = {"model": "fake", "max_tokens": 200, "messages": HELLO}
        with client.messages.stream(**request) as stream:
            next(event for event in stream if event.type == "content_block_delta")
            break_engine(live)
            with pytest.raises(anthropic.APIStatusError) as failed:
                stream.until_done()
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["error"]["type"] == "api_error"
