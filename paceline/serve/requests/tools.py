"""Tools of a request, and the JSON schema of a forced call. `replies/tool_calls.py` parses calls in answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.data.messages import MessageError, content_text
from paceline.errors import PromptError
from paceline.model.text.tools import call_schema
from paceline.serve.http.failures import RequestRefused
from paceline.serve.requests.protocol import ChatRequest, ChosenTool, Message, TokenizeRequest, Tool


def tools_of(request: ChatRequest | TokenizeRequest) -> list[Tool]:
    """Return the tools that the answer may call; none if tool_choice is "none". Raises RequestRefused if two tools have
    one name, or if tool_choice names an unknown tool, or is "required" without tools."""
    tools, choice = request.tools or [], request.tool_choice
    count_by_name = Counter(tool.function.name for tool in tools)
    if twice := next((name for name, count in count_by_name.items() if count > 1), None):
        raise RequestRefused(f"tools: {twice!r:.80} is the name of several: rename all but one", param="tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in count_by_name:
        raise RequestRefused(
            f"tool_choice names {choice.function.name!r}, which is not among the tools", param="tool_choice"
        )
    if choice == "required" and not tools:
        raise RequestRefused("tool_choice is required, but there are no tools", param="tool_choice")
    return [] if choice == "none" else tools


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


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as JSON objects with exactly the fields that the client sent."""
    return [tool.model_dump(exclude_unset=True) for tool in tools]


def text_of(message: Message, field: str = "messages") -> str:
    """Return a message's text. Raises RequestRefused, naming `field`, if its content has a part without text."""
    try:
        return content_text(message.content, f"{field}.content")
    except MessageError as error:
        raise RequestRefused.of(error) from error
