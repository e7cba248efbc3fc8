"""Reads the grammar for an answer from request fields of OpenAI, vLLM and paceline, and that of a forced tool call."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import PromptError
from paceline.model.text.tools import call_schema, compact
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.prompts import plain_tools, tools_of
from paceline.serve.requests.protocol import ChatRequest, ChosenTool, ResponseFormat, Sampling, StructuredOutputs
from paceline.types import GrammarSpec

META = re.compile(r"[\\.+*?()|\[\]{}^$]")
TAKES = {"text": (), "json_object": ("schema_",), "json_schema": ("json_schema", "schema_"), "regex": ("regex",)}
"""Type of a response format -> its possible fields."""
GRAMMAR_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")


def grammar_of(request: Sampling) -> tuple[str, GrammarSpec] | None:
    """Return (name of the request field with the grammar, grammar), or None for a request without a grammar. Raises
    RequestRefused if several fields contain a grammar, if a field does not contain exactly one complete grammar, or if
    the grammar is not valid Unicode text."""
    specs = {
        "response_format": _format(request.response_format),
        "structured_outputs": _structured(request.structured_outputs),
        "guided_json": None if request.guided_json is None else _schema(request.guided_json),
        "guided_regex": None if request.guided_regex is None else GrammarSpec("regex", request.guided_regex),
        "guided_choice": None if request.guided_choice is None else _choice(request.guided_choice),
    }
    given = {name: spec for name, spec in specs.items() if spec}
    if len(given) > 1:
        raise RequestRefused(f"only one of {', '.join(given)} can hold", param=list(given)[-1])
    for name, spec in given.items():
        try:
            spec.text.encode()
        except UnicodeEncodeError as error:
            raise RequestRefused("the grammar is no valid Unicode text", param=name) from error
        return name, spec
    return None


def _schema(schema: dict[str, Any] | bool | str) -> GrammarSpec:
    return GrammarSpec("json_schema", schema if isinstance(schema, str) else compact(schema, RequestRefused))


def _choice(choices: list[str]) -> GrammarSpec:
    return GrammarSpec("regex", "|".join(META.sub(r"\\\g<0>", choice) for choice in choices))


def _structured(outputs: StructuredOutputs | None) -> GrammarSpec | None:
    if outputs is None:
        return None
    specs = [
        None if outputs.json_ is None else _schema(outputs.json_),
        None if outputs.regex is None else GrammarSpec("regex", outputs.regex),
        None if outputs.choice is None else _choice(outputs.choice),
        GrammarSpec("json_object") if outputs.json_object else None,
    ]
    given = [spec for spec in specs if spec]
    if len(given) != 1:
        raise RequestRefused(
            "structured_outputs needs one of json, regex, choice, json_object", param="structured_outputs"
        )
    return given[0]


def _format(form: ResponseFormat | None) -> GrammarSpec | None:
    if form is None:
        return None
    given = [name for name in ("json_schema", "schema_", "regex") if getattr(form, name) is not None]
    names = [name.rstrip("_") for name in given]
    if wrong := next((name for name in given if name not in TAKES[form.type]), None):
        param = f"response_format.{wrong.rstrip('_')}"
        raise RequestRefused(f"{param} does not go with the type {form.type!r}: leave it out", param=param)
    if len(given) > 1:
        raise RequestRefused(f"response_format needs one of {' and '.join(names)}, not both", param="response_format")
    if form.type in ("json_schema", "regex") and not given:
        raise RequestRefused(
            f'response_format of type "{form.type}" needs the field {form.type}', param="response_format"
        )
    if form.regex is not None:
        return GrammarSpec("regex", form.regex)
    if form.json_schema is not None:
        return _schema(form.json_schema.schema_)
    if form.schema_ is not None:
        return _schema(form.schema_)
    return GrammarSpec("json_object") if form.type == "json_object" else None


def forced_schema(request: ChatRequest) -> str | None:
    """Return the JSON schema of the answer if `tool_choice` forces a tool call, else None. Raises RequestRefused for an
    invalid `tool_choice`, or if "$defs" of two tools' schemas contradict each other."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    tools = tools_of(request)
    if isinstance(choice, ChosenTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    try:
        return call_schema(plain_tools(tools))
    except PromptError as error:
        raise RequestRefused.of(error, param="tools") from error
