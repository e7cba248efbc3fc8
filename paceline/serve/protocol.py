"""What clients may send, in OpenAI's words; fields we do not know are ignored.

Bounds are wide enough for any sensible request and narrow enough that no logit leaves the range of float32.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Open(BaseModel):
    """Unknown fields are ignored; NaN and infinities are not JSON and are refused."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Open):
    include_usage: bool = False


class JsonSchema(Open):
    name: str = "answer"
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Open):
    """text, json_object, json_schema (with `json_schema`), or regex (with `regex`)."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Function(Open):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CalledFunction(Open):
    name: str
    arguments: str = "{}"


class Tool(Open):
    type: Literal["function"] = "function"
    function: Function


class ContentPart(Open):
    type: str
    text: str | None = None


class ToolCall(Open):
    """Of a choice of tool only the name is read."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Open):
    """One message of a conversation. Content is text, or a list of text parts."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Sampling(Open):
    """What both kinds of completion share."""

    model: str | None = None
    n: int | None = Field(1, ge=1)
    """Answers to the prompt. With a seed the first has this seed, the next ones seed + 1, seed + 2, ..."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=64)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    """1.0 when left out, as OpenAI has it; 0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = False
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    speculate: Literal["auto", "full", "off"] | Annotated[int, Field(ge=0, le=1024)] | None = None
    """off decodes plainly, a number drafts at most so many tokens a round; the rest leaves it to the server."""
    return_metrics: bool | None = False
    """Adds `metrics.speculative_decoding`: mean_acceptance_length, draft_acceptance_rate, acceptance_histogram, and
    rounds_by_source with the figures of each source of drafts."""
    paceline_timings: bool | None = False
    """Adds a `paceline` field: where the time went; when streaming, how many tokens of each chunk were drafted."""


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """Takes the place of max_tokens. Without either the answer may fill the context."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolCall | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the model's chat template."""


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(Open):
    """A text, or a conversation to be put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = True


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Open):
    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error has this shape."""

    error: ErrorBody
