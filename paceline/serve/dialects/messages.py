"""Anthropic's Messages API: endpoints, and translation of requests and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from paceline.serve.dialects import fields
from paceline.serve.dialects.base import STREAM, Part, Translated, check_keys, renamed
from paceline.serve.http.failures import ANTHROPIC, ApiError, RequestRefused, json_response
from paceline.serve.replies.events import sse
from paceline.serve.requests.chats import Drafter, Tag, answer_chat, count_chat
from paceline.serve.requests.fields import Refused
from paceline.serve.requests.protocol import ChatRequest, Closed, Flag, Float, Int
from paceline.serve.worker.worker import EngineWorker

KEYS = {
    "text": {"text"},
    "thinking": {"thinking"},
    "tool_result": {"tool_use_id", "content"},
    "tool_use": {"id", "name", "input"},
}
"""Type of a content block -> its fields."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Type of a tool choice in a Messages request -> tool choice of a chat request."""
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Field of a chat request -> field of a Messages request, where the names differ."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Finish reason of a chat -> stop reason of a message."""


class TextBlock(Closed):
    unused: ClassVar[dict[str, str]] = fields.MESSAGES_NESTED_UNUSED["content"]

    type: Literal["text"] = "text"
    text: str


class ContentBlock(Closed):
    """One block of a message: a text, a tool call (tool_use), thinking, or the result of a call (tool_result)."""

    unused: ClassVar[dict[str, str]] = fields.MESSAGES_NESTED_UNUSED["content"]

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = Field(None, description="tool_use: id of the call.")
    name: str | None = Field(None, description="tool_use: name of the tool.")
    input: dict[str, Any] | None = Field(None, description="tool_use: arguments.")
    tool_use_id: str | None = Field(None, description="tool_result: id of the call.")
    content: str | list[TextBlock] | None = Field(None, description="tool_result: text.")


class MessageTurn(Closed):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"] = Field(description="Author of the message.")
    content: str | list[ContentBlock] = Field(description="Text, or content blocks.")


class MessageTool(Closed):
    """A function that the model may call."""

    refused: ClassVar[dict[str, Refused]] = fields.MESSAGES_NESTED_REFUSED["tools"]
    unused: ClassVar[dict[str, str]] = fields.MESSAGES_NESTED_UNUSED["tools"]

    type: Literal["custom"] | None = Field(None, description="This server runs no tools of its own.")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, description="Purpose of the tool, for the model.")
    input_schema: dict[str, Any] = Field(serialization_alias="parameters", description="JSON schema of its arguments.")
    strict: Flag | None = Field(None, description="Passed to the prompt only: a forced call always follows its schema.")


class MessageToolChoice(Closed):
    """Rule for tool calls by `type`: auto (the model decides), any (at least one call), tool (a call of the tool
    `name`) or none (no call)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="tool: name of the tool.")
    disable_parallel_tool_use: Flag | None = Field(None, description="true: an answer has at most one call.")


class MessageFormat(Closed):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the answer.")


class OutputConfig(Closed):
    """Required format of the answer (a JSON schema), and reasoning effort."""

    effort: str | None = Field(None, description="Passed to the chat template, which must use reasoning_effort.")
    format: MessageFormat | None = Field(None, description="JSON schema of the answer.")


class Thinking(Closed):
    """Field `thinking` of a Messages request. It sets the variable enable_thinking of the chat template: false for the
    type "disabled", true for all other types."""

    unused: ClassVar[dict[str, str]] = fields.MESSAGES_NESTED_UNUSED["thinking"]

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class CountTokensRequest(Closed):
    """Request to count the prompt tokens of a conversation."""

    refused: ClassVar[dict[str, Refused]] = fields.COUNT_REFUSED
    unused: ClassVar[dict[str, str]] = fields.MESSAGES_UNUSED
    nested: ClassVar[dict[str, dict[str, Refused]]] = fields.MESSAGES_NESTED_REFUSED

    model: str | None = Field(None, description="Model name as in /v1/models; there is only one.")
    messages: list[MessageTurn] = Field(min_length=1)
    """The conversation; a last message of the assistant is continued."""
    system: str | list[TextBlock] | None = Field(None, description="System prompt.")
    tools: list[MessageTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    refused: ClassVar[dict[str, Refused]] = fields.MESSAGES_REFUSED

    max_tokens: Int = Field(ge=1, description="Longest answer, in tokens.")
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    """Texts that end the answer."""
    stream: Flag | None = Field(False, description="Stream the answer as server-sent events.")
    temperature: Float | None = Field(None, ge=0, le=2, description="Default 1.0; 0 is greedy.")
    top_p: Float | None = Field(None, ge=0, le=1)
    """Keep the most probable tokens with this total probability."""
    top_k: Int | None = Field(None, ge=-1, description="Keep this many of the most probable tokens; 0 and -1 keep all.")


class CountTokensAnswer(BaseModel):
    input_tokens: int


class AnthropicErrorBody(BaseModel):
    type: str
    message: str = Field(description="Error message; names the invalid field.")


class AnthropicError(BaseModel):
    """Body of an error response in Anthropic's format."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody


