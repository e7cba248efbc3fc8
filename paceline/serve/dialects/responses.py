"""OpenAI's Responses API: endpoint, and translation of requests and answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from paceline.serve.dialects import fields
from paceline.serve.dialects.base import STREAM, Part, Translated, check_keys, renamed
from paceline.serve.http.failures import ApiError, RequestRefused
from paceline.serve.requests.chats import Drafter, Tag, answer_chat
from paceline.serve.requests.fields import Refused
from paceline.serve.requests.protocol import ChatRequest, Closed, Flag, Float, Int
from paceline.serve.worker.worker import EngineWorker

LOGPROBS = "message.output_text.logprobs"
KEYS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary", "content"},
}
"""Type of an item in the conversation -> its fields."""
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Field of a chat request -> field of a Responses request, where the names differ."""


class ResponsePart(Closed):
    """One piece of text in a conversation: of a message, of reasoning, or of the output of a function call."""

    unused: ClassVar[dict[str, str]] = fields.RESPONSES_NESTED_UNUSED["content"]

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str | None = None
    refusal: str | None = Field(None, description="refusal: text of the refusal.")


class ResponseItem(Closed):
    """One item of a conversation: a message, reasoning, a function call, or the output of a call."""

    unused: ClassVar[dict[str, str]] = fields.RESPONSES_NESTED_UNUSED["input"]

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = Field(None, description="message: its author.")
    content: str | list[ResponsePart] | None = Field(None, description="message, reasoning: text.")
    call_id: str | None = Field(None, description="function_call, function_call_output: id of the call.")
    name: str | None = Field(None, description="function_call: name of the function.")
    arguments: str | None = Field(None, description="function_call: a JSON object, as text.")
    output: str | list[ResponsePart] | None = Field(None, description="function_call_output: text.")
    summary: list[ResponsePart] | None = Field(None, description="reasoning: used if it has no content.")


class ResponseTool(Closed):
    """A function that the model may call."""

    refused: ClassVar[dict[str, Refused]] = fields.RESPONSES_NESTED_REFUSED["tools"]

    type: Literal["function"] = Field(description="This server runs no tools of its own.")
    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, description="Purpose of the function, for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: Flag | None = Field(None, description="Passed to the prompt only: a forced call always follows its schema.")


class ResponseToolChoice(Closed):
    """Tool choice that forces a call of the function `name`."""

    type: Literal["function"] = "function"
    name: str


class TextFormat(Closed):
    """Format of the answer, by `type`: text (free text), json_object (a JSON object), or json_schema (follows
    `schema`)."""

    unused: ClassVar[dict[str, str]] = fields.RESPONSES_NESTED_UNUSED["format"]

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(None, description="Ignored.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON schema of the answer.")
    strict: Flag | None = Field(None, description="Ignored: an answer always follows its schema.")


class TextConfig(Closed):
    """Field `text` of a Responses request, which contains the format of the answer."""

    refused: ClassVar[dict[str, Refused]] = fields.RESPONSES_NESTED_REFUSED["text"]

    format: TextFormat | None = None


class Reasoning(Closed):
    """Field `reasoning` of a Responses request: the reasoning effort, passed to the chat template."""

    refused: ClassVar[dict[str, Refused]] = fields.RESPONSES_NESTED_REFUSED["reasoning"]
    unused: ClassVar[dict[str, str]] = fields.RESPONSES_NESTED_UNUSED["reasoning"]

    effort: str | None = Field(None, description="Passed to the chat template, which must use reasoning_effort.")


class ResponseStreamOptions(Closed):
    """Options of a stream: accepted for compatibility, without effect."""

    unused: ClassVar[dict[str, str]] = fields.RESPONSES_NESTED_UNUSED["stream_options"]


