"""Every request field of OpenAI's, vLLM's and llama.cpp's servers is held, refused or without effect."""

from __future__ import annotations

import pytest
from server_fields import (
    GUIDE,
    LLAMA,
    OPENAI_CHAT,
    OPENAI_TEXT,
    VLLM_CHAT,
    VLLM_TEXT,
    VLLM_TOKENIZE,
    held,
    listed,
    table,
    words,
)

from paceline.serve.requests.fields import CHAT_REFUSED, NESTED_REFUSED, NESTED_UNUSED, REFUSED, TEXT_REFUSED, UNUSED
from paceline.serve.requests.protocol import ChatRequest, Closed, CompletionRequest, TokenizeRequest

NESTED = {
    "StreamOptions": {"include_usage", "continuous_usage_stats", "include_obfuscation"},
    "JsonSchema": {"name", "description", "schema", "strict"},
    "StructuredOutputs": words(
        """json regex choice grammar json_object structural_tag disable_fallback disable_any_whitespace
    disable_additional_properties whitespace_pattern"""
    ),
    "Function": {"name", "description", "parameters", "strict", "defer_loading"},
    "Message": words(
        """role content name tool_calls tool_call_id reasoning reasoning_content function_call refusal annotations
    audio parsed provider_specific_fields id index opts"""
    ),
}


MODELS = {each.__name__: each for each in Closed.__subclasses__()}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (ChatRequest, OPENAI_CHAT | VLLM_CHAT | LLAMA),
        (CompletionRequest, OPENAI_TEXT | VLLM_TEXT | LLAMA),
        (TokenizeRequest, VLLM_TOKENIZE),
        *[(MODELS[name], names) for name, names in NESTED.items()],
    ],
)
def test_every_field_is_held_refused_or_without_effect(model: type[Closed], names: set[str]) -> None:
    elsewhere = {"json_schema", "audio"} if model.__name__ == "Message" else set[str]()
    if model is CompletionRequest:  # refused as unknown: only chats have them, in every server
        elsewhere = held(ChatRequest)
    undecided = names - held(model) - model.refused.keys() - model.unused.keys() - elsewhere
    assert not undecided, "decide what becomes of these in serve/requests/fields.py"


def test_a_field_has_one_fate() -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest, *MODELS.values()):
        assert not model.unused.keys() & model.refused.keys()
        assert not held(model) & (model.refused.keys() | model.unused.keys())
    assert REFUSED.keys() <= CHAT_REFUSED.keys() & TEXT_REFUSED.keys()


def test_the_guide_lists_what_is_refused_and_what_has_no_effect() -> None:
    nested = [
        {f"{parent}.{name}" for parent, own in each.items() for name in own} for each in (NESTED_UNUSED, NESTED_REFUSED)
    ]
    assert listed("### Fields without effect") == UNUSED.keys() | nested[0]
    assert listed("### Fields that are refused") == CHAT_REFUSED.keys() | TEXT_REFUSED.keys() | nested[1]


def test_the_guide_counts_the_fields_by_their_fate() -> None:
    assert table() in GUIDE.read_text(encoding="utf-8"), "python tests/server_fields.py prints the table"
