"""What becomes of every request field of Anthropic's Messages and OpenAI's Responses: held, refused or without
effect."""

from __future__ import annotations

from typing import Any

import anthropic.types as messages
import openai.types.responses as responses
import pytest
from openai.types.responses import response_create_params, response_input_item_param
from openai.types.shared_params import Reasoning as ReasoningParam
from pydantic import ValidationError
from server_fields import COUNT_TOKENS, MESSAGES, RESPONSES, held, listed

from paceline.serve.dialects import fields
from paceline.serve.dialects.messages import (
    ContentBlock,
    CountTokensRequest,
    MessageFormat,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    MessageTurn,
    OutputConfig,
    Thinking,
)
from paceline.serve.dialects.responses import (
    Reasoning,
    ResponseItem,
    ResponsePart,
    ResponsesRequest,
    ResponseStreamOptions,
    ResponseTool,
    ResponseToolChoice,
    TextConfig,
    TextFormat,
)
from paceline.serve.requests.protocol import ChatRequest, Closed, CompletionRequest


def names(*types: Any) -> set[str]:
    return {name for each in types for name in each.__annotations__}


TYPES: list[tuple[type[Closed], set[str]]] = [
    (MessagesRequest, MESSAGES),
    (CountTokensRequest, COUNT_TOKENS),
    (MessageTurn, names(messages.MessageParam.__args__[0], messages.AssistantMessageParam)),  # type: ignore[attr-defined]
    (
        ContentBlock,
        names(
            messages.TextBlockParam,
            messages.ToolUseBlockParam,
            messages.ToolResultBlockParam,
            messages.ThinkingBlockParam,
        ),
    ),
    (MessageTool, names(messages.ToolParam)),
    (
        MessageToolChoice,
        names(
            messages.ToolChoiceAutoParam,
            messages.ToolChoiceAnyParam,
            messages.ToolChoiceToolParam,
            messages.ToolChoiceNoneParam,
        ),
    ),
    (OutputConfig, names(messages.OutputConfigParam)),
    (MessageFormat, names(messages.JSONOutputFormatParam)),
    (Thinking, names(messages.ThinkingConfigEnabledParam, messages.ThinkingConfigAdaptiveParam)),
    (ResponsesRequest, RESPONSES),
    (
        ResponseItem,
        names(
            responses.EasyInputMessageParam,
            responses.ResponseOutputMessageParam,
            responses.ResponseFunctionToolCallParam,
            responses.ResponseReasoningItemParam,
            response_input_item_param.Message,
            response_input_item_param.FunctionCallOutput,
        ),
    ),
    (
        ResponsePart,
        names(
            responses.ResponseInputTextParam, responses.ResponseOutputTextParam, responses.ResponseOutputRefusalParam
        ),
    ),
    (ResponseTool, names(responses.FunctionToolParam)),
    (ResponseToolChoice, names(responses.ToolChoiceFunctionParam)),
    (TextConfig, names(responses.ResponseTextConfigParam)),
    (TextFormat, names(responses.ResponseFormatTextJSONSchemaConfigParam)),
    (Reasoning, names(ReasoningParam)),
    (ResponseStreamOptions, names(response_create_params.StreamOptions)),
]


@pytest.mark.parametrize(("model", "official"), TYPES, ids=lambda each: getattr(each, "__name__", ""))
def test_every_field_has_one_fate(model: type[Closed], official: set[str]) -> None:
    undecided = official - held(model) - model.refused.keys() - model.unused.keys()
    assert not undecided, "decide what becomes of these in serve/dialects/fields.py"
    assert not model.unused.keys() & model.refused.keys()
    assert not held(model) & (model.refused.keys() | model.unused.keys())


MINIMAL: dict[type[Closed], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    MessagesRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    CountTokensRequest: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"input": "x"},
    ContentBlock: {"type": "text", "text": "x"},
    MessageTool: {"name": "x", "input_schema": {}},
    Thinking: {"type": "enabled"},
    ResponseItem: {"role": "user", "content": "x"},
    ResponsePart: {"type": "input_text", "text": "x"},
    ResponseTool: {"type": "function", "name": "x"},
    TextConfig: {},
    TextFormat: {},
    Reasoning: {},
    ResponseStreamOptions: {},
}


@pytest.mark.parametrize("model", MINIMAL, ids=lambda model: model.__name__)
def test_refused_fields_are_refused_and_unused_ones_are_not(model: type[Closed]) -> None:
    minimal = MINIMAL[model]
    for name in model.unused:
        model.model_validate(minimal | {name: "anything"})
    for name, refused in model.refused.items():
        with pytest.raises(ValidationError, match=name):
            model.model_validate(minimal | {name: "anything else"})
        for value in (None, *refused.neutral):
            model.model_validate(minimal | {name: value})
    with pytest.raises(ValidationError, match="no_such_field"):
        model.model_validate(minimal | {"no_such_field": 0})


def nested(tables: dict[str, Any]) -> set[str]:
    return {f"{parent}.{name}" for parent, own in tables.items() for name in own}


def test_the_guide_lists_what_is_refused_and_what_has_no_effect() -> None:
    assert listed("#### Fields of Messages without effect") == {*fields.MESSAGES_UNUSED} | nested(
        fields.MESSAGES_NESTED_UNUSED
    )
    assert listed("#### Fields of Messages that are refused") == {*fields.MESSAGES_REFUSED} | nested(
        fields.MESSAGES_NESTED_REFUSED
    )
    assert listed("#### Fields of Responses without effect") == {*fields.RESPONSES_UNUSED} | nested(
        fields.RESPONSES_NESTED_UNUSED
    )
    assert listed("#### Fields of Responses that are refused") == {*fields.RESPONSES_REFUSED} | nested(
        fields.RESPONSES_NESTED_REFUSED
    )
