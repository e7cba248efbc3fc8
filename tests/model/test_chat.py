"""One conversation is one prompt, whoever renders it: server, library, training rows, evals and the recording proxy."""

from __future__ import annotations

import json
import string
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from paceline import LLM
from paceline.data.messages import MessageError, normalised
from paceline.data.prompts import read_messages, read_tools
from paceline.errors import PromptError
from paceline.loop.evals.answerers import EvalSampling, LLMAnswerer
from paceline.loop.evals.suite import Case
from paceline.loop.record.exchange import Exchange
from paceline.loop.record.reader import Reader
from paceline.model.text.chat import chat_ids, chat_text
from paceline.model.text.tokenizer import Tokenizer
from paceline.serve.requests.prompts import encode_request
from paceline.serve.requests.protocol import ChatRequest

NATIVE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }} {{ m.tool_call_id }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{{ c.function.arguments.items() | list }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.reasoning_content }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"knows tools": NATIVE, "knows none": PLAIN}


def tokenizer_of(template: str) -> Tokenizer:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, eos_token_ids=(257,), chat_template=template)


TOKENIZERS = {name: tokenizer_of(template) for name, template in TEMPLATES.items()}


def through_the_server(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> list[int]:
    request = ChatRequest.model_validate(json.loads(json.dumps({"messages": messages, "tools": tools or None})))
    return encode_request(request, tokenizer)


def through_the_library(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> list[int]:
    llm = cast(LLM, SimpleNamespace(tokenizer=tokenizer))
    return LLM.encode_chat(llm, messages, tools)


def through_rows(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> list[int]:
    llm = cast(LLM, SimpleNamespace(tokenizer=tokenizer))
    return LLM.encode_chat(llm, read_messages(messages, "row"), read_tools(tools, "row"))


def through_the_proxy(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> list[int]:
    request = {"messages": messages} | ({"tools": tools} if tools else {})
    chunks = [{"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}]
    (trace,) = Reader(tokenizer).traces(Exchange(True, request, chunks, ended=1.0))
    return list(trace.prompt_ids)


def through_evals(tokenizer: Tokenizer, messages: list[Any], tools: list[Any]) -> list[int]:
    target = SimpleNamespace(cache=SimpleNamespace(max_len=10**6))
    llm = SimpleNamespace(tokenizer=tokenizer, target=target)
    llm.encode_chat = lambda *call: LLM.encode_chat(cast(LLM, llm), *call)
    answerer = object.__new__(LLMAnswerer)
    answerer.llm, answerer.sampling = cast(LLM, llm), EvalSampling()
    return answerer._ids(Case("one", {"kind": "exact", "answer": ""}, tuple(read_messages(messages, "row"))))


WAYS = [through_the_server, through_the_library, through_rows, through_the_proxy]

texts = st.text(string.ascii_letters + " \n{}\"'<>é中😀", max_size=12)
names = st.text(string.ascii_lowercase, min_size=1, max_size=6)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(names, values, max_size=3)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    texts.map(lambda text: {"type": "input_text", "text": text}),
    texts.map(lambda text: {"type": "refusal", "refusal": text}),
)
contents = st.none() | texts | st.lists(parts, min_size=1, max_size=3)
arguments = st.one_of(objects, objects.map(json.dumps), st.none(), st.just(""))
functions = st.builds(lambda name, given: {"name": name, "arguments": given}, names, arguments)
calls = st.builds(
    lambda name, function: {"type": "function", "function": function} | ({"id": name} if name else {}),
    st.none() | names,
    functions,
)
assistants = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": contents},
    optional={
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
        "reasoning_content": texts,
        "name": names,
        "annotations": st.just([]),
    },
) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": contents}, optional={"function_call": functions, "reasoning": texts}
)
others = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "tool", "function"]), "content": contents},
    optional={"name": names, "tool_call_id": names},
)
conversations = st.lists(assistants | others, min_size=1, max_size=4)
tools = st.lists(
    st.builds(
        lambda name, more: {"type": "function", "function": dict([*more.items(), ("name", name)])},
        names,
        st.fixed_dictionaries(
            {}, optional={"parameters": objects, "description": texts, "strict": st.booleans() | st.none()}
        ),
    ),
    max_size=2,
    unique_by=lambda tool: tool["function"]["name"],  # the server refuses two of one name
)


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages=conversations, tools=tools)
def test_one_conversation_is_one_prompt_everywhere(template: str, messages: list[Any], tools: list[Any]) -> None:
    tokenizer = TOKENIZERS[template]
    prompts = {way.__name__: way(tokenizer, messages, tools) for way in WAYS}
    if not tools:
        prompts["evals"] = through_evals(tokenizer, messages, tools)
    assert len(set(map(tuple, prompts.values()))) == 1, {
        name: tokenizer.decode(ids, False) for name, ids in prompts.items()
    }
    assert normalised(normalised(messages)) == normalised(messages)