def add_messages(app: FastAPI, worker: EngineWorker) -> None:
    """Add `/v1/messages` and `/v1/messages/count_tokens` to the application."""
    failures: dict[int | str, dict[str, Any]] = {
        status: {"model": AnthropicError} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
    }

    @app.post(ANTHROPIC, summary="Answer a conversation", tags=["Anthropic"], responses=failures)
    async def messages(body: MessagesRequest, http: Request, tag: Tag = None, drafter: Drafter = None) -> Response:
        chat, names = chat_of(body)
        exchange = partial(MessageExchange, is_stream=bool(body.stream))
        with renamed(names):
            return await answer_chat(chat, http, tag, worker, exchange, drafter)

    @app.post(
        f"{ANTHROPIC}/count_tokens",
        summary="Count the tokens of a conversation",
        tags=["Anthropic"],
        responses=failures,
        response_model=CountTokensAnswer,
    )
    async def count(body: CountTokensRequest) -> Response:
        chat, names = chat_of(body)
        with renamed(names):
            return json_response({"input_tokens": await count_chat(chat, worker)})


def chat_of(body: CountTokensRequest) -> tuple[ChatRequest, dict[str, str]]:
    """Convert a request to (chat request, names). `names`: field of the chat request -> field of the client's request,
    for error messages. Raises RequestRefused for an empty message, a missing field, and fields that may not occur
    together."""
    messages = [("system", {"role": "system", "content": _text(body.system)})] if body.system else []
    for place, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{place}]")
    names = NAMES | {f"messages[{place}]": origin for place, (origin, _) in enumerate(messages)}
    names |= {"messages[0].content": "system"} if body.system else {}
    choice, config = body.tool_choice, body.output_config or OutputConfig.model_validate({})
    same = {"model", "max_tokens", "temperature", "top_p", "top_k"} & body.model_fields_set
    chat = {name: getattr(body, name) for name in same} | STREAM | {"messages": [message for _, message in messages]}
    last = messages[-1][1]
    if last["role"] == "assistant":
        if not last["content"] or "tool_calls" in last:
            where = f"messages[{len(body.messages) - 1}]"
            raise RequestRefused(
                f"{where}: an answer goes on with the text of a last assistant's message only", param=where
            )
        chat["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        chat["stop"] = body.stop_sequences
    if body.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True, by_alias=True) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice:
        optional = ("disable_parallel_tool_use",)
        keys = {*optional, *(("name",) if choice.type == "tool" else ())}
        check_keys(choice, choice.type, keys, "tool_choice", optional)
        chosen = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = CHOICES.get(choice.type, chosen)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    chat["reasoning_effort"] = config.effort
    if config.format:
        chat["response_format"] = {"type": "json_schema", "schema": config.format.schema_}
    return ChatRequest.model_validate(chat), names


