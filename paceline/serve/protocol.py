"""What clients may send, in OpenAI's words; fields we do not know are ignored.

Where OpenAI has a bound it is ours; others are wide enough for any sensible request and narrow enough that no logit leaves the
range of float32. `/docs` shows what is said of each field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Open(BaseModel):
    """Unknown fields are ignored; NaN and infinities are not JSON and are refused."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True)


class StreamOptions(Open):
    include_usage: bool = Field(False, description="Counts of tokens in a last chunk of their own.")


class JsonSchema(Open):
    name: str = Field("answer", description="Not read.")
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema", description="What the answer has to be.")
    strict: bool | None = Field(None, description="Not read: an answer always keeps to its schema.")


class ResponseFormat(Open):
    """text, json_object, json_schema (with `json_schema`), or regex (with `regex`)."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, description="The answer matches this from end to end.")


class Function(Open):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, description="What the function is for, in words for the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Not read: a call that is forced always keeps to its schema.")


class CalledFunction(Open):
    name: str
    arguments: str = Field("{}", description="A JSON object, as text.")


class Tool(Open):
    type: Literal["function"] = "function"
    function: Function


class ContentPart(Open):
    type: str = Field(description="text or input_text: this server reads nothing else.")
    text: str | None = None


class ToolCall(Open):
    """Of a choice of tool only the name is read."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Open):
    """One message of a conversation. Content is text, or a list of text parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(description="Who speaks.")
    content: str | list[ContentPart] | None = Field(None, description="What was said.")
    name: str | None = Field(None, description="Who said it, where the model's chat template shows names.")
    tool_calls: list[ToolCall] | None = Field(None, description="Of an assistant: the calls it made.")
    tool_call_id: str | None = Field(None, description="Of a tool: the call that it answers.")


class Sampling(Open):
    """What both kinds of completion share."""

    model: str | None = Field(None, description="The model's name, as of /v1/models; there is only one.")
    n: int | None = Field(1, ge=1)
    """Answers to the prompt. With a seed the first has this seed, the next ones seed + 1, seed + 2, ..."""
    stream: bool | None = Field(False, description="Send the answer as it grows, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="With stream only.")
    seed: int | None = Field(None, description="The same seed gives the same text; without, one is drawn.")
    stop: str | Annotated[list[str], Field(max_length=16)] | None = Field(None, description="Text that ends the answer.")
    stop_token_ids: list[int] | None = Field(None, max_length=64, description="Tokens that end the answer.")
    max_tokens: int | None = Field(None, ge=1)
    """Longest answer, in tokens. Without, a chat answer has the server's --default-max-tokens, a text completion 16."""
    temperature: float | None = Field(None, ge=0, le=2, description="1.0 when left out, as OpenAI has it; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keep the most likely tokens that together reach this.")
    top_k: int | None = Field(None, ge=-1, description="Keep so many of the most likely tokens; 0 and -1 keep all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Keep tokens at least so many times as likely as the best one.")
    presence_penalty: float | None = Field(None, ge=-100, le=100, description="Taken once from a token that was said already.")
    frequency_penalty: float | None = Field(None, ge=-100, le=100, description="Taken for each time it was said.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Divides what was said already; 1 is off.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    """Token id, as text -> what is added to its logit; -100 forbids it."""
    ignore_eos: bool | None = Field(False, description="Go on to max_tokens whatever the model says.")
    response_format: ResponseFormat | None = None
    guided_regex: str | None = Field(None, description="As response_format of type regex.")
    guided_json: dict[str, Any] | str | None = Field(None, description="As response_format of type json_schema.")
    speculate: Literal["auto", "full", "off"] | Annotated[int, Field(ge=0, le=1024)] | None = None
    """off decodes plainly, a number drafts at most so many tokens a round; the rest leaves it to the server."""
    lossy: str | dict[str, str | float] | None = None
    """NOT lossless, and only where the server allows it: a rule that lets drafts stand which the model alone would refuse, as
    "typical:eps=0.09,delta=0.3" or {"rule": "lenience", "l": 0.5, "max_tv": 0.02}. The answer says lossless: false,
    and what that cost."""
    return_metrics: bool | None = False
    """Adds `metrics.speculative_decoding`: mean_acceptance_length, draft_acceptance_rate, acceptance_histogram, drafter (the
    member of the pool that the answer had), and rounds_by_source with the figures of each source of drafts."""
    return_token_ids: bool | None = False
    """Adds `token_ids` to each choice, and the prompt's as `prompt_token_ids`, as vLLM does."""
    return_timings: bool | None = False
    """Adds `timings`: seconds of each part of the request's way through the server, which together are total_s. When streaming,
    in the last chunk."""
    paceline_timings: bool | None = False
    """Adds a `paceline` field: where the time went; when streaming, how many tokens of each chunk were drafted."""


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1, description="The conversation so far, the question last.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Takes the place of max_tokens.")
    logprobs: bool | None = Field(False, description="Tell each token's log-probability.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="And those of so many other tokens; needs logprobs.")
    tools: list[Tool] | None = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolCall | None = None
    """auto lets the model decide; required, or a function by name, makes the answer a call."""
    parallel_tool_calls: bool | None = Field(True, description="Not read: an answer may hold several calls.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the model's chat template.")


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]] = Field(description="A text or its token ids, or several of them.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Log-probability of each token, and of so many others.")
    echo: bool | None = Field(False, description="Put the prompt before the answer.")
    suffix: str | None = Field(None, description="Refused: models here only go on.")
    best_of: int | None = Field(None, description="Must equal n: answers are not ranked.")


class TokenizeRequest(Open):
    """A text, or a conversation to be put through the chat template."""

    model: str | None = Field(None, description="The model's name, as of /v1/models.")
    prompt: str | None = Field(None, description="A text.")
    messages: list[Message] | None = Field(None, description="A conversation, in place of a text.")
    add_special_tokens: bool | None = Field(True, description="With the tokens that the model expects around a text.")


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int = Field(description="Tokens of prompt and answer together that this server holds.")
    tokens: list[int]


class DetokenizeRequest(Open):
    model: str | None = Field(None, description="The model's name, as of /v1/models.")
    tokens: list[int] = Field(description="Token ids, as /tokenize gives them.")


class DetokenizeAnswer(BaseModel):
    prompt: str


class LoadRequest(Open):
    drafter: str = Field(min_length=1, max_length=4096, description="A folder on the server, a hub id, or a drafter's name.")


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every error has this shape."""

    error: ErrorBody