def prompt_of(*messages: Any, template: str = "knows tools") -> str:
    tokenizer = TOKENIZERS[template]
    prompts = {tokenizer.decode(way(tokenizer, [*messages], []), False) for way in WAYS}
    (only,) = prompts
    return only


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prompt_of({"role": "user", "content": parts}) == prompt_of({"role": "user", "content": "one\ntwo"})


def called(call_arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f"} | ({} if call_arguments is ... else {"arguments": call_arguments})
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function} | more]}


def test_ids_of_calls_and_results_reach_the_template() -> None:
    text = prompt_of(called({"x": 1}, id="call_7"), {"role": "tool", "tool_call_id": "call_7", "content": "done"})
    assert "[call_7 f " in text and "tool  call_7\ndone" in text


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_reaches_the_template(key: str, template: str) -> None:
    assert "deep thought" in prompt_of({"role": "assistant", "content": "42", key: "deep thought"}, template=template)


@pytest.mark.parametrize("template", TEMPLATES)
def test_arguments_as_text_and_as_an_object_give_one_prompt(template: str) -> None:
    assert len({prompt_of(called(each), template=template) for each in ({"x": [1]}, '{"x": [1]}', '{ "x":[1] }')}) == 1
    assert len({prompt_of(called(each), template=template) for each in ("", None, {}, "{}", " {} ", ...)}) == 1
    assert prompt_of(called({"x": [1]}), template=template) != prompt_of(called({}), template=template)


def test_an_old_function_call_is_a_tool_call() -> None:
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    assert prompt_of(old) == prompt_of(called({"x": 1}))


ARGUMENTS = '{"place": "Oslo"}'
SENT_BACK: dict[str, dict[str, Any]] = {
    "openai's parse() with a response_format": {
        "content": '{"n": 1}',
        "refusal": None,
        "role": "assistant",
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "parsed": {"n": 1},
    },
    "openai's parse() with tools": {
        "content": None,
        "role": "assistant",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "f", "arguments": ARGUMENTS, "parsed_arguments": {"place": "Oslo"}},
            }
        ],
        "parsed": None,
    },
    "litellm": {
        "content": None,
        "role": "assistant",
        "tool_calls": [
            {
                "index": 0,
                "id": "call_1",
                "type": "function",
                "function": {"name": "f", "arguments": ARGUMENTS, "provider_specific_fields": {"a": 1}},
                "provider_specific_fields": {"a": 1},
            }
        ],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
    },
    "others": {"role": "assistant", "content": "Oslo.", "id": "msg_1", "index": 0, "opts": {"a": 1}},
}
"""Messages of answers as clients append them to the history."""


@pytest.mark.parametrize("client", SENT_BACK)
def test_answers_that_clients_send_back_are_plain_messages(client: str) -> None:
    message = SENT_BACK[client]
    plain = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        function = {"name": "f", "arguments": ARGUMENTS}
        plain["tool_calls"] = [{"id": each["id"], "type": "function", "function": function} for each in calls]
    question = {"role": "user", "content": "hi"}
    assert prompt_of(question, message, question) == prompt_of(question, plain, question)


@pytest.mark.parametrize(
    "wrong", ["[1]", '"Oslo"', "{broken", '{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', "null", " ", [1], 7, True]
)
def test_other_arguments_are_refused_by_the_name_of_their_field(wrong: Any) -> None:
    field = "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(MessageError, match="JSON object") as refused:
        chat_ids(TOKENIZERS["knows tools"], [{"role": "user", "content": "hi"}, called(wrong)])
    assert refused.value.field == field and field in str(refused.value)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": {"text": "hi"}}, "messages[0].content"),
        ({"role": "user", "content": "hi", "contnet": "x"}, "messages[0].contnet"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"role": "assistant", "content": "x", "reasoning": {"a": 1}}, "messages[0].reasoning"),
        (called("{}") | {"function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
def test_what_is_no_text_is_refused_by_the_name_of_its_field(message: Any, field: str) -> None:
    with pytest.raises(MessageError) as refused:
        normalised([message])
    assert refused.value.field == field


def test_a_last_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello, B "}]
    for tokenizer in TOKENIZERS.values():
        text = chat_text(tokenizer, messages, continue_final_message=True)
        assert text.endswith("Hello, B ") and text.count("<|im_start|>") == 2
    with pytest.raises(MessageError, match="continue_final_message"):
        chat_text(tokenizer, [called({})], continue_final_message=True)
    with pytest.raises(MessageError, match="continue_final_message"):
        chat_text(tokenizer, [], continue_final_message=True)


@pytest.mark.parametrize("wrong", [5, "a", [("a", 1)], {1: 2}])
def test_other_variables_than_values_by_name_are_refused(wrong: Any) -> None:
    with pytest.raises(PromptError, match="variables must be values of the chat template by name"):
        chat_ids(TOKENIZERS["knows tools"], [{"role": "user", "content": "hi"}], variables=wrong)
