"""Fields of requests that cannot hold are refused by their names."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Live
from request_calls import CHAT, MESSAGES, SCHEMA, TEXT, refused

from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.completions import chat_jobs
from paceline.serve.requests.protocol import ChatRequest
from paceline.serve.settings import ServeConfig

pytestmark = pytest.mark.slow
pytest_plugins = ("tiny_server",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "regex": "a"}}, "response_format.regex"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    ],
)
def test_a_grammar_that_cannot_hold_is_refused_by_the_name_of_its_field(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    for path in (CHAT, TEXT):
        error = refused(live, path, **fields)
        assert error["param"] == param, error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        (TEXT, {"guided_regex": "("}, "guided_regex"),
        (CHAT, {"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}}], "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
        ),
        (CHAT, {"lossy": "typical:eps=7"}, "lossy"),
        (CHAT, {"lossy": "typical:eps=x"}, "lossy"),
        (CHAT, {"lossy": "lenient:1"}, "lossy"),
        (CHAT, {"lossy": {"rule": "lenience", "l": "x"}}, "lossy"),
        (CHAT, {"lossy": {"rule": "lenience", "l": 7}}, "lossy"),
        (CHAT, {"lossy": {"eps": 0.1}}, "lossy"),
        (TEXT, {"prompt": [999_999]}, "prompt"),
        (TEXT, {"prompt": "x " * 3000}, "prompt"),
        (TEXT, {"prompt": "x" * 200_000}, "prompt"),
    ],
)
def test_the_field_at_fault_is_named_wherever_it_is_found(
    live: Live, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refused(live, path, **fields)
    assert error["param"] == param, error


@pytest.mark.parametrize("body", [b'{"prompt": "\xff"}', b"[" * 100_000, b'{"n": %s}' % (b"9" * 5000)])
def test_a_body_that_cannot_be_read_is_named_as_such(live: Live, body: bytes) -> None:
    for path in (CHAT, "/v1/messages"):
        status, answer, _ = live.post(path, body)
        message = "the body cannot be read as JSON in UTF-8: correct or simplify it"
        assert (status, answer["error"]["message"]) == (400, message)


@pytest.mark.parametrize("seed", [2**63, -2, 2**64, True, "7", 1.5])
def test_a_seed_that_is_none_is_refused(live: Live, seed: Any) -> None:
    assert refused(live, seed=seed)["param"] == "seed"
    assert refused(live, seed=2**63 - 1, n=2)["param"] == "seed"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stop": ["x"] * 20}, "stop", "at most 16 items"),
        ({"stop": 5}, "stop", "a valid string, or a valid list"),
        ({"stop": ["a", 5]}, "stop[1]", "a valid string"),
        ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required', or a valid object"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "required"),
        ({"speculate": "maybe"}, "speculate", "'auto', 'full' or 'off', or a valid integer"),
        ({"stop": [""]}, "stop", "no empty string"),
        ({"temperature": "hot"}, "temperature", "a valid number"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": 2.01}, "temperature", "less than or equal to 2"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 10**9}, "max_tokens", "cache holds"),
        ({"n": 99}, "n", "n must be at most"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "by their number"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"stop_token_ids": [2, 99999]}, "stop_token_ids", "names token 99999, outside the vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "vocabulary"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "less than or equal to"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs the field"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [*MESSAGES, {"role": "robot", "content": "x"}]}, "messages[1].role", "'system'"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "at most"),
        ({"top_k": True}, "top_k", "a valid integer"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs a role and a content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens"),
        ({"messages": [{"role": "user", "content": "x", "contnet": 1}]}, "messages[0].contnet", "did you mean content"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"use_beam_search": True}, "use_beam_search", "sampled or greedy"),
        ({"n_predict": 5}, "n_predict", "use max_tokens"),
        ({"echo": True}, "echo", "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "template does not read it"),
        ({"documents": [{"text": "x"}]}, "documents", "template does not read it"),
        ({"stop": ["<|im_end|>\n\nx"]}, "stop", "give it alone"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "must not exceed max_tokens (5)"),
        ({"bad_words": [""]}, "bad_words", "no empty string"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "differ"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"prediction": "x"}, "prediction", "a valid object"),
        ({"prediction": {"content": "x"}}, "prediction.type", "required"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "'content'"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        ({"prediction": {"type": "content", "content": None}}, "prediction.content", "not null"),
        ({"tools": [{"function": {"name": "f"}}] * 2}, "tools", "'f' is the name of several"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content[0]",
            "reads text",
        ),
        ({"prediction": {"type": "content", "content": "x" * 3000}}, "prediction", "more than the context of 2048"),
        ({"prediction": {"type": "content", "content": "x" * 200_000}}, "prediction", "the prediction has 200,000"),
    ],
)
def test_a_refusal_names_the_field_as_the_client_wrote_it(
    live: Live, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refused(live, **fields)
    assert (error["param"], message in error["message"]) == (param, True), error


@pytest.mark.parametrize("prompt", [[[1], "a"], ["a", [1]], [1, "a"], [1, [1]]])
def test_a_prompt_of_texts_and_ids_is_refused_as_a_whole(live: Live, prompt: list[Any]) -> None:
    """The error was about the first one, which is valid: "prompt[0]: Input should be a valid string"."""
    error = refused(live, TEXT, prompt=prompt)
    assert error["param"] == "prompt" and "only texts, only token ids, or only lists of token ids" in error["message"]


HALF, TOOL = "\ud800", {"name": "f", "description": "\ud800"}
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": HALF}]}, "messages[1].content"),
        (CHAT, {"tools": [{"function": {"name": "g"}}, {"function": TOOL}]}, "tools[1]"),
        ("/tokenize", {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (ANTHROPIC, {"max_tokens": 1, "messages": MESSAGES, "system": HALF}, "system"),
        (ANTHROPIC, {"max_tokens": 1, "messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (
            ANTHROPIC,
            {"max_tokens": 1, "messages": [{"role": "user", "content": HALF}], "system": "x"},
            "messages[0].content",
        ),
        (RESPONSES, {"input": "x", "instructions": HALF}, "instructions"),
        (RESPONSES, {"input": HALF, "instructions": "x"}, "input"),
        (RESPONSES, {"input": HALF}, "input"),
        (RESPONSES, {"input": [{"role": "user", "content": HALF}], "instructions": "x"}, "input[0].content"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"} | TOOL]}, "tools[0]"),
    ],
)
def test_a_lone_surrogate_is_refused_by_the_name_of_its_field(
    live: Live, path: str, fields: dict[str, Any], field: str
) -> None:
    status, body, _ = live.post(path, ({"messages": MESSAGES} if path == CHAT else {}) | fields)
    error = body["error"]
    assert (status, error["message"].partition(":")[0]) == (400, field), error
    assert path == ANTHROPIC or error["param"] == field


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_unknown_token_ids_are_refused_before_a_request_is_queued(live: Live, field: str) -> None:
    value = {"99999": 1} if field == "logit_bias" else [99999]
    request = ChatRequest.model_validate({"messages": MESSAGES, field: value})
    with pytest.raises(RequestRefused, match=f"{field} names token 99999, outside the vocabulary") as wrong:
        chat_jobs(request, live.worker.serving(), ServeConfig())
    assert wrong.value.param == field


@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        ("/tokenize", {"max_tokens": 5}, "max_tokens", "only at /v1/chat/completions and /v1/completions"),
        ("/detokenize", {"reasoning_effort": "high"}, "reasoning_effort", "only at /v1/chat/completions"),
        (TEXT, {"max_completion_tokens": 5}, "max_completion_tokens", "only at /v1/chat/completions"),
        (CHAT, {"prompt": "x"}, "prompt", "only at /v1/completions and /tokenize"),
        (TEXT, {"prediction": {"type": "content", "content": "x"}}, "prediction", "only at /v1/chat/completions"),
        (CHAT, {"tokens": [1]}, "tokens", "only at /detokenize"),
        (
            CHAT,
            {"tools": [{"function": {"name": "f"}, "defer_loading": True}]},
            "tools[0].defer_loading",
            "all tools go",
        ),
        (TEXT, {"tools": [{"function": {"name": "f"}}]}, "tools", "use /v1/chat/completions"),
        ("/tokenize", {"echo": True}, "echo", "only at /v1/completions"),
    ],
)
def test_a_field_of_another_endpoint_is_said_to_be_one(
    live: Live, path: str, fields: dict[str, Any], param: str, says: str
) -> None:
    base: dict[str, Any] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "x"}, "/tokenize": {"prompt": "x"}}.get(
        path, {}
    )
    status, body, _ = live.post(path, (base or {"tokens": [1]}) | fields)
    assert (status, body["error"]["param"], says in body["error"]["message"]) == (400, param, True), body


LONG = "x" * 200_000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "reasoning_content": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x", "reasoning": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "refusal": LONG}]},
        {"messages": [*MESSAGES, {"role": "assistant", "function_call": {"name": "f", "arguments": {"x": LONG}}}]},
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": LONG}}}]},
            ]
        },
        {"tools": [{"function": {"name": "f", "description": LONG}}]},
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_unencoded(live: Live, fields: dict[str, Any]) -> None:
    error = refused(live, **fields)
    assert error["code"] == "context_length_exceeded" and "200," in error["message"], error