class ResponsesRequest(Closed):
    refused: ClassVar[dict[str, Refused]] = fields.RESPONSES_REFUSED
    unused: ClassVar[dict[str, str]] = fields.RESPONSES_UNUSED
    nested: ClassVar[dict[str, dict[str, Refused]]] = fields.RESPONSES_NESTED_REFUSED

    model: str | None = Field(None, description="Model name as in /v1/models; there is only one.")
    input: str | list[ResponseItem] = Field(min_length=1, description="A question, or the conversation so far.")
    instructions: str | None = Field(None, description="System prompt.")
    max_output_tokens: Int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    stream: Flag | None = Field(False, description="Stream the answer as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    temperature: Float | None = Field(None, ge=0, le=2, description="Default 1.0; 0 is greedy.")
    top_p: Float | None = Field(None, ge=0, le=1)
    """Keep the most probable tokens with this total probability."""
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
            ]
        ]
        | None
    ) = Field(None, description="message.output_text.logprobs adds log-probabilities; the others have no effect.")
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    """Number of alternatives for each token's log-probability."""
    tools: list[ResponseTool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """auto lets the model decide; required, or a function's name, forces a call."""
    parallel_tool_calls: Flag | None = Field(True, description="false: an answer has at most one call.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None


def add_responses(app: FastAPI, worker: EngineWorker) -> None:
    """Add `/v1/responses` to the application."""

    @app.post("/v1/responses", summary="Answer a conversation", tags=["OpenAI"])
    async def responses(body: ResponsesRequest, http: Request, tag: Tag = None, drafter: Drafter = None) -> Response:
        chat, names = chat_of(body)
        with renamed(names):
            return await answer_chat(chat, http, tag, worker, partial(ResponseExchange, body=body), drafter)


def chat_of(body: ResponsesRequest) -> tuple[ChatRequest, dict[str, str]]:
    """Convert a request to (chat request, names). `names`: field of the chat request -> field of the client's request,
    for error messages. Raises RequestRefused for a missing field, and for fields that may not occur together."""
    messages, names = _messages(body)
    same = {"model", "temperature", "top_p", "parallel_tool_calls"} & body.model_fields_set
    chat = {name: getattr(body, name) for name in same} | STREAM
    chat |= {"messages": messages, "max_tokens": body.max_output_tokens}
    chat["logprobs"] = LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not chat["logprobs"]:
        raise RequestRefused(f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    chat["top_logprobs"] = body.top_logprobs
    if body.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    chat["tool_choice"] = body.tool_choice
    if isinstance(body.tool_choice, ResponseToolChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if body.text and (form := body.text.format):
        if form.type == "json_schema" and form.schema_ is None:
            raise RequestRefused("text.format.schema: the type json_schema needs it", param="text.format.schema")
        chat["response_format"] = {"type": form.type} | ({} if form.schema_ is None else {"schema": form.schema_})
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    return ChatRequest.model_validate(chat), names


def _messages(body: ResponsesRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the conversation as messages of a chat, and a map from fields of the chat to the client's. Consecutive
    reasoning, text and calls become one message of the assistant, because they were one answer."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    names = NAMES | (dict.fromkeys(("messages[0]", "messages[0].content"), "instructions") if messages else {})
    is_text, items = isinstance(body.input, str), body.input
    if isinstance(items, str):
        items = [ResponseItem.model_validate({"role": "user", "content": items})]
    for place, item in enumerate(items):
        where = "input" if is_text else f"input[{place}]"
        optional = ("summary", "content") if item.type == "reasoning" else ()
        check_keys(item, item.type, KEYS[item.type], where, optional)
        if item.type == "function_call_output":
            output = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
        else:
            if not messages or messages[-1]["role"] != "assistant" or _begins(item, messages[-1]):
                messages.append({"role": "assistant", "content": ""})
            _add(messages[-1], item, where)
            if item.type == "function_call":
                call = len(messages[-1]["tool_calls"]) - 1
                names[f"messages[{len(messages) - 1}].tool_calls[{call}].function"] = where
        names.setdefault(f"messages[{len(messages) - 1}]", where)
    if is_text:
        names[f"messages[{len(messages) - 1}].content"] = "input"
    return messages, names


def _begins(item: ResponseItem, message: dict[str, Any]) -> bool:
    """Return True if the item starts a new message: reasoning comes before text, and text before calls."""
    return item.type != "function_call" and bool(message["content"] or "tool_calls" in message)


def _add(message: dict[str, Any], item: ResponseItem, where: str) -> None:
    """Add the assistant's item to its message."""
    if item.type == "function_call":
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        message.setdefault("tool_calls", []).append(call)
    elif item.type == "message":
        message["content"] = _text(item.content, f"{where}.content")
    else:
        part = "content" if item.content else "summary"
        texts = (message.get("reasoning_content"), _text(getattr(item, part), f"{where}.{part}"))
        message["reasoning_content"] = "\n".join(filter(None, texts))


def _text(content: str | list[ResponsePart] | None, where: str) -> str:
    """Return the text; parts are joined by line breaks, like content parts of a chat."""
    if content is None or isinstance(content, str):
        return content or ""
    for place, part in enumerate(content):
        check_keys(part, part.type, {"refusal" if part.type == "refusal" else "text"}, f"{where}[{place}]")
    return "\n".join(part.text or part.refusal or "" for part in content)


class ResponseExchange(Translated):
    """One request to OpenAI's Responses API. Converts its answer to that API's format."""

    def __init__(self, *arguments: Any, body: ResponsesRequest, **options: Any) -> None:
        super().__init__(*arguments, is_stream=bool(body.stream), **options)
        self._body = body
        self._num_events = 0
        self._error: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return self._response() | {"output": [_item(part, self._status) for part in self.parts]}

    def sent(self, event: dict[str, Any]) -> bytes:
        self._num_events += 1
        return super().sent(event | {"sequence_number": self._num_events - 1})

    def failed(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = {"code": code, "message": error.message}
        return self.sent({"type": "response.failed", "response": self.body()})

    def begun(self) -> Iterator[dict[str, Any]]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self.body()}

    def opened(self, part: Part) -> Iterator[dict[str, Any]]:
        empty = Part(part.call and part.call | {"arguments": ""}, key=part.key)
        item = _item(empty, "in_progress")
        if not part.call:
            item["content"] = []
        yield {"type": "response.output_item.added", "output_index": self._place, "item": item}
        if not part.call:
            yield {"type": "response.content_part.added", **self._at(part), "part": _text_part(empty)}

    def grown(self, part: Part, text: str, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if part.call:
            yield {"type": "response.function_call_arguments.delta", **self._at(part), "delta": text}
        else:
            yield {"type": "response.output_text.delta", **self._at(part), "delta": text, "logprobs": logprobs}

    def closed(self, part: Part) -> Iterator[dict[str, Any]]:
        if part.call:
            names = {"name": part.call["name"], "arguments": part.call["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._at(part), **names}
        else:
            yield {"type": "response.output_text.done", **self._at(part), "text": part.text, "logprobs": part.logprobs}
            yield {"type": "response.content_part.done", **self._at(part), "part": _text_part(part)}
        status = self._status if self.finish_reason else "completed"
        yield {"type": "response.output_item.done", "output_index": self._place, "item": _item(part, status)}

    def finished(self) -> Iterator[dict[str, Any]]:
        yield {"type": f"response.{self._status}", "response": self.body()}

    @property
    def _status(self) -> str:
        if self._error:
            return "failed"
        if not self.finish_reason:
            return "in_progress"
        return "incomplete" if self.finish_reason == "length" else "completed"

    def _at(self, part: Part) -> dict[str, Any]:
        place = {"output_index": self._place, "item_id": _item_id(part)}
        return place if part.call else place | {"content_index": 0}

    def _response(self) -> dict[str, Any]:
        """Return the response object without its output."""
        request, status = self._body, self._status
        plain = request.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "model": self.name,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": plain.get("text") or {"format": {"type": "text"}},
            "tool_choice": plain.get("tool_choice") or "auto",
            "tools": [{"parameters": None, "strict": None} | tool for tool in plain.get("tools", [])],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._counts(),
        } | self.marks

    def _counts(self) -> dict[str, Any] | None:
        if not self.usage:
            return None
        return {
            "input_tokens": self.usage["prompt_tokens"],
            "input_tokens_details": self.usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": self.usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage["total_tokens"],
        }


def _item_id(part: Part) -> str:
    return f"{'fc' if part.call else 'msg'}_{part.key}"


def _text_part(part: Part) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _item(part: Part, status: str) -> dict[str, Any]:
    """Return a part as an item of the response's output."""
    known = {"id": _item_id(part), "status": "incomplete" if status == "failed" else status}
    if part.call is None:
        return {"type": "message", "role": "assistant", "content": [_text_part(part)], **known}
    call = {name: part.call[name] for name in ("name", "arguments")}
    return {"type": "function_call", "call_id": part.call["id"], **call, **known}