def _text(content: str | list[TextBlock] | None) -> str:
    """Return the text; blocks are joined by line breaks, like content parts of a chat."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _messages(turn: MessageTurn, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a message as (field of the client, message of a chat) pairs: each tool result becomes its own message.
    Only an assistant's message may be empty, as this server's own answers can be."""
    blocks = [] if isinstance(turn.content, str) else turn.content
    empty = [f".content[{place}].text" for place, block in enumerate(blocks) if block.text == ""]
    empty += [] if turn.content else [".content"]
    if empty and turn.role != "assistant":
        at = where + empty[0]
        raise RequestRefused(f"{at}: a message of the {turn.role} must not be empty: leave it out", param=at)
    if isinstance(turn.content, str):
        return [(where, {"role": turn.role, "content": turn.content})]
    messages: list[tuple[str, dict[str, Any]]] = []
    texts: list[str] = []
    more: dict[str, Any] = {}
    for place, block in enumerate(turn.content):
        at = f"{where}.content[{place}]"
        check_keys(block, block.type, KEYS[block.type], at, optional=("content",))
        if block.type == "tool_result" and turn.role == "user":
            if texts:
                messages.append((where, {"role": "user", "content": "\n".join(texts)}))
                texts = []
            messages.append((at, {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}))
        elif block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_use" and turn.role == "assistant":
            function = {"name": block.name, "arguments": block.input}
            more.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking" and turn.role == "assistant":
            more["reasoning_content"] = "\n".join(filter(None, (more.get("reasoning_content"), block.thinking)))
        else:
            raise RequestRefused(f"{at}: a {block.type} is no part of a message of the {turn.role}", param=at)
    if texts or more or not messages:
        messages.append((where, {"role": turn.role, "content": "\n".join(texts)} | more))
    return messages


class MessageExchange(Translated):
    """One request to Anthropic's Messages API. Converts its answer to that API's format."""

    def body(self) -> dict[str, Any]:
        return self._message() | {
            "content": [_block(part, is_whole=True) for part in self.parts],
            **self._stopped(),
            "usage": self._counts(),
        }

    def failed(self, error: ApiError) -> bytes:
        return sse(error.anthropic_body, "error")

    def begun(self) -> Iterator[dict[str, Any]]:
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._num_tokens()["prompt_tokens"], "output_tokens": 0}
        yield {"type": "message_start", "message": self._message() | empty | {"usage": usage}}

    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_start", "index": self._place, "content_block": _block(part, is_whole=False)}

    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        kind, key = ("input_json_delta", "partial_json") if part.call else ("text_delta", "text")
        yield {"type": "content_block_delta", "index": self._place, "delta": {"type": kind, key: text}}

    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": self._place}

    def finished(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stopped(), "usage": self._counts()}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        return {"id": f"msg_{self.key}", "type": "message", "role": "assistant", "model": self.name} | self.marks

    def _stopped(self) -> dict[str, Any]:
        stop = self._stop_sequence() if self.finish_reason == "stop" else None
        return {
            "stop_reason": "stop_sequence" if stop else REASONS.get(self.finish_reason or ""),
            "stop_sequence": stop,
        }

    def _stop_sequence(self) -> str | None:
        """Return the stop string, or the text of the stop token, that ended the answer."""
        (seq,) = self._sequences
        last = self._replies[0].token_text(seq.tokens[-1])
        return seq.stopped_by or (last if last in seq.params.stop else None)

    def _counts(self) -> dict[str, int]:
        """Return the token usage; Anthropic's input_tokens exclude cached tokens."""
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": self.usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage["completion_tokens"],
        }


def _block(part: Part, *, is_whole: bool) -> dict[str, Any]:
    """Return a content block; without `is_whole`, an empty one for the event that opens it."""
    if part.call is None:
        return {"type": "text", "text": part.text if is_whole else ""}
    arguments = json.loads(part.call["arguments"]) if is_whole else {}
    return {"type": "tool_use", "id": part.call["id"], "name": part.call["name"], "input": arguments}
